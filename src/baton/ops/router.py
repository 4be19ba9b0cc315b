"""Which experts a token goes to, and with what weights.

DeepSeek-V2 (arXiv 2405.04434, 2.2) for groups scored by their best expert; DeepSeek-V3
(arXiv 2412.19437, 2.1.2) for sigmoid scores, the load-balancing bias and groups scored by their
two best experts.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from baton.config.model import MoEConfig
from baton.ops.dispatch import on_gpu


def split_weight(weight: torch.Tensor) -> torch.Tensor | None:
    """What `gate` multiplies many tokens with in place of a float32 `weight [E, H]` on a GPU:
    `6 E H` bytes, made once. None where nothing is to be had from that."""
    if not on_gpu(weight) or weight.dtype != torch.float32:
        return None
    from baton.ops.triton import router as kernels

    return kernels.split_weight(weight)


def gate(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    moe: MoEConfig,
    split: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`route` of the logits `x [T, H]` times `weight [E, H]`, multiplied in the weight's dtype.
    `split`: what `split_weight` made of the weight."""
    if on_gpu(weight) and x.dtype == torch.bfloat16 and weight.is_contiguous():
        from baton.ops.triton import router as kernels

        if kernels.supported(weight.shape[0], moe):
            if split is not None and kernels.split_pays(x.shape[0], *weight.shape):
                return kernels.choose(kernels.split_logits(x, split), bias, moe)
            return kernels.choose(kernels.gate_logits(x, weight), bias, moe)
    return route(F.linear(x.to(weight.dtype), weight), bias, moe)


def route(
    logits: torch.Tensor, bias: torch.Tensor | None, moe: MoEConfig
) -> tuple[torch.Tensor, torch.Tensor]:
    """Top-k experts of each token.

    Args:
        logits: `[T, E]` float32 or float64.
        bias: `[E]`, added to the scores for the choice only; None for none.
        moe: top_k, score function, groups, normalisation and scale.

    Returns:
        `(experts int64 [T, K + S], weights [T, K + S])`; weights are the unbiased scores, divided
        by their sum + 1e-20 when `moe.normalise`, times `moe.scale`. The last S columns are the
        `moe.shared_experts`, with weight 1.
    """
    if on_gpu(logits):
        from baton.ops.triton import router as kernels

        if kernels.supported(logits.shape[1], moe):
            return kernels.choose(logits.float()[None], bias, moe)
    scores = logits.sigmoid() if moe.score == "sigmoid" else logits.softmax(-1)
    choice = scores if bias is None else scores + bias
    if moe.groups > 1:
        choice = _keep_best_groups(choice, moe)
    experts = choice.topk(moe.top_k, dim=-1, sorted=False).indices
    weights = scores.gather(-1, experts)
    if moe.normalise:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    weights = weights * moe.scale
    if moe.shared_experts:
        size = logits.shape[0], moe.shared_experts
        shared = torch.arange(moe.shared_experts, device=logits.device) + logits.shape[1]
        experts = torch.cat((experts, shared.expand(size)), -1)
        weights = torch.cat((weights, weights.new_ones(size)), -1)
    return experts, weights


def _keep_best_groups(choice: torch.Tensor, moe: MoEConfig) -> torch.Tensor:
    """-inf for experts outside the `top_groups` best groups of each token."""
    grouped = choice.view(choice.shape[0], moe.groups, -1)
    if moe.group_score == "top2":
        group_scores = grouped.topk(2, dim=-1).values.sum(-1)
    else:
        group_scores = grouped.amax(-1)
    best = group_scores.topk(moe.top_groups, dim=-1, sorted=False).indices
    drop = torch.ones_like(group_scores, dtype=torch.bool).scatter_(-1, best, False)
    return grouped.masked_fill(drop[..., None], -torch.inf).flatten(-2)
