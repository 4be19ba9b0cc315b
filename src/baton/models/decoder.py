"""The shell every family shares: embedding, a stack of pre-norm blocks, norm, head."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import nn

from baton.attention.backend import make_attention
from baton.attention.local import LocalAttention
from baton.attention.positions.rotary import RotaryPositions
from baton.attention.positions.unrotated import Unrotated
from baton.attention.spec import AttentionNeed, AttentionSpec
from baton.config.model import GQAConfig, ModelConfig
from baton.core.forward import ForwardBatch, ForwardContext, Hidden
from baton.core.kv import KVView
from baton.layers.embedding import VocabWeight
from baton.layers.gqa import gqa_spec
from baton.layers.mla import mla_spec
from baton.layers.norm import RMSNorm
from baton.layers.weights import LayerContext
from baton.models.block import Block
from baton.models.mtp import MTP, checkpoint_name

Aliases = Callable[[str], tuple[str, ...]]


class Decoder(nn.Module):
    """Embedding, blocks and final norm; the checkpoint's `model.`."""

    def __init__(self, context: LayerContext, config: ModelConfig) -> None:
        super().__init__()
        hidden = config.hidden_size
        self.embed_tokens = VocabWeight(context, "embed_tokens", config.vocab_size, hidden)
        routed = config.moe_layers or (False,) * config.num_layers
        blocks = [Block(context, config, one) for one in routed]
        self.layers = nn.ModuleList(blocks)
        self.norm = RMSNorm(context, "norm", hidden, config.norm_eps)
        #: what norms the hidden states that go into each layer, and those behind the last one
        self.norms = [*(block.input_layernorm for block in blocks), self.norm]


class CausalLM(nn.Module):
    """A decoder with its head; a `core.forward.Model`.

    Made on the meta device: `models.load` gives it memory and weights, on `device`.
    """

    def __init__(
        self,
        config: ModelConfig,
        context: LayerContext,
        device: torch.device,
        attention_backend: str,
        aliases: Aliases,
    ) -> None:
        super().__init__()
        self.config, self.device, self._aliases = config, device, aliases
        spec: AttentionSpec
        if isinstance(config.attention, GQAConfig):
            spec = gqa_spec(config.attention, config.softmax_scale, context)
        else:
            spec = mla_spec(config.attention, config.softmax_scale, context)
        layers = config.num_layers + int(config.mtp)  # the MTP module's is the last one
        self.kv_shapes = [spec.kv_shape] * layers
        positions = RotaryPositions(config.rope, context.dtype, device)
        need = AttentionNeed(spec, context.dtype, device)
        self.attention = make_attention(attention_backend, need, positions)
        #: attention of each kind of layer, and the kind of each layer
        self.attentions, self.kinds = [self.attention], [0] * layers
        if (local := config.local) is not None:
            backends = self.attention.prefill, self.attention.decode
            self.attention.positions = Unrotated(config.rope.dim, local.log_base)
            self.attentions.append(LocalAttention(*backends, positions, local.block))
            self.kinds = [int(i not in local.global_layers) for i in range(layers)]
        self.model = Decoder(context, config)
        self.mtp = MTP(context, config) if config.mtp else None
        self.lm_head = (
            None
            if config.tie_embeddings
            else VocabWeight(context, "lm_head", config.vocab_size, config.hidden_size)
        )

    @property
    def graphable(self) -> bool:
        """Whether a step of decodes can be captured in a CUDA graph."""
        return self.attention.graphable

    @property
    def graph_prompts(self) -> bool:
        """Whether that of a prompt can be: where it is a single piece for attention."""
        return self.config.local is None

    @property
    def drafts(self) -> bool:
        """See `Model`."""
        return self.mtp is not None

    def aliases(self, name: str) -> tuple[str, ...]:
        """What else a checkpoint may call the tensor `name`."""
        if self.mtp is not None and name.startswith("mtp."):
            name = checkpoint_name(name, self.config.num_layers)
            return name, *self._aliases(name)
        return self._aliases(name)

    def plan(self, batch: ForwardBatch, kv: Sequence[KVView]) -> ForwardContext:
        """Make the step's attention plan for each kind of layer."""
        plans = [attention.plan(batch, kv[0].page_size) for attention in self.attentions]
        return ForwardContext(batch, plans, kv)

    def brief(self) -> Brief:
        """See `Model`."""
        mlps = [type(layer.mlp) for layer in self.model.layers]
        kinds = list(zip(mlps, self.kinds, strict=False))  # the MTP module's is left over
        return Brief(self, [kinds.index(kind) for kind in dict.fromkeys(kinds)])

    def forward(self, ids: torch.Tensor, context: ForwardContext) -> torch.Tensor:
        """Token ids int64 `[T]` -> final normed hidden states `[T, hidden]`; KV is stored."""
        return self.through(self.embed(ids), context, 0, len(self.model.layers)).normed

    def embed(self, ids: torch.Tensor) -> Hidden:
        """See `Model`."""
        return Hidden(*self.model.embed_tokens.embed_normed(ids, self.model.norms[0]))

    def through(self, hidden: Hidden, context: ForwardContext, first: int, last: int) -> Hidden:
        """See `Model`."""
        for i in range(first, last):
            layer, view, kind = self.model.layers[i], context.kv[i], self.kinds[i]
            attention, plan = self.attentions[kind], context.plan[kind]
            hidden.normed, hidden.states = layer(
                hidden.normed, hidden.states, attention, plan, view, self.model.norms[i + 1]
            )
        return hidden

    def draft(
        self, hidden: torch.Tensor, following: torch.Tensor, context: ForwardContext
    ) -> torch.Tensor:
        """See `Model`."""
        assert self.mtp is not None, "a model without an MTP module drafts nothing"
        kind = self.kinds[-1]
        embedded = self.model.embed_tokens.embed(following)
        attention, plan, view = self.attentions[kind], context.plan[kind], context.kv[-1]
        found: torch.Tensor = self.mtp(hidden, embedded, attention, plan, view)
        return found

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Hidden states `[S, hidden]` -> float32 logits `[S, vocab]`, the whole vocabulary
        (float64 for float64 models)."""
        head = self.model.embed_tokens if self.lm_head is None else self.lm_head
        return head.logits(hidden)


class Brief:
    """Some layers of a model; a `core.forward.Model` that shares everything with it."""

    def __init__(self, whole: CausalLM, layers: Sequence[int]) -> None:
        self._whole, self._layers = whole, layers
        self.kv_shapes = whole.kv_shapes
        self.graphable, self.graph_prompts = whole.graphable, whole.graph_prompts
        self.plan, self.logits = whole.plan, whole.logits
        self.embed, self.through = whole.embed, whole.through
        self.drafts, self.draft = whole.drafts, whole.draft

    def brief(self) -> Brief:
        """See `Model`."""
        return self

    def forward(self, ids: torch.Tensor, context: ForwardContext) -> torch.Tensor:
        """See `Model`."""
        hidden = self.embed(ids)
        for i in self._layers:
            hidden = self.through(hidden, context, i, i + 1)
        return hidden.normed
