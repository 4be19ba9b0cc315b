"""Collections are put off, and come back."""

from __future__ import annotations

import contextlib
import gc
import weakref
from collections.abc import Iterator

import pytest

from baton.core.garbage import uncollected


class Node:
    """Part of a cycle."""

    def __init__(self) -> None:
        self.me = self


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    yield
    gc.enable()


def test_cycles_stay_until_the_end() -> None:
    with uncollected():
        node = weakref.ref(Node())
        for _ in range(100):
            [[] for _ in range(10_000)]  # enough to set a collection off
        assert node() is not None
    assert gc.isenabled()


def test_collections_come_back_after_an_error() -> None:
    with contextlib.suppress(ZeroDivisionError), uncollected():
        raise ZeroDivisionError
    assert gc.isenabled()


def test_it_leaves_off_what_was_off() -> None:
    gc.disable()
    with uncollected():
        pass
    assert not gc.isenabled()
