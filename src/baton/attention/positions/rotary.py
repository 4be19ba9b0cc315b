"""Plain rotary positions, with whatever frequency scaling the model was trained for."""

from __future__ import annotations

import torch

from baton.config.model import RopeConfig
from baton.ops.dtypes import wide
from baton.ops.rope import Rotation, angles, attention_scaling, inverse_frequencies

__all__ = ["RotaryPositions", "Rotation"]


class RotaryPositions:
    """Angles of any position, computed when asked.

    There is no table: a step's angles are `tokens * dim / 2` cosines, nothing beside one layer,
    and 512K positions then cost no memory and no start-up time.
    """

    def __init__(self, rope: RopeConfig, dtype: torch.dtype, device: torch.device) -> None:
        self._interleaved = rope.interleaved
        self._scaling = attention_scaling(rope)
        self._frequencies = inverse_frequencies(rope, wide(dtype)).to(device)

    def rotation(self, positions: torch.Tensor) -> Rotation:
        """Angles of `positions` (int64 `[T]`), in float32 (float64 for float64 models)."""
        return Rotation(*angles(positions, self._frequencies, self._scaling), self._interleaved)

    def query_scale(self, positions: torch.Tensor) -> torch.Tensor | None:
        """Factor on each query, `[T, 1, 1]`; None: 1."""
        return None
