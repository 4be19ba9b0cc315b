"""A pre-norm layer: attention, then a dense or routed MLP."""

from __future__ import annotations

import torch
from torch import nn

from baton.attention.backend import Attention, AttentionPlan
from baton.config.model import GQAConfig, ModelConfig
from baton.core.kv import KVView
from baton.layers.gqa import GQA
from baton.layers.mla import MLA
from baton.layers.mlp import MLP
from baton.layers.moe import MoE
from baton.layers.norm import RMSNorm
from baton.layers.weights import LayerContext


class Block(nn.Module):
    """`x += attention(norm(x)); x += mlp(norm(x))`, where mlp is dense or `routed`."""

    def __init__(self, context: LayerContext, config: ModelConfig, routed: bool) -> None:
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
        if config.moe is not None and routed:
            self.mlp = MoE(context, config.moe, hidden)
        else:
            self.mlp = MLP(context, hidden, config.intermediate_size, config.mlp_bias)

    def forward(
        self,
        normed: torch.Tensor,
        states: torch.Tensor,
        attention: Attention,
        plan: AttentionPlan,
        view: KVView,
        following: RMSNorm,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Hidden states `[T, hidden]`, with `normed` by `input_layernorm` -> normed by `following`,
        and those that come out. What `following` is, the next layer's norm or the last one, this
        layer may do in the kernel that ends it."""
        x = self.self_attn(normed, attention, plan, view)
        normed, states = self.post_attention_layernorm.add(x, states)
        if isinstance(self.mlp, MoE):
            normed, states = self.mlp(normed, states, following)
            return normed, states
        return following.add(self.mlp(normed), states)
