"""`baton bench engine` as a user runs it: a model folder with only a config, on a CPU."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from baton.cli.app import main
from helpers.shapes import TINY, config_only


def test_bench_engine(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = config_only(tmp_path / "tiny-gqa", TINY["gqa"])
    file = tmp_path / "out" / "result.json"
    arguments = (
        *("bench", "engine", str(folder), "--load-format", "dummy", "--device", "cpu"),
        *("--ttft", "32", "--decode", "2x32", "--repeats", "1", "--budget", "1e9"),
        *("--copy-rate", "0.01", "--matmul-rate", "0.1", "--threads", "1", "--num-kv-pages", "64"),
        *("--out", str(file), "--profile", str(tmp_path / "traces")),
    )
    with pytest.raises(SystemExit) as end:
        main(arguments)
    said = capsys.readouterr()
    assert not end.value.code, said.err
    assert max(len(line) for line in said.out.splitlines()) <= 100
    for words in (
        "Time to first token",
        "Decode",
        "2x32",
        "full batch",
        "tiny-gqa (dummy weights)",
    ):
        assert words in said.out
    for words in ("started: first token", "ttft 32:", "decode 2x32:", "--profile needs CUDA"):
        assert words in said.err
    document = json.loads(file.read_text())
    assert document["config"]["prefix_caching"] is False
    assert document["config"]["step_time"] == 3600.0
    assert document["config"]["threads"] == 1
    assert len(document["ttft"]) == len(document["decode"]) == 1
    assert not (tmp_path / "traces").exists()
