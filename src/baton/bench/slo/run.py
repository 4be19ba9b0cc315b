"""A search on a real server: a run for each load, kept in a folder, stopped when all is lost."""

from __future__ import annotations

import time
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console

from baton.bench.load.run import run_load
from baton.bench.load.target import Target
from baton.bench.metrics import meets
from baton.bench.progress import LoadProgress
from baton.bench.record import Load, Record, Run
from baton.bench.slo.disk import kept
from baton.bench.slo.level import ALL, Goal, Level, Trial
from baton.bench.slo.saturation import saturated
from baton.bench.slo.search import Found, Plan, search
from baton.bench.workload.job import Workload

#: what differs between the runs of one search: how many requests, and which
OWN = ("requests", "prompt_seed", "loops", "cut", "trace_seconds")
#: seconds between looks at a run that may be stopped
LOOK = 2.0


@dataclass(frozen=True)
class Shape:
    """What is searched: `make(n)` is the workload with n requests, `requests` the usual n."""

    name: str
    make: Callable[[int], Workload]
    requests: int


class Stop:
    """Tells a run to end once it cannot meet the goal any more and the server falls behind: so
    many requests missed that the rest cannot make up for it, and both slopes say that it gets
    worse. Such a load is known to fail; the rest of it would cost the most time of all runs."""

    def __init__(self, goal: Goal, total: int) -> None:
        self._goal = goal
        self._allowed = (1 - goal.attainment) * total
        self._records: list[Record] = []
        self._missed = 0
        self._looked = time.monotonic()

    def records(self, records: list[Record]) -> None:
        """Requests have ended."""
        counted = [r for r in records if r.phase == "measure"]
        self._records += counted
        self._missed += sum(not meets(r, self._goal.slo)[ALL] for r in counted)

    def __call__(self) -> bool:
        if self._missed <= self._allowed or time.monotonic() - self._looked < LOOK:
            return False
        self._looked = time.monotonic()
        return saturated(self._records) is not None


def search_server(
    shape: Shape,
    target: Target,
    goal: Goal,
    plan: Plan,
    console: Console,
    folder: Path,
    *,
    resume: bool = False,
    workers: int | None = None,
    pools: dict[str, int] | None = None,
) -> Found:
    """Search one shape on one server. Each run has prompts of its own, so that none is answered
    from the prefix cache that an earlier one filled.

    Raises:
        OtherSearch: the folder holds other runs, or these and `resume` is off.
        ServerError: no server answers.
    """

    def offer(load: Load, stretch: int, file: Path) -> Run:
        workload = shape.make(shape.requests * stretch)
        seed = zlib.crc32(file.stem.encode()) + target.seed
        total = len(workload.jobs) + sum(len(jobs) for _, jobs in workload.before)
        stop = Stop(goal, len(workload.jobs))
        with LoadProgress(console, file.stem, total) as shown:

            def records(new: list[Record]) -> None:
                shown.records(new)
                stop.records(new)

            return run_load(
                workload,
                load,
                replace(target, seed=seed),
                name=file.stem,
                out=file,
                workers=workers,
                seed=seed,
                pools=pools,
                on_records=records,
                on_in_flight=shown.in_flight,
                stop=stop if load.kind == "open" else lambda: False,
            )

    def watch(level: Level, trial: Trial, runs: int) -> None:
        console.print(told(level, trial, runs, goal, plan), markup=False, highlight=False)

    about = {**shape.make(shape.requests).about, **target.about()}
    about = {name: value for name, value in about.items() if name not in OWN}
    about["url"] = target.base_url
    measure = kept(folder, as_json(about), offer, resume)
    return search(measure, goal, plan, watch)


def as_json(values: Mapping[str, Any]) -> dict[str, Any]:
    """Values as a file gives them back: tuples are lists there."""
    back: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(values))
    return back


def told(level: Level, trial: Trial, runs: int, goal: Goal, plan: Plan) -> str:
    """A run in a line."""
    at = f"run {runs} of at most {plan.most_runs}: {level.load:g} {plan.unit}: "
    if trial.invalid:
        return f"{at}no valid measurement ({trial.invalid[0]})"
    ends = level.interval(ALL)
    low, high = ends.low or 0.0, ends.high or 0.0
    word = "behind" if level.saturated else level.verdict(ALL, goal.attainment)
    return f"{at}{level.share(ALL):.1%} met all ({low:.1%} to {high:.1%}), {word}"
