"""What tests on a card share: they are marked `gpu` and skipped where there is none, begin with the
same random numbers, and run what users run: under `BATON_DEBUG`, which other tests set, no step is
a graph."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from baton.ops import dispatch


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    missing = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
    for item in items:
        if item.path.parent == Path(__file__).parent:
            item.add_marker(pytest.mark.gpu)
            item.add_marker(missing)


@pytest.fixture(autouse=True)
def as_users_run_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BATON_DEBUG", "0")


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


@pytest.fixture
def plain(monkeypatch: pytest.MonkeyPatch):
    """Runs a call on the plain PyTorch path, on the card."""

    def run(call, *args):
        with monkeypatch.context() as patch:
            patch.setattr(dispatch, "has_triton", lambda: False)
            return call(*args)

    return run
