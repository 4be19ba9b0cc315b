"""Multi-head latent attention with its projections (DeepSeek-V2, arXiv 2405.04434, 2.1)."""

from __future__ import annotations

import torch
from torch import nn

from baton.attention.backend import Attention, AttentionPlan
from baton.attention.spec import MLASpec
from baton.config.model import MLAConfig
from baton.core.kv import KVView
from baton.layers.linear import column, replicated, row
from baton.layers.norm import RMSNorm
from baton.layers.weights import LayerContext, split_even
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
        if config.q_lora_rank is None:
            self.q_proj = column(context, hidden, {"q_proj": q})
        else:
            lora = config.q_lora_rank
            self.q_a_proj = replicated(context, hidden, {"q_a_proj": lora}, bias)
            self.q_a_layernorm = RMSNorm(context, "q_a_layernorm", lora, LATENT_EPS)
            self.q_b_proj = column(context, lora, {"q_b_proj": q})
        down = {"kv_a_proj_with_mqa": rank + config.rope_dim}
        self.kv_a_proj_with_mqa = replicated(context, hidden, down, bias)
        self.kv_a_layernorm = RMSNorm(context, "kv_a_layernorm", rank, LATENT_EPS)
        self.kv_b_proj = column(context, rank, {"kv_b_proj": up})
        self.o_proj = row(context, "o_proj", out, hidden, bias=bias)

    def forward(
        self, x: torch.Tensor, attention: Attention, plan: AttentionPlan, view: KVView
    ) -> torch.Tensor:
        """`[T, hidden] -> [T, hidden]`; the tokens' latents go to `view`."""
        config, tokens = self.config, x.shape[0]
        if config.q_lora_rank is None:
            q = self.q_proj(x)
        else:
            q = self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x)))
        q = q.view(tokens, self.heads, -1)
        norm, kv = self.kv_a_layernorm, self.kv_a_proj_with_mqa(x)
        q, latent = mla_heads(q, kv, norm.weight, norm.eps, plan.rotation, view, plan.slots)
        up = self.kv_b_proj.weight.view(self.heads, -1, config.kv_lora_rank)
        out = attention.mla(plan, view, q, latent, up, stored=True)
        y: torch.Tensor = self.o_proj(out.flatten(1))
        return y
