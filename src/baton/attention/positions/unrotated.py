"""No positions at all: order is known only from what lies before (NoPE, arXiv 2305.19466)."""

from __future__ import annotations

import math

import torch

from baton.attention.positions.rotary import RotaryPositions, Rotation


class Unrotated(RotaryPositions):
    """Turns nothing; scores grow with the logarithm of the length (SSMax, arXiv 2501.19399), which
    keeps attention as sharp over many tokens as it is over few.

    Args:
        dim: width of what would be rotated.
        base: tokens at which scores are as they are.
    """

    def __init__(self, dim: int, base: int) -> None:
        self._half, self._base = dim // 2, base

    def rotation(self, positions: torch.Tensor) -> Rotation:
        """Of angle 0."""
        cos = torch.ones(len(positions), self._half, device=positions.device)
        return Rotation(cos, torch.zeros_like(cos), True)

    def query_scale(self, positions: torch.Tensor) -> torch.Tensor:
        """`log(position + 2) / log(base)`, float32 `[T, 1, 1]`."""
        scale = (positions.float() + 2).log() / math.log(self._base)
        return scale[:, None, None]
