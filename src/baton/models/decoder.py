"""The shell every family shares: embedding, a stack of pre-norm blocks, norm, head."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import nn

from baton.attention.backend import Attention, AttentionPlan, make_attention
from baton.attention.positions.rotary import RotaryPositions
from baton.attention.spec import AttentionNeed, AttentionSpec
from baton.config.model import GQAConfig, ModelConfig
from baton.core.forward import ForwardBatch, ForwardContext, Hidden
from baton.core.kv import KVView
from baton.layers.embedding import VocabWeight
from baton.layers.gqa import GQA, gqa_spec
from baton.layers.mla import MLA, mla_spec
from baton.layers.mlp import MLP
from baton.layers.moe import MoE
from baton.layers.norm import RMSNorm
from baton.layers.weights import LayerContext

Aliases = Callable[[str], tuple[str, ...]]


class Block(nn.Module):
    """`x += attention(norm(x)); x += mlp(norm(x))`, where mlp is dense or routed."""

    def __init__(self, context: LayerContext, config: ModelConfig, index: int) -> None:
        super().__init__()
        hidden, eps = config.hidden_size, config.norm_eps
        self.input_layernorm = RMSNorm(context, "input_layernorm", hidden, eps)
        self.self_attn: GQA | MLA
        if isinstance(config.attention, GQAConfig):
            self.self_attn = GQA(context, config.attention, hidden, eps)
        else:
            self.self_attn = MLA(context, config.attention, hidden)
        self.post_attention_layernorm = RMSNorm(context, "post_attention_layernorm", hidden, eps)
        self.mlp: MLP | MoE
        if config.moe is not None and config.moe_layers[index]:
            self.mlp = MoE(context, config.moe, hidden)
        else:
            self.mlp = MLP(context, hidden, config.intermediate_size, config.mlp_bias)

    def forward(
        self,
        x: torch.Tensor,
        residual: torch.Tensor | None,
        attention: Attention,
        plan: AttentionPlan,
        view: KVView,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """`x`, `residual` `[T, hidden]` -> the same; their sum is the hidden state."""
        if residual is None:
            x, residual = self.input_layernorm(x), x
        else:
            x, residual = self.input_layernorm.add(x, residual)
        x = self.self_attn(x, attention, plan, view)
        x, residual = self.post_attention_layernorm.add(x, residual)
        return self.mlp(x), residual


class Decoder(nn.Module):
    """Embedding, blocks and final norm; the checkpoint's `model.`."""

    def __init__(self, context: LayerContext, config: ModelConfig) -> None:
        super().__init__()
        hidden = config.hidden_size
        self.embed_tokens = VocabWeight(context, "embed_tokens", config.vocab_size, hidden)
        self.layers = nn.ModuleList(Block(context, config, i) for i in range(config.num_layers))
        self.norm = RMSNorm(context, "norm", hidden, config.norm_eps)


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
        self.config, self.device, self.aliases = config, device, aliases
        spec: AttentionSpec
        if isinstance(config.attention, GQAConfig):
            spec = gqa_spec(config.attention, config.softmax_scale, context)
        else:
            spec = mla_spec(config.attention, config.softmax_scale, context)
        self.kv_shapes = [spec.kv_shape] * config.num_layers
        positions = RotaryPositions(config.rope, context.dtype, device)
        need = AttentionNeed(spec, context.dtype, device)
        self.attention = make_attention(attention_backend, need, positions)
        self.model = Decoder(context, config)
        self.lm_head = (
            None
            if config.tie_embeddings
            else VocabWeight(context, "lm_head", config.vocab_size, config.hidden_size)
        )

    @property
    def graphable(self) -> bool:
        """Whether a step of decodes can be captured in a CUDA graph."""
        return self.attention.graphable

    def plan(self, batch: ForwardBatch, kv: Sequence[KVView]) -> ForwardContext:
        """Make the step's attention plan, shared by all layers."""
        return ForwardContext(batch, self.attention.plan(batch, kv[0].page_size), kv)

    def brief(self) -> Brief:
        """See `Model`."""
        kinds = [type(layer.mlp) for layer in self.model.layers]
        return Brief(self, [kinds.index(kind) for kind in dict.fromkeys(kinds)])

    def forward(self, ids: torch.Tensor, context: ForwardContext) -> torch.Tensor:
        """Token ids int64 `[T]` -> final normed hidden states `[T, hidden]`; KV is stored."""
        return self.finish(self.through(self.embed(ids), context, 0, len(self.model.layers)))

    def embed(self, ids: torch.Tensor) -> Hidden:
        """See `Model`."""
        return Hidden(self.model.embed_tokens.embed(ids))

    def through(self, hidden: Hidden, context: ForwardContext, first: int, last: int) -> Hidden:
        """See `Model`."""
        x, residual = hidden.x, hidden.residual
        for i in range(first, last):
            layer, view = self.model.layers[i], context.kv[i]
            x, residual = layer(x, residual, self.attention, context.plan, view)
        return Hidden(x, residual)

    def finish(self, hidden: Hidden) -> torch.Tensor:
        """See `Model`."""
        assert hidden.residual is not None, "a model has at least one layer"
        return self.model.norm.add(hidden.x, hidden.residual)[0]

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Hidden states `[S, hidden]` -> float32 logits `[S, vocab]`, the whole vocabulary
        (float64 for float64 models)."""
        head = self.model.embed_tokens if self.lm_head is None else self.lm_head
        return head.logits(hidden)


class Brief:
    """Some layers of a model; a `core.forward.Model` that shares everything with it."""

    def __init__(self, whole: CausalLM, layers: Sequence[int]) -> None:
        self._whole, self._layers = whole, layers
        self.kv_shapes, self.graphable = whole.kv_shapes, whole.graphable
        self.plan, self.logits = whole.plan, whole.logits
        self.embed, self.through, self.finish = whole.embed, whole.through, whole.finish

    def brief(self) -> Brief:
        """See `Model`."""
        return self

    def forward(self, ids: torch.Tensor, context: ForwardContext) -> torch.Tensor:
        """See `Model`."""
        hidden = self.embed(ids)
        for i in self._layers:
            hidden = self.through(hidden, context, i, i + 1)
        return self.finish(hidden)
