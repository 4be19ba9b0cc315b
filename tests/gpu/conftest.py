"""The card runs what users run: under `BATON_DEBUG`, which other tests set, no step is a graph."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def as_users_run_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BATON_DEBUG", "0")
