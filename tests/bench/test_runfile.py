"""Files of runs: what is written is read back, and damage is named."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from baton.bench.record import SCHEMA, Load, Record, Run
from baton.bench.runfile import CUT_SHORT, RunFileError, RunWriter, read_run
from helpers.runs import write_run


def run() -> Run:
    records = [
        Record(index=0, scheduled=0.0, sent=0.001, end=1.5, arrivals=[0.5, 1.0], output_tokens=2),
        Record(index=1, scheduled=1.0, sent=1.0, status="error", error="HTTP 500: ä", group="g"),
    ]
    load = Load(kind="closed", concurrency=4)
    return Run(name="r", load=load, workload={"seed": 3}, seconds=1.5, records=records)


def test_round_trip(tmp_path: Path) -> None:
    write_run(tmp_path / "new" / "a.jsonl", run())
    assert read_run(tmp_path / "new" / "a.jsonl") == run()


def test_a_crash_keeps_what_was_written(tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    with RunWriter(file, run()) as out:
        out.lines(msgspec.json.encode(run().records[0]) + b"\n")
        out.lines(b'{"index":1,"sched')
    found = read_run(file)
    assert found.records == run().records[:1]
    assert found.invalid == [CUT_SHORT]


def test_the_closing_line_counts(tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    with RunWriter(file, Run(name="r")) as out:
        out.close(Run(name="r", seconds=7.0, invalid=["late"]))
    found = read_run(file)
    assert (found.seconds, found.invalid) == (7.0, ["late"])


@pytest.mark.parametrize(
    "text, words",
    [
        ("", "no run in it"),
        ('{"schema":1}\n{"index":"x"}\n', r":2: .*index"),
        ('{"schema":1}\nnonsense\n', ":2: "),
        (f'{{"schema":{SCHEMA + 1}}}\n', "newer version"),
        ('{"index":0,"scheduled":0,"sent":0}\n', "no run in it"),
    ],
)
def test_damage_is_named(tmp_path: Path, text: str, words: str) -> None:
    file = tmp_path / "a.jsonl"
    file.write_text(text)
    with pytest.raises(RunFileError, match=words):
        read_run(file)
    with pytest.raises(RunFileError, match="cannot be read"):
        read_run(tmp_path / "none")
