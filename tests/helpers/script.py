"""Scripts beside the package, loaded as modules."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]


def load_script(path: str, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The script at `path` below the repository's root, with its own folder on the path."""
    file = ROOT / path
    monkeypatch.syspath_prepend(file.parent)  # where scripts find one another
    spec = importlib.util.spec_from_file_location(file.stem, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, file.stem, module)  # where types look for what names mean
    spec.loader.exec_module(module)
    return module
