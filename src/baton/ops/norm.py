"""RMSNorm (Zhang & Sennrich, arXiv 1910.07467), alone, of embedded tokens, and behind a residual
addition."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from baton.ops.dispatch import on_gpu
from baton.ops.dtypes import wide

_WIDEST_KERNEL = 16384


def has_kernel(x: torch.Tensor, *others: torch.Tensor) -> bool:
    """Whether a kernel norms rows of x, beside `others`."""
    return on_gpu(x, *others) and x.shape[-1] <= _WIDEST_KERNEL


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """`x / sqrt(mean(x^2) + eps) * weight` over the last dimension.

    Args:
        x: `[..., D]`, any floating dtype; the mean is taken in float32 (float64 for float64).
        weight: `[D]`.
        eps: added to the mean square.

    Returns:
        `[..., D]` in x's dtype; the normalised value is rounded to it before the weight is
        applied, as the families' training code does.
    """
    if has_kernel(x, weight):
        from baton.ops.triton import norm as kernels

        return kernels.rms_norm(x, weight, eps)
    if x.dtype == wide(x.dtype):
        return F.rms_norm(x, weight.shape, weight, eps)
    return F.rms_norm(x.to(wide(x.dtype)), weight.shape, None, eps).to(x.dtype) * weight


def embed_rms_norm(
    ids: torch.Tensor, table: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """`(rms_norm(rows), rows)` for the rows `ids` (int64 `[T]`) of `table [V, D]`."""
    if has_kernel(table, weight) and table.stride(1) == 1 and ids.is_contiguous():
        from baton.ops.triton import norm as kernels

        return kernels.embed_rms_norm(ids, table, weight, eps)
    rows = F.embedding(ids, table)
    return rms_norm(rows, weight, eps), rows


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """`(rms_norm(x + residual), x + residual)`; shapes and dtypes as in `rms_norm`."""
    if has_kernel(x, residual, weight):
        from baton.ops.triton import norm as kernels

        return kernels.add_rms_norm(x, residual, weight, eps)
    total = x + residual
    return rms_norm(total, weight, eps), total
