"""SwiGLU's elementwise half (Shazeer, arXiv 2002.05202)."""

from __future__ import annotations

import torch
import torch.nn.functional as F


def silu_mul(x: torch.Tensor) -> torch.Tensor:
    """`silu(x[..., :I]) * x[..., I:]` of `x [..., 2I]` -> `[..., I]`, in x's dtype."""
    gate, up = x.chunk(2, dim=-1)
    return F.silu(gate) * up
