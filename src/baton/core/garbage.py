"""Python's garbage collection, put off."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def uncollected() -> Iterator[None]:
    """Inside, no cycles are collected: for seconds that make many objects that stay, which each
    collection walks while all threads wait, or that must not see old objects end."""
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()
