"""Runs the kernels in Triton's interpreter, in a process of its own: whether Triton interprets or
compiles is settled when a kernel is defined."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")


@pytest.mark.parametrize("name", ["moe", "small"])
def test_kernels_interpreted(name: str) -> None:
    cases = Path(__file__).parent / "interpreted" / f"{name}_cases.py"
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", str(cases)],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
