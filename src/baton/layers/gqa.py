"""Grouped-query attention with its projections (arXiv 2305.13245)."""

from __future__ import annotations

import torch
from torch import nn

from baton.attention.backend import Attention, AttentionPlan
from baton.attention.spec import GQASpec
from baton.config.model import GQAConfig
from baton.core.kv import KVView
from baton.layers.linear import column, row
from baton.layers.norm import RMSNorm
from baton.layers.weights import LayerContext, split_even, split_kv_heads
from baton.ops.qkv import gqa_heads


def gqa_spec(config: GQAConfig, scale: float, context: LayerContext) -> GQASpec:
    """This rank's share of the heads."""
    heads = split_even(config.num_heads, context.group, "the number of attention heads")
    kv_heads = split_kv_heads(config.num_kv_heads, 1, context.group)
    return GQASpec(heads.size, kv_heads.size, config.head_dim, scale)


class GQA(nn.Module):
    """`o(attend(rope(norm(q x)), rope(norm(k x)), v x))`; the norms, per head, only with
    `qk_norm`."""

    def __init__(self, context: LayerContext, config: GQAConfig, hidden: int, eps: float) -> None:
        super().__init__()
        dim = config.head_dim
        q = split_even(config.num_heads, context.group, "the number of attention heads", dim)
        kv = split_kv_heads(config.num_kv_heads, dim, context.group)
        self.heads, self.eps = (q.size // dim, kv.size // dim), eps
        parts = {"q_proj": q, "k_proj": kv, "v_proj": kv}
        self.qkv_proj = column(context, hidden, parts, bias=config.bias)
        self.o_proj = row(context, "o_proj", q, hidden, bias=config.bias)
        self.q_norm = RMSNorm(context, "q_norm", dim, eps) if config.qk_norm else None
        self.k_norm = RMSNorm(context, "k_norm", dim, eps) if config.qk_norm else None

    def forward(
        self, x: torch.Tensor, attention: Attention, plan: AttentionPlan, view: KVView
    ) -> torch.Tensor:
        """`[T, hidden] -> [T, hidden]`; the tokens' keys and values go to `view`."""
        norms = None
        if self.q_norm is not None and self.k_norm is not None:
            norms = self.q_norm.weight, self.k_norm.weight
        q, k, v = gqa_heads(
            self.qkv_proj(x), self.heads, norms, self.eps, plan.rotation, view, plan.slots
        )
        out = attention.gqa(plan, view, q, k, v, stored=True)
        y: torch.Tensor = self.o_proj(out.flatten(1))
        return y
