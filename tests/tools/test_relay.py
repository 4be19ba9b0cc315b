"""benchmarks/relay.py counts what its clock measured, and names flags it cannot use."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType, SimpleNamespace

import pytest

from helpers.script import load_script


@pytest.fixture
def relay(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    return load_script("benchmarks/relay.py", monkeypatch)


@pytest.mark.parametrize(
    "flags, words",
    [
        (["--streams", "0"], "argument --streams: '0'"),
        (["--osl", "-3"], "argument --osl: '-3'"),
        (["--period", "0.01,0"], "argument --period: '0.01,0'"),
        (["--period", "nan"], "argument --period: 'nan'"),
        (["--period", ","], "argument --period: ','"),
        (["--out", "no/such/folder/x.json"], "no/such/folder"),
    ],
)
def test_flags_are_named(
    relay: ModuleType,
    flags: list[str],
    words: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(sys, "argv", ["relay.py", "model", *flags])
    with pytest.raises(SystemExit):
        relay.main()
    assert words in capsys.readouterr().err


def test_the_rate_is_of_the_tokens_that_were_timed(
    relay: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    @contextmanager
    def served(command: list[str]) -> Iterator[tuple[str, int]]:
        yield "http://127.0.0.1:1", 0

    records = [
        SimpleNamespace(status="ok", output_tokens=20, phase=phase, scheduled=0.0)
        for phase in ("warm", "measure", "measure")
    ]
    clock = iter((1.0, 1.6))
    monkeypatch.setattr(relay, "served", served)
    monkeypatch.setattr(relay, "cpu_seconds", lambda _: next(clock))
    monkeypatch.setattr(
        relay, "run_load", lambda *_, **__: SimpleNamespace(records=records, seconds=2.0)
    )
    found = relay.measure(argparse.Namespace(model="m", osl=20, streams=2), 0.1)
    assert (found["client_tokens_per_s"], found["share"]) == (20, 1.0)
    assert found["cpu_us_per_token"] == 10000.0, "of all that were passed on, warm-up too"
