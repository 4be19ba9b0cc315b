"""Routed experts through PyTorch's grouped GEMM (CUTLASS on sm_90), for many tokens.

Tokens are copied into expert order first (`4 T K H` bytes more than reading them by index) and
SiLU runs between the GEMMs (`6 T K I` more), in exchange for GEMMs that overlap their epilogues.
Which wins, and from how many tokens per expert on, is measured by `benchmarks/ops/moe.py`.
"""

from __future__ import annotations

import torch

from baton.ops.triton.activation import silu_mul
from baton.ops.triton.align import align
from baton.ops.triton.combine import Products


def products(
    x: torch.Tensor,
    experts: torch.Tensor,
    weights: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    shared: torch.Tensor | None = None,
) -> Products:
    """See `ops.moe.expert_mlp`, whose sum is left; bfloat16 only. Groups' sizes stay on the
    device."""
    weights = weights.contiguous()  # a copy behind y's kernel would still run when `Products` reads
    plan = align(experts.contiguous(), gate_up.shape[0], 1)
    rows = x.index_select(0, plan.rows.div(experts.shape[1], rounding_mode="floor"))
    middle = silu_mul(torch._grouped_mm(rows, gate_up.transpose(1, 2), offs=plan.ends))
    y = torch._grouped_mm(middle, down.transpose(1, 2), offs=plan.ends)
    return Products(y, weights, plan.place, shared)
