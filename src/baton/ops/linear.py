"""`x W^T + b`."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from baton.ops.dispatch import on_gpu


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """The library's GEMM, or on a GPU, for few tokens and a small weight, a kernel that does not
    wait to load it.

    Args:
        x: `[..., K]`.
        weight: `[N, K]`.
        bias: `[N]`.

    Returns:
        `[..., N]`, summed in float32 (float64 for float64).
    """
    if bias is None and on_gpu(x, weight):
        from baton.ops.triton import linear as kernels

        if kernels.supported(x, weight):
            return kernels.linear(x, weight)
    return F.linear(x, weight, bias)
