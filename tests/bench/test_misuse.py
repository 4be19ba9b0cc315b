"""What users do by mistake: folders that are none, two runs in one, numbers without sense, files of
something else. Each is named, and nothing that was measured is lost."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from baton.bench.load.target import Target
from baton.bench.metrics import Slo
from baton.bench.record import Load, Record, Run
from baton.bench.report.axis import linear, logarithmic
from baton.bench.report.document import (
    DocumentError,
    document,
    read_document,
    search_summary,
    summarize,
    to_json,
)
from baton.bench.report.page import page
from baton.bench.report.write import SUMMARY, keep_others
from baton.bench.runfile import RunFileError, RunWriter, make_folder, read_run
from baton.bench.slo.disk import OtherSearch, kept
from baton.bench.slo.level import Goal
from baton.bench.slo.search import Plan, search
from baton.bench.sweep import Keep, sweep
from baton.bench.workload.job import Workload, WorkloadError
from baton.bench.workload.session import Sessions, session
from baton.bench.workload.shapes import Point, fixed, grid, mixed
from baton.cli.app import main
from baton.core.errors import ConfigError
from helpers.planted import engine
from helpers.runs import write_run

GOAL = Goal(slo=Slo(ttft=1.0, tpot=0.04))
URL = "http://127.0.0.1:1"


def test_a_file_is_one_runs_at_a_time(tmp_path: Path) -> None:
    file = tmp_path / "run.jsonl"
    with RunWriter(file, Run(name="first")) as out:
        with pytest.raises(RunFileError, match=r"run.jsonl: another process is writing it"):
            RunWriter(file, Run(name="second"))
        out.close(Run(name="first"))
    assert read_run(file).name == "first"
    write_run(file, Run(name="third"))  # the file is free again, and begins anew
    assert (read_run(file).name, len(file.read_bytes().splitlines())) == ("third", 2)


def cut_short(file: Path, run: Run) -> bytes:
    with RunWriter(file, run):
        pass
    return file.read_bytes()


def test_resuming_overwrites_no_other_run_that_was_cut_short(tmp_path: Path) -> None:
    workload, load = fixed(8, 2, 3), Load(rate=1.0)
    other = Run(name="run", workload={**workload.about, "isl": 9}, load=load, server={"url": URL})
    before = cut_short(tmp_path / "run.jsonl", other)
    keep = Keep(tmp_path, resume=True)
    with pytest.raises(ConfigError, match=r"run.jsonl is of another run \(isl"):
        sweep([Point("run", workload, load)], Target(URL), Console(quiet=True), keep=keep)
    assert (tmp_path / "run.jsonl").read_bytes() == before


def test_a_search_overwrites_no_other_run_that_was_cut_short(tmp_path: Path) -> None:
    def offer(load: Load, stretch: int, file: Path) -> Run:
        return Run(name="new")

    before = cut_short(tmp_path / "rate-1-1.jsonl", Run(workload={"isl": 9}))
    with pytest.raises(OtherSearch, match="has isl 9, this search 8"):
        kept(tmp_path, {"isl": 8}, offer, resume=True)(Load(rate=1.0), 0, 1)
    assert (tmp_path / "rate-1-1.jsonl").read_bytes() == before
    # of the same search it is run again
    assert kept(tmp_path, {"isl": 9}, offer, resume=True)(Load(rate=1.0), 0, 1).name == "new"


@pytest.mark.parametrize("command", ["run", "slo", "report"])
def test_a_folder_that_is_none_is_told_first(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    (tmp_path / "file").write_text("")
    flags = {"slo": ["--ttft", "1s"], "report": [str(tmp_path)]}.get(command, [])
    server = [] if command == "report" else ["--base-url", URL]
    if command == "slo":  # else the server is asked for its model first
        server += ["--config", "x"]
    with pytest.raises((SystemExit, ConfigError)) as end:
        main(["bench", command, *flags, *server, "--out", str(tmp_path / "file")])
    said = capsys.readouterr().err + str(end.value)
    assert "file: expected a folder that can be written to: File exists" in said


def test_a_folder_is_made_with_those_above_it(tmp_path: Path) -> None:
    make_folder(tmp_path / "a" / "b")
    assert list((tmp_path / "a" / "b").iterdir()) == []


def test_a_line_of_something_else_is_told_with_what_was_expected(tmp_path: Path) -> None:
    file = tmp_path / "x.jsonl"
    file.write_text('{"a": 1}\n')
    with pytest.raises(RunFileError, match=r"x.jsonl:1: expected a run or a request of it"):
        read_run(file)


@pytest.mark.parametrize(
    "make, words",
    [
        (lambda: fixed(8, 2, 3, warm=-1), "warm must be at least 0, got -1"),
        (lambda: mixed({8: 1.0}, 2, 3, spread=float("nan")), "spread of outputs .* got nan"),
        (lambda: mixed({8: 1.0}, 2, 3, spread=-1.0), "spread of outputs .* got -1"),
        (lambda: session(Sessions(think=float("inf"))), "think"),
    ],
)
def test_numbers_without_sense(make: Callable[[], Workload], words: str) -> None:
    with pytest.raises(WorkloadError, match=words):
        make()


def test_a_grid_has_each_point_once() -> None:
    assert [point.name for point in grid([8, 8], [2], [1, 1, 2])] == ["8-2-c1", "8-2-c2"]


def summary(**changes: Any) -> dict[str, Any]:
    found = search(engine(requests=50), GOAL, Plan(start=1, replicates=1))
    made = document("x", [], GOAL, [search_summary(found, "c", "s")])
    content: dict[str, Any] = json.loads(to_json(made))
    for path, value in changes.items():
        place: Any = content["searches"][0]
        *above, last = path.split("__")
        for name in above:
            place = place[int(name) if isinstance(place, list) else name]
        place[int(last) if isinstance(place, list) else last] = value
    return content


@pytest.mark.parametrize(
    "path, value",
    [
        ("found__levels", []),
        ("found__levels__0__trials__0__met", {}),
        ("found__levels__0__trials__0__met__all", 10**9),
        ("found__levels__0__trials__0__latency", {}),
        ("found__edges", {}),
        ("found__edges__all__meets", 1e308),
    ],
)
def test_a_search_that_contradicts_itself(tmp_path: Path, path: str, value: Any) -> None:
    file = tmp_path / "summary.json"
    file.write_text(json.dumps(summary(**{path: value})))
    with pytest.raises(DocumentError, match=r"summary.json: the search of s contradicts itself"):
        read_document(file)


def test_words_of_a_search_are_only_words(tmp_path: Path) -> None:
    file = tmp_path / "summary.json"
    file.write_text(json.dumps(summary(unit="<b>u</b>", levels__0__verdict="<i>v</i>")))
    text = page(read_document(file), [])
    assert "&lt;b&gt;u" in text
    assert "<b>u" not in text
    assert "<i>v" not in text


def test_axes_of_numbers_beyond_all_measure() -> None:
    for low, high in ((1e-308, 1e308), (1e308, 1e308), (1e-308, 1e-308)):
        for axis in (linear([low, high], "rate"), logarithmic([low, high], "time")):
            assert all(0 <= axis.place(value) <= 1 for value in (low, high, *axis.ticks))


def test_an_error_of_the_system_names_its_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("BATON_DEBUG", raising=False)
    with pytest.raises(SystemExit) as end:
        main(["bench", "synth", str(tmp_path), "--requests", "2"])
    assert end.value.code == 1
    assert f"{tmp_path}: Is a directory" in capsys.readouterr().err.replace("\n", "")


def test_files_that_cannot_be_read_are_what_was_typed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("BATON_DEBUG", raising=False)
    write_run(tmp_path / "a.jsonl", Run(records=[Record(index=0, scheduled=0.0, sent=0.0)]))
    (tmp_path / "b.jsonl").write_text("nonsense\n")
    for words in (["replay", "none.jsonl"], ["report", str(tmp_path)]):
        with pytest.raises(SystemExit) as end:
            main(["bench", *words, "--out", str(tmp_path / "out")])
        assert end.value.code == 2


def test_a_summary_of_others_is_not_replaced(tmp_path: Path) -> None:
    told = [summarize(Run(name=name), None) for name in ("a", "b")]
    (tmp_path / SUMMARY).write_bytes(to_json(document("", told, None)))
    keep_others(tmp_path, runs=["a", "b", "c"])
    with pytest.raises(ConfigError, match=r"other runs \(b\), whose summary.json"):
        keep_others(tmp_path, runs=["a"])
    with pytest.raises(ConfigError, match=r"other runs \(a, b\)"):
        keep_others(tmp_path, searches=["a", "b"])
    point = Point("run", fixed(8, 2, 3), Load(rate=1.0))
    with pytest.raises(ConfigError, match="give another --out"):
        sweep([point], Target(URL), Console(quiet=True), keep=Keep(tmp_path))
    (tmp_path / SUMMARY).write_text("cut sho")
    keep_others(tmp_path, runs=["a"])
    (tmp_path / SUMMARY).unlink()
    keep_others(tmp_path, runs=["a"])


def test_a_comparison_does_not_take_the_place_of_what_it_compares(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    inputs = [str(tmp_path / "a"), str(tmp_path / "b")]
    with pytest.raises(ConfigError, match="is one of those compared"):
        main(["bench", "report", *inputs, "--out", str(tmp_path / "b" / ".." / "a")])
