"""Multi-head latent attention with its projections (DeepSeek-V2, arXiv 2405.04434, 2.1)."""

from __future__ import annotations

import torch
from torch import nn

from baton.attention.backend import Attention, AttentionPlan
from baton.attention.spec import MLASpec
from baton.config.model import MLAConfig
from baton.core.kv import KVView
from baton.layers.linear import column, row
from baton.layers.norm import RMSNorm
from baton.layers.weights import LayerContext, split_even, whole
from baton.ops.qkv import mla_heads

LATENT_EPS = 1e-6  # of the norms on latents: the family fixes it, whatever rms_norm_eps says


def mla_spec(config: MLAConfig, scale: float, context: LayerContext) -> MLASpec:
    """This rank's share of the heads."""
    heads = split_even(config.num_heads, context.group, "the number of attention heads")
    return MLASpec(
        heads.size, config.kv_lora_rank, config.nope_dim, config.rope_dim, config.v_dim, scale
    )


class MLA(nn.Module):
    """Queries through a latent of their own or directly; keys and values through one shared
    latent and one shared rotated key. Latents are replicated, heads are split over ranks."""

    def __init__(self, context: LayerContext, config: MLAConfig, hidden: int) -> None:
        super().__init__()
        self.config = config
        group, heads, bias = context.group, config.num_heads, config.bias
        what, rank = "the number of attention heads", config.kv_lora_rank
        q_width = config.nope_dim + config.rope_dim
        q = split_even(heads, group, what, q_width)
        up = split_even(heads, group, what, config.nope_dim + config.v_dim)
        out = split_even(heads, group, what, config.v_dim)
        self.heads = q.size // q_width
        # One GEMM for what reads x: queries or their latent, and the latent of keys and values.
        latent = {"kv_a_proj_with_mqa": whole(rank + config.rope_dim)}
        if config.q_lora_rank is None:
            parts = {"q_proj": q} | latent
            self.in_proj = column(context, hidden, parts, latent if bias else False)
        else:
            lora = config.q_lora_rank
            self.in_proj = column(context, hidden, {"q_a_proj": whole(lora)} | latent, bias)
            self.q_a_layernorm = RMSNorm(context, "q_a_layernorm", lora, LATENT_EPS)
            self.q_b_proj = column(context, lora, {"q_b_proj": q})
        self.kv_a_layernorm = RMSNorm(context, "kv_a_layernorm", rank, LATENT_EPS)
        self.kv_b_proj = column(context, rank, {"kv_b_proj": up})
        self.o_proj = row(context, "o_proj", out, hidden, bias=bias)

    def forward(
        self, x: torch.Tensor, attention: Attention, plan: AttentionPlan, view: KVView
    ) -> torch.Tensor:
        """`[T, hidden] -> [T, hidden]`; the tokens' latents go to `view`."""
        config, tokens = self.config, x.shape[0]
        both, width = self.in_proj(x), config.kv_lora_rank + config.rope_dim
        q, kv = both[:, :-width], both[:, -width:]
        if config.q_lora_rank is not None:
            q = self.q_b_proj(self.q_a_layernorm(q))
        q = q.view(tokens, self.heads, config.nope_dim + config.rope_dim)
        norm = self.kv_a_layernorm
        q, latent = mla_heads(q, kv, norm.weight, norm.eps, plan.rotation, view, plan.slots)
        if plan.query_scale is not None:
            q = (q * plan.query_scale).to(q.dtype)
        up = self.kv_b_proj.weight.view(self.heads, -1, config.kv_lora_rank)
        out = attention.mla(plan, view, q, latent, up, stored=True)
        y: torch.Tensor = self.o_proj(out.flatten(1))
        return y
