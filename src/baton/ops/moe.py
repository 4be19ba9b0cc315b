"""Routed experts; in plain PyTorch: tokens sorted by expert, one small MLP after another."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

from baton.ops.activation import silu_mul
from baton.ops.dispatch import on_gpu
from baton.ops.dtypes import wide
from baton.ops.norm import add_rms_norm, has_kernel

if TYPE_CHECKING:
    from baton.ops.triton.combine import Products


def backend(gate_up: torch.Tensor, down: torch.Tensor) -> str:
    """What runs experts with these weights: `triton` or `torch`."""
    if on_gpu(gate_up, down):
        from baton.ops.triton import moe as kernels

        if kernels.supported(gate_up[0], gate_up, down):
            return "triton"
    return "torch"


def expert_mlp(
    x: torch.Tensor,
    experts: torch.Tensor,
    weights: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    wide_combine: bool = True,
    shared: torch.Tensor | None = None,
    common: int = 0,
) -> torch.Tensor:
    """`sum_k weights[t, k] * mlp_of(experts[t, k])(x[t]) + shared[t]`.

    Args:
        x: `[T, H]`.
        experts: int64 `[T, K]` in `[0, E)`.
        weights: `[T, K]`, float32 or float64.
        gate_up: `[E, 2I, H]`, gate rows first.
        down: `[E, H, I]`.
        wide_combine: sum the K outputs in float32 (float64 for float64), else in x's dtype. On a
            GPU the sum is always in float32.
        shared: `[T, H]`, what else belongs to the sum.
        common: the last `common` columns of `experts` are the last experts, the same ones for
            every token and with weight 1.

    Returns:
        `[T, H]` in x's dtype. The plain path reads expert counts on the host; the kernels do not.
    """
    products = _products(x, experts, weights, gate_up, down, shared, common)
    if products is not None:
        return products.sum()
    top_k = experts.shape[1]
    order = experts.flatten().argsort(stable=True)
    tokens = order // top_k
    counts = torch.bincount(experts.flatten(), minlength=gate_up.shape[0]).tolist()
    dtype = wide(x.dtype) if wide_combine else x.dtype
    scale = weights.flatten()[order, None].to(dtype)
    out = torch.zeros(x.shape[0], down.shape[1], dtype=dtype, device=x.device)
    start = 0
    for expert, count in enumerate(counts):
        if count == 0:
            continue
        rows = tokens[start : start + count]
        hidden = silu_mul(F.linear(x[rows], gate_up[expert]))
        part = F.linear(hidden, down[expert]).to(dtype) * scale[start : start + count]
        out.index_add_(0, rows, part)
        start += count
    return (out if shared is None else out + shared).to(x.dtype)


def expert_mlp_norm(
    x: torch.Tensor,
    experts: torch.Tensor,
    weights: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    residual: torch.Tensor,
    norm: torch.Tensor,
    eps: float,
    wide_combine: bool = True,
    shared: torch.Tensor | None = None,
    common: int = 0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`add_rms_norm(expert_mlp(...), residual, norm, eps)`, bit for bit; on a GPU the sum, the
    addition and the norm are one kernel."""
    if has_kernel(residual, norm):
        products = _products(x, experts, weights, gate_up, down, shared, common)
        if products is not None:
            return products.add_rms_norm(residual, norm, eps)
    y = expert_mlp(x, experts, weights, gate_up, down, wide_combine, shared, common)
    return add_rms_norm(y, residual, norm, eps)


def _products(
    x: torch.Tensor,
    experts: torch.Tensor,
    weights: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    shared: torch.Tensor | None,
    common: int,
) -> Products | None:
    """`expert_mlp` up to its sum, where kernels do it."""
    if not on_gpu(x, gate_up, down):
        return None
    from baton.ops.triton import moe as kernels

    if not kernels.supported(x, gate_up, down):
        return None
    return kernels.products(x, experts, weights, gate_up, down, shared, common)
