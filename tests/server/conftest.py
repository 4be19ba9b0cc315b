"""A server shared by the tests of a module."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1]))

from helpers.serving import Running, running


@pytest.fixture(scope="module")
def shared() -> Iterator[Running]:
    """One server per module."""
    with running() as server:
        yield server


@pytest.fixture
def server(shared: Running) -> Running:
    """The module's server with a fresh script."""
    shared.reset()
    return shared
