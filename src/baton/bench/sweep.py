"""Runs one after another: shown, kept in a folder, and taken up again after an interruption."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec
from rich.console import Console

from baton.bench.load.run import run_load
from baton.bench.load.target import Target
from baton.bench.metrics import steady_window
from baton.bench.progress import LoadProgress
from baton.bench.record import Run
from baton.bench.report.document import Document, document, summarize, to_json
from baton.bench.report.write import SUMMARY, keep_others, write
from baton.bench.runfile import CUT_SHORT, make_folder, read_run
from baton.bench.slo.level import Goal
from baton.bench.workload.shapes import Point
from baton.core.errors import ConfigError


@dataclass(frozen=True)
class Keep:
    """Where runs go. folder: JSON lines of each run, and their report; None keeps nothing. resume:
    take complete runs that are there instead of running them again."""

    folder: Path | None = None
    resume: bool = False

    def file(self, name: str) -> Path | None:
        """The file of a run."""
        return None if self.folder is None else self.folder / f"{name}.jsonl"


def sweep(
    points: Sequence[Point],
    target: Target,
    console: Console,
    *,
    keep: Keep = Keep(),
    workers: int | None = None,
    goal: Goal | None = None,
    steady: bool = False,
    pools: dict[str, int] | None = None,
) -> list[Run]:
    """Run every point, with the same arrivals but prompts of its own, so that none is answered from
    the prefix cache that an earlier one filled.

    Raises:
        ConfigError: the folder holds other runs, or these and `resume` is off.
        ServerError: no server answers.
    """
    _check(points, keep)
    runs: list[Run] = []
    for number, point in enumerate(points):
        own = replace(target, seed=target.seed + number)
        if (run := _kept(point, own, keep)) is not None:
            console.print(f"{point.name}: taken from {keep.file(point.name)}", highlight=False)
        else:
            run = _run(point, own, console, keep, workers, target.seed, pools)
        runs.append(run)
        if keep.folder is not None:  # also while others are to come: they may never
            (keep.folder / SUMMARY).write_bytes(to_json(summary(runs, goal, steady)))
    if keep.folder is not None:
        write(keep.folder, summary(runs, goal, steady), runs)
    return runs


def _run(
    point: Point,
    target: Target,
    console: Console,
    keep: Keep,
    workers: int | None,
    seed: int,
    pools: dict[str, int] | None,
) -> Run:
    total = sum(len(jobs) for _, jobs in point.workload.before) + len(point.workload.jobs)
    with LoadProgress(console, point.name, total) as shown:
        return run_load(
            point.workload,
            point.load,
            target,
            name=point.name,
            out=keep.file(point.name),
            workers=workers,
            seed=seed,
            pools=pools,
            on_records=shown.records,
            on_in_flight=shown.in_flight,
        )


def _check(points: Sequence[Point], keep: Keep) -> None:
    if keep.folder is not None:
        make_folder(keep.folder)
        keep_others(keep.folder, runs=[point.name for point in points])
    for point in points:
        file = keep.file(point.name)
        if file is not None and file.exists() and not keep.resume:
            raise ConfigError(f"{file} is there already: give --resume, or another --out")


def _kept(point: Point, target: Target, keep: Keep) -> Run | None:
    """The complete run of that point, if there is one. One that was cut short is run again, but
    only in place of its own kind: its records may be all that is left of something else."""
    file = keep.file(point.name)
    if file is None or not file.exists():
        return None
    run = read_run(file)
    # as JSON has it: tuples are lists there
    asked = msgspec.json.decode(msgspec.json.encode({**point.workload.about, **target.about()}))
    differs = [name for name in asked if run.workload.get(name) != asked[name]]
    if differs or run.load != point.load or run.server.get("url") != target.base_url:
        raise ConfigError(
            f"{file} is of another run ({', '.join(differs) or 'load or server'} differs): give "
            "another --out"
        )
    return None if CUT_SHORT in run.invalid else run


def summary(runs: Sequence[Run], goal: Goal | None, steady: bool = False) -> Document:
    """The numbers of runs with what they were measured on; of the requests that were due in each
    run's steady window only, if asked."""
    slo = goal.slo if goal else None
    names = ", ".join(dict.fromkeys(str(run.workload.get("name", run.name)) for run in runs))
    model = runs[0].server.get("model", "") if runs else ""
    told = [summarize(run, slo, steady_window(run) if steady else None) for run in runs]
    return document(f"{model}: {names}", told, goal)
