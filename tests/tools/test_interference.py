"""benchmarks/interference.py without a gap to measure, and with flags that make no sense."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from types import ModuleType

import pytest

from baton import LLM
from helpers.script import load_script


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    return load_script("benchmarks/interference.py", monkeypatch)


def test_no_gap_is_no_verdict(script: ModuleType, tiny: Callable[[str], str]) -> None:
    options = {"model": "x", "length": 8, "prompts": 1, "decodes": 1, "step_time": "1s"}
    asked = argparse.Namespace(**options, objective=0.15, budget=0.0)  # no time for any step
    with LLM(tiny("llama"), dtype="float32", skip_tokenizer_init=True, threads=1) as llm:
        found = script.measure(llm, asked)
        assert (found["gap_count"], found["met"]) == (0, None)
        assert set(found["gap_ms"].values()) == {None}
        assert found["gap_alone_ms"] > 0
        for request in ("long0", "d0"):
            llm.core.abort(request)
        asked.budget = 60.0
        found = script.measure(llm, asked)
        assert found["gap_count"] > 0
        assert found["met"] is (found["gap_ms"]["p99"] <= 150)


@pytest.mark.parametrize("flag", ["--length", "--prompts", "--decodes"])
def test_flags_are_named(
    script: ModuleType,
    flag: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(sys, "argv", ["interference.py", "model", flag, "0"])
    with pytest.raises(SystemExit):
        script.main()
    assert f"argument {flag}: '0' is no number" in capsys.readouterr().err
