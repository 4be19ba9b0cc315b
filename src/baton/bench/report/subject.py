"""What a report is about: files of runs, folders of them, folders of searches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from baton.bench.record import Run
from baton.bench.report.compare import check_workloads, compare
from baton.bench.report.document import (
    Document,
    RunSummary,
    SearchSummary,
    document,
    load_text,
    read_document,
    summarize,
)
from baton.bench.report.write import SUMMARY
from baton.bench.runfile import read_run
from baton.bench.slo.level import ALL, Goal
from baton.bench.slo.search import Found
from baton.core.errors import ConfigError


@dataclass(frozen=True)
class Subject:
    """One thing to report or compare: runs, of which the first stands for all, and the searches
    that they come from."""

    runs: list[Run]
    searches: list[SearchSummary]


def read_subjects(path: Path) -> list[Subject]:
    """A run's file, a folder of a search, or a folder of runs (a subject for each).

    Raises:
        ConfigError: there is nothing of the kind.
        RunFileError, DocumentError: a file is not what it should be.
    """
    if path.is_file():
        return [Subject([_named(read_run(path), path)], [])]
    if (path / SUMMARY).is_file():
        made = read_document(path / SUMMARY)
        if made.searches:
            return [
                Subject(edge_runs(path / search.folder, search), [search])
                for search in made.searches
            ]
    files = sorted(path.glob("*.jsonl"))
    if not files:
        raise ConfigError(
            f"{path}: expected a run's .jsonl file, a folder of them, or a folder that `baton "
            "bench slo` wrote"
        )
    return [Subject([_named(read_run(file), file)], []) for file in files]


def edge_runs(folder: Path, search: SearchSummary) -> list[Run]:
    """The longest run at the load found, then that at the first load that fails."""
    line = search.found.edges[ALL]
    loads = [load for load in (line.meets, line.fails) if load is not None]
    return [_longest(folder, search, search.found, load) for load in loads]


def _longest(folder: Path, search: SearchSummary, found: Found, load: float) -> Run:
    trial = max(found.level(load).valid, key=lambda trial: trial.sent)
    run = read_run(folder / f"{trial.name}.jsonl")
    run.name = f"{search.config} at {load:g} {search.unit}"
    return run


def _named(run: Run, file: Path) -> Run:
    run.name = run.name or file.stem
    return run


def report(
    subjects: Sequence[Subject], title: str, goal: Goal | None, allow_different: bool = False
) -> tuple[Document, list[Run]]:
    """A document about the subjects, and the runs it shows: of one subject all of its runs, of
    several the first of each, compared with the first subject's.

    Raises:
        ConfigError: the subjects' workloads differ and `allow_different` is not set.
    """
    searches = [search for subject in subjects for search in subject.searches]
    goals = [search.found.goal for search in searches]
    goal = goal or (goals[0] if goals else None)
    warnings = []
    if any(other != goal for other in goals):
        warnings.append("the searches had different objectives: their loads do not compare")
    if len(subjects) == 1:
        runs = subjects[0].runs
    else:
        runs = [subject.runs[0] for subject in subjects if subject.runs]
        warnings += check_workloads(runs, allow_different) if len(runs) > 1 else []
    _distinct(runs)
    slo = goal.slo if goal else None
    told: list[RunSummary] = [summarize(run, slo) for run in runs]
    pairs = [compare(0, i, runs, told, slo) for i in range(1, len(runs)) if len(subjects) > 1]
    return document(title, told, goal, searches, pairs, warnings), runs


def _distinct(runs: Sequence[Run]) -> None:
    """Give runs of one name their load, or else their place, as a part of it."""
    ways: list[Callable[[int, Run], str]] = [
        lambda i, run: f" at {load_text(run.load)}",
        lambda i, run: f" ({i + 1})",
    ]
    for tell in ways:
        names = [run.name for run in runs]
        for i, run in enumerate(runs):
            if names.count(run.name) > 1:
                run.name += tell(i, run)
