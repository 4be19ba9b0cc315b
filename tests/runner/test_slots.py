"""What a plan makes of the page tables and lengths that live on the device."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from baton.core.sampling import SamplingParams
from baton.core.step import Admit, Row, StepPlan
from baton.runner.slots import POISON, Slots

CPU = torch.device("cpu")


def plan(*rows: Row, release: list[int] | None = None, admit: tuple[int, ...] = ()) -> StepPlan:
    asked = [Admit(slot, SamplingParams(), 0, 1, 0, [], []) for slot in admit]
    return StepPlan(0, release or [], asked, list(rows))


def row(slot: int, start: int, pages: list[int]) -> Row:
    return Row(slot, start, 1, b"", pages, True)


@pytest.mark.parametrize("debug", [False, True])
def test_tables_grow_and_begin_again(debug: bool) -> None:
    slots = Slots(3, num_pages=50, max_pages=4, device=CPU, debug=debug)
    empty = POISON if debug else 0
    slots.apply(plan(row(2, 0, [7, 9]), row(0, 16, [4]), admit=(2, 0)))
    assert slots.pages.tolist() == [[4, *[empty] * 3], [empty] * 4, [7, 9, empty, empty], [50] * 4]
    assert slots.computed.tolist() == [16, empty, 0, 0]
    slots.apply(plan(row(2, 1, []), row(0, 17, [3, 5])))
    slots.apply(plan(row(2, 2, [8]), row(0, 18, [6])))
    assert slots.pages[[0, 2]].tolist() == [[4, 3, 5, 6], [7, 9, 8, empty]]
    assert slots.computed.tolist() == [16, empty, 0, 0], "only an admission says how much is there"
    slots.apply(plan(row(2, 32, [1]), release=[2], admit=(2,)))
    left = empty if debug else 9
    assert slots.pages[2].tolist() == [1, left, empty if debug else 8, empty]
    assert slots.pages[0].tolist() == [4, 3, 5, 6]
    assert slots.computed.tolist() == [16, empty, 32, 0]
    assert slots.pages[slots.scrap].tolist() == [50] * 4


def test_one_copy_and_one_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many requests begin; a step that brings nothing does nothing."""
    slots = Slots(3, num_pages=50, max_pages=4, device=CPU, debug=False)
    written: list[Any] = []
    real = torch.Tensor.index_copy_
    monkeypatch.setattr(
        torch.Tensor, "index_copy_", lambda self, *args: written.append(args) or real(self, *args)
    )
    slots.apply(plan(row(2, 0, [7, 9]), row(0, 16, [4]), row(1, 5, [6, 8, 2]), admit=(2, 0)))
    assert len(written) == 1
    slots.apply(plan(row(2, 1, []), row(0, 17, []), release=[1]))
    assert len(written) == 1
