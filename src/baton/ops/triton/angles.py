"""Cosines and sines of rotary positions, with the bits of PyTorch's.

Bytes per token: 8 read, 8 for each pair written. Both functions reduce their argument on their own;
beyond 105,615 radians (the fastest pair only, from 100K tokens on) that is the slow way, of some
hundred instructions.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from baton.ops.triton.common import cos, follow, overlapping, sin

_BLOCK = 256  # angles of a program


@triton.jit(do_not_specialize=["total"], do_not_specialize_on_alignment=["positions"])
def _angles(
    positions, frequencies, cosines, sines, total, scaling, HALF: tl.constexpr, BLOCK: tl.constexpr
):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = at < total
    frequency = tl.load(frequencies + at % HALF)
    follow()
    angle = tl.load(positions + at // HALF, mask=mask, other=0).to(tl.float32) * frequency
    tl.store(cosines + at, cos(angle) * scaling, mask=mask)
    tl.store(sines + at, sin(angle) * scaling, mask=mask)


def angles(
    positions: torch.Tensor, frequencies: torch.Tensor, scaling: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `ops.rope.angles`; float32 frequencies."""
    half = len(frequencies)
    cosines, sines = (
        torch.empty(len(positions), half, dtype=torch.float32, device=positions.device)
        for _ in range(2)
    )
    if total := cosines.numel():
        _angles[(triton.cdiv(total, _BLOCK),)](
            positions, frequencies, cosines, sines, total, scaling,
            HALF=half, BLOCK=_BLOCK, num_warps=4, launch_pdl=overlapping(),
        )  # fmt: skip
    return cosines, sines
