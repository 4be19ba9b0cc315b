"""What a report is about: files of runs, folders of them, folders of searches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from baton.bench.record import Run
from baton.bench.report.compare import check_workloads, compare
from baton.bench.report.document import (
    Document,
    SearchSummary,
    document,
    load_text,
    read_document,
    summarize,
)
from baton.bench.report.write import SUMMARY
from baton.bench.runfile import read_run
from baton.bench.slo.level import ALL, Goal
from baton.core.errors import ConfigError


@dataclass(frozen=True)
class Part:
    """Runs that belong together, of which the first stands for all, and the search they are from.

    key: what the same part of another subject is called: the run's name, or the search's shape.
    """

    key: str
    runs: list[Run]
    search: SearchSummary | None = None


@dataclass(frozen=True)
class Subject:
    """One thing to report on or to compare with others."""

    name: str
    parts: list[Part]


def read_subject(path: Path) -> Subject:
    """A run's file, a folder of searches, or a folder of runs.

    Raises:
        ConfigError: there is nothing of the kind.
        RunFileError, DocumentError: a file is not what it should be.
    """
    if path.is_file():
        return Subject(str(path.with_suffix("")), [_run_part(path)])
    if (path / SUMMARY).is_file():
        searches = read_document(path / SUMMARY).searches
        if searches:
            return Subject(path.name, [search_part(path, search) for search in searches])
    files = sorted(path.glob("*.jsonl"))
    if not files:
        raise ConfigError(
            f"{path}: expected a run's .jsonl file, a folder of them, or a folder that `baton "
            "bench slo` wrote"
        )
    return Subject(path.name, [_run_part(file) for file in files])


def search_part(root: Path, search: SearchSummary) -> Part:
    """A search with its longest runs at the load found and at the first load that fails."""
    line = search.found.edges[ALL]
    runs = []
    for load in (line.meets, line.fails):
        if load is not None:
            trial = max(search.found.level(load).valid, key=lambda trial: trial.sent)
            run = read_run(root / search.folder / f"{trial.name}.jsonl")
            run.name = f"{search.config} at {load:g} {search.unit}"
            runs.append(run)
    return Part(search.shape, runs, search)


def _run_part(file: Path) -> Part:
    run = read_run(file)
    run.name = run.name or file.stem
    return Part(run.name, [run])


def report(
    subjects: Sequence[Subject], title: str, goal: Goal | None, allow_different: bool = False
) -> tuple[Document, list[Run]]:
    """A document about the subjects, and the runs it shows: of one subject all of its runs, of
    several the parts that the first shares with another, compared.

    Raises:
        ConfigError: workloads of parts that are compared differ, and `allow_different` is not set.
    """
    searches = [part.search for s in subjects for part in s.parts if part.search is not None]
    goals = [search.found.goal for search in searches]
    goal = goal or (goals[0] if goals else None)
    warnings = []
    if any(other != goal for other in goals):
        warnings.append("the searches had different objectives: their loads do not compare")
    pairs: list[tuple[int, int]] = []
    if len(subjects) > 1:
        _tell_apart(subjects)
    if len(subjects) == 1:
        runs = [run for part in subjects[0].parts for run in part.runs]
    else:
        runs, pairs = _paired(subjects, warnings)
    for base, other in pairs:
        warnings += check_workloads([runs[base], runs[other]], allow_different)
    _distinct(runs)
    slo = goal.slo if goal else None
    told = [summarize(run, slo) for run in runs]
    compared = [compare(base, other, runs, told, slo) for base, other in pairs]
    return document(title, told, goal, searches, compared, warnings), runs


def _tell_apart(subjects: Sequence[Subject]) -> None:
    """Where subjects have runs or configurations of one name, put their own before it."""
    named = [(subject, part) for subject in subjects for part in subject.parts]
    runs = [{run.name for run in part.runs} for _, part in named]
    configs = [part.search.config if part.search else None for _, part in named]
    for i, (subject, part) in enumerate(named):
        others = [k for k, (other, _) in enumerate(named) if other is not subject]
        if any(runs[i] & runs[k] for k in others):
            for run in part.runs:
                run.name = f"{subject.name}: {run.name}"
        if part.search is not None and configs[i] in [configs[k] for k in others]:
            part.search.config = f"{subject.name}: {part.search.config}"


def _paired(
    subjects: Sequence[Subject], warnings: list[str]
) -> tuple[list[Run], list[tuple[int, int]]]:
    """The first run of each part, and which of them are compared."""
    first, *others = subjects
    runs: list[Run] = []
    pairs = []
    for part in first.parts:
        if not part.runs:
            warnings.append(f"{first.name}, {part.key}: no run to compare with")
            continue
        base = len(runs)
        runs.append(part.runs[0])
        for subject in others:
            match = _match(part, first, subject)
            if match is None:
                warnings.append(f"{subject.name} has no run of {part.key} to compare")
            else:
                pairs.append((base, len(runs)))
                runs.append(match)
    return runs, pairs


def _match(part: Part, mine: Subject, other: Subject) -> Run | None:
    """The other subject's run of a part; where both have only one, names need not be equal."""
    alone = len(mine.parts) == len(other.parts) == 1
    found = next((p for p in other.parts if p.runs and (alone or p.key == part.key)), None)
    return None if found is None else found.runs[0]


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
