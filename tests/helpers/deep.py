"""Makes chunks go by layers whatever a step really takes."""

from __future__ import annotations

from typing import Any

import pytest

from baton.core.step import Row
from baton.engine import build
from baton.runner.under_way import UnderWay
from baton.scheduler.cost import CostModel


def fix_cost(patch: pytest.MonkeyPatch, seconds: float) -> None:
    """Let the scheduler think that each token takes `seconds`, and nothing else any time."""

    def fixed(cost: CostModel, *_: object) -> None:
        cost.coefficients = (0.0, seconds, 0.0, 0.0, 0.0, 0.0)

    patch.setattr(build, "measure_cost", fixed)
    patch.setattr(CostModel, "observe", lambda *_: None)


def watch_layers(patch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """A list that grows by the layers `[first, last)` of each part of a chunk that runs."""
    parts: list[tuple[int, int]] = []
    advance = UnderWay.advance

    def watched(chunk: UnderWay, row: Row, first: int, last: int) -> Any:
        parts.append((first, last))
        return advance(chunk, row, first, last)

    patch.setattr(UnderWay, "advance", watched)
    return parts
