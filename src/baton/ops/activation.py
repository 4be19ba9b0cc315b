"""SwiGLU's elementwise half (Shazeer, arXiv 2002.05202)."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from baton.ops.dispatch import on_gpu


def silu_mul(x: torch.Tensor) -> torch.Tensor:
    """`silu(x[..., :I]) * x[..., I:]` of `x [..., 2I]` -> `[..., I]`, in x's dtype."""
    if on_gpu(x):
        from baton.ops.triton import activation as kernels

        return kernels.silu_mul(x)
    gate, up = x.chunk(2, dim=-1)
    return F.silu(gate) * up
