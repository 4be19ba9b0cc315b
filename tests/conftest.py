"""Shared fixtures. Debug mode is on in every test: unused device rows are poisoned."""

from __future__ import annotations

import os

os.environ.setdefault("BATON_DEBUG", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("BATON_LOG_LEVEL", "warning")

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], str]:
    """`tiny("llama")` -> folder of a small random checkpoint, made once per session."""
    made: dict[str, str] = {}

    def make(family: str) -> str:
        from helpers.tiny import save_tiny

        if family not in made:
            folder = tmp_path_factory.mktemp(family)
            made[family] = str(save_tiny(family, folder))
        return made[family]

    return make
