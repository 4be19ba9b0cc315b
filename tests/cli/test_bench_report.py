"""`baton bench report` as a user runs it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from baton.bench.record import Load, Run
from baton.cli.app import main
from baton.core.errors import BatonError, ConfigError
from helpers.planted import engine
from helpers.runs import write_run


def stored(path: Path, **changes: float) -> Run:
    run = engine(requests=200, **changes)(Load(rate=3.0), 0, 1)  # type: ignore[arg-type]
    run.name = path.parent.name
    write_run(path, run)
    return run


def test_one_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    stored(tmp_path / "base" / "run.jsonl")
    main_ends("bench", "report", tmp_path / "base", "--out", tmp_path / "page", "--ttft", "1s")
    assert "report.html" in capsys.readouterr().err
    made = json.loads((tmp_path / "page" / "summary.json").read_text())
    assert made["goal"] == {"slo": {"ttft": 1.0, "tpot": None, "e2e": None}, "attainment": 0.95}
    assert made["comparisons"] == []
    assert "met every objective" in (tmp_path / "page" / "report.html").read_text()


def test_three_runs_side_by_side(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, speed in (("base", 1.0), ("fast", 1.5), ("slow", 0.8)):
        stored(tmp_path / name / "run.jsonl", speed=speed)
    files = [tmp_path / name / "run.jsonl" for name in ("base", "fast", "slow")]
    main_ends("bench", "report", *files, "--out", tmp_path / "page", "--title", "Three")
    said = capsys.readouterr()
    assert "fast, less base" in said.out
    assert "slow, less base" in said.out
    assert "better" in said.out
    assert "worse" in said.out
    assert max(len(line) for line in said.out.splitlines()) <= 100
    page = (tmp_path / "page" / "report.html").read_text()
    assert "<h1>Three</h1>" in page
    main_ends("bench", "report", *files, "--out", tmp_path / "page", "--json")
    assert len(json.loads(capsys.readouterr().out)["comparisons"]) == 2


def test_other_workloads_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    stored(tmp_path / "a" / "run.jsonl")
    other = stored(tmp_path / "b" / "run.jsonl")
    other.workload["buckets"] = [1]
    write_run(tmp_path / "b" / "run.jsonl", other)
    words = ["bench", "report", str(tmp_path / "a"), str(tmp_path / "b"), "--out", str(tmp_path)]
    with pytest.raises(ConfigError, match=r"different workloads .*buckets"):
        main(words)
    main_ends(*words, "--allow-different")
    assert "differ in buckets" in capsys.readouterr().out


@pytest.mark.parametrize(
    "content, words",
    [(None, "expected a run's"), ("nonsense\n", "run.jsonl:1"), ("", "no run in it")],
)
def test_inputs_that_are_no_runs(tmp_path: Path, content: str | None, words: str) -> None:
    file = tmp_path / "run.jsonl"
    if content is not None:
        file.write_text(content)
    with pytest.raises(BatonError, match=words):
        main(["bench", "report", str(file), "--out", str(tmp_path / "page")])


def main_ends(*arguments: object) -> None:
    with pytest.raises(SystemExit) as end:
        main([str(argument) for argument in arguments])
    assert not end.value.code
