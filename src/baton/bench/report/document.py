"""The summary of runs as one versioned document: JSON whose schema follows from these classes.

It holds every number that the page shows. Seconds, tokens, shares between 0 and 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec

from baton import __version__
from baton.bench.metrics import (
    DEFINITIONS,
    Slo,
    by_group,
    e2e,
    measured,
    meets,
    metrics,
    tpot,
    ttft,
)
from baton.bench.record import Load, Record, Run
from baton.bench.slo.level import ALL, Goal
from baton.bench.slo.loads import LevelRow, Point, Row, five, front, level_points, levels
from baton.bench.slo.search import Found
from baton.bench.stats import Interval, effective, percentile_interval, wilson
from baton.core.errors import ConfigError

#: raised by one when a field changes its meaning or goes away; new fields do not count
SCHEMA = 1
KIND = "baton bench summary"
PERCENTILES = (50, 90, 95, 99)
#: latencies of one value per request: neighbouring stream gaps are not independent samples
PER_REQUEST = {"ttft": ttft, "tpot": tpot, "e2e": e2e}

Window = tuple[float, float]

MORE_DEFINITIONS = {
    "interval": "95% interval. Of a share: Wilson, for as many independent samples as the requests "
    "are worth (neighbours in time share a queue). Of a percentile: between two order statistics; "
    "an open end means that too few requests lie beyond it.",
    "max_successful": "Highest load at which every request was answered and the server kept up.",
    "peak": "Load with the most input and output tokens per second of all that were measured.",
    "max_meeting": "Highest load below which, as far as measured, the share of sent requests that "
    "meets the objective reaches the target.",
    "saturated": "Requests in flight and TTFT both grow over an open loop run: the server falls "
    "behind, and a longer run would miss any objective.",
    "pareto": "Configurations and loads that no other beats in output tokens per second without a "
    "higher latency.",
}


class RunSummary(msgspec.Struct, kw_only=True):
    """One run.

    window: seconds of the run's clock between which requests that count were due; None for all.
    metrics / groups: as `baton.bench.metrics` defines them, of all measured requests and by group.
    intervals: of percentiles, by latency and percentile name.
    attainment: interval of each share.
    """

    name: str
    started: str
    workload: dict[str, Any]
    load: Load
    server: dict[str, Any]
    client: dict[str, Any]
    invalid: list[str]
    window: Window | None
    metrics: dict[str, Any]
    groups: dict[str, dict[str, Any]]
    intervals: dict[str, dict[str, Interval]]
    attainment: dict[str, Interval]


class SearchSummary(msgspec.Struct, kw_only=True):
    """One search: what was found for a shape of requests on one configuration.

    folder: of its runs, relative to that of this document.
    base: configuration of the document's first search of this shape, if this is not it.
    relative: capacity over that of the base, less 1. bounds: between which it lies beyond doubt.
    """

    config: str
    shape: str
    folder: str
    unit: str
    capacity: float | None
    five: list[Row]
    levels: list[LevelRow]
    found: Found
    base: str | None = None
    relative: float | None = None
    bounds: Interval | None = None


class Difference(msgspec.Struct, kw_only=True):
    """One figure of two runs: other less base.

    metric: its place in a run's summary. form: how its values are written.
    relative: difference / base; None where base is 0.
    verdict: "better" or "worse" where the interval excludes 0, else "no clear difference"; "n too
        small" for a percentile with fewer than ten samples beyond it, "" without an interval.
    """

    metric: str
    label: str
    form: str
    base: float | None
    other: float | None
    difference: float | None
    relative: float | None
    interval: Interval | None
    verdict: str


class Comparison(msgspec.Struct, kw_only=True):
    """Two runs side by side: indices into `runs`."""

    base: int
    other: int
    rows: list[Difference]


class Document(msgspec.Struct, kw_only=True):
    """Everything that a report shows."""

    schema: int = SCHEMA
    kind: str = KIND
    made: str
    version: str
    title: str
    goal: Goal | None
    runs: list[RunSummary]
    searches: list[SearchSummary] = []
    pareto: dict[str, list[Point]] = {}
    comparisons: list[Comparison] = []
    warnings: list[str] = []
    definitions: dict[str, str] = {}


class DocumentError(ConfigError):
    """A summary file is not what it should be; names the file."""


def summarize(run: Run, slo: Slo | None, window: Window | None = None) -> RunSummary:
    """One run's part of the document; of the requests due within a window only, if one is given."""
    records = sorted(measured(run, window), key=lambda r: r.scheduled)
    return RunSummary(
        name=run.name,
        started=run.started,
        workload=run.workload,
        load=run.load,
        server=run.server,
        client=run.client,
        invalid=run.invalid,
        window=window,
        metrics=metrics(run, slo, window),
        groups=groups if len(groups := by_group(run, slo, window)) > 1 else {},
        intervals={
            kind: {f"p{p}": percentile_interval(values, p) for p in PERCENTILES}
            for kind, values in latencies(records).items()
            if values
        },
        attainment=_attainment(records, slo) if slo else {},
    )


def latencies(records: Sequence[Record]) -> dict[str, list[float]]:
    """Seconds of answered requests, by latency."""
    good = [r for r in records if r.status == "ok"]
    return {
        kind: [value for r in good if (value := measure(r)) is not None]
        for kind, measure in PER_REQUEST.items()
    }


def _attainment(records: Sequence[Record], slo: Slo) -> dict[str, Interval]:
    met = [meets(r, slo) for r in records]
    found = {}
    for name in met[0] if met else ():
        outcomes = [m[name] for m in met]
        worth = effective(outcomes)
        found[name] = wilson(sum(outcomes) / len(outcomes) * worth, worth)
    return found


def search_summary(found: Found, config: str, shape: str, folder: str = ".") -> SearchSummary:
    """A search's part of the document."""
    return SearchSummary(
        config=config,
        shape=shape,
        folder=folder,
        unit=found.plan.unit,
        capacity=found.capacity,
        five=five(found),
        levels=levels(found),
        found=found,
    )


def document(
    title: str,
    runs: Sequence[RunSummary],
    goal: Goal | None = None,
    searches: Sequence[SearchSummary] = (),
    comparisons: Sequence[Comparison] = (),
    warnings: Sequence[str] = (),
) -> Document:
    """Put the parts together."""
    _relate(searches)
    return Document(
        made=datetime.now(UTC).isoformat(timespec="seconds"),
        version=__version__,
        title=title,
        goal=goal,
        runs=list(runs),
        searches=list(searches),
        pareto=pareto(runs, searches),
        comparisons=list(comparisons),
        warnings=list(warnings),
        definitions={**DEFINITIONS, **MORE_DEFINITIONS},
    )


def _relate(searches: Sequence[SearchSummary]) -> None:
    """Set what searches gain over the first one of their kind."""
    firsts: dict[tuple[str, str], SearchSummary] = {}
    for search in searches:
        base = firsts.setdefault((search.shape, search.unit), search)
        if base is search or base.found.goal != search.found.goal:
            continue
        search.base = base.config
        if search.capacity is not None and base.capacity is not None:
            search.relative = search.capacity / base.capacity - 1
            mine, its = search.found.edges[ALL], base.found.edges[ALL]
            search.bounds = Interval(
                _gain(mine.sure_meets, its.sure_fails), _gain(mine.sure_fails, its.sure_meets)
            )


def _gain(load: float | None, base: float | None) -> float | None:
    return load / base - 1 if load and base else None


def pareto(runs: Sequence[RunSummary], searches: Sequence[SearchSummary]) -> dict[str, list[Point]]:
    """Output tokens per second against p95 TTFT and p95 TPOT: of every level searched, and of runs
    outside of searches. Empty where fewer than two points are to be compared."""
    fronts = {}
    for latency in ("ttft", "tpot"):
        points = [
            point
            for s in searches
            for point in level_points(_label(s, searches), s.unit, s.found.levels, latency)
        ]
        for run in runs if not searches else ():
            cost = run.metrics["latency"][latency]["p95"]
            gain = run.metrics["throughput"]["output"]
            if cost is not None and gain is not None:
                points.append(
                    Point(config=run.name, load=load_text(run.load), gain=gain, cost=cost)
                )
        if len(points) > 1:
            fronts[latency] = front(points)
    return fronts


def _label(search: SearchSummary, searches: Sequence[SearchSummary]) -> str:
    shapes = {s.shape for s in searches}
    return search.config if len(shapes) == 1 else f"{search.config}, {search.shape}"


def load_text(load: Load) -> str:
    """A load in words: "2.5 requests/s"."""
    if load.kind == "closed":
        return f"{load.concurrency} in flight"
    return "as the trace says" if load.rate is None else f"{load.rate:g} requests/s"


def to_json(made: Document) -> bytes:
    """The document as indented JSON."""
    return msgspec.json.format(msgspec.json.encode(made), indent=1) + b"\n"


def read_document(path: Path) -> Document:
    """A document from its file.

    Raises:
        DocumentError: it cannot be read, is something else, or of a newer schema.
    """
    try:
        content = path.read_bytes()
        about = msgspec.json.decode(content)
    except (OSError, msgspec.MsgspecError) as error:
        raise DocumentError(f"{path}: cannot be read as a summary: {error}") from None
    if not isinstance(about, dict) or about.get("kind") != KIND:
        raise DocumentError(f"{path}: not a summary: its 'kind' should be {KIND!r}")
    if about.get("schema", 0) > SCHEMA:
        raise DocumentError(
            f"{path}: schema {about['schema']} is of a newer version; this one reads up to {SCHEMA}"
        )
    try:
        made = msgspec.json.decode(content, type=Document)
    except msgspec.MsgspecError as error:
        raise DocumentError(f"{path}: {error}") from None
    for search in made.searches:
        try:
            _try_out(search.found)
        except (ArithmeticError, LookupError, StopIteration, ValueError) as error:
            raise DocumentError(
                f"{path}: the search of {search.shape} contradicts itself, where `baton bench slo` "
                f"writes none that does ({type(error).__name__}: {error})"
            ) from None
    return made


def _try_out(found: Found) -> None:
    """Compute what reports compute from a search: it raises where a part of it is missing or
    impossible."""
    five(found)
    levels(found)
    for latency in ("ttft", "tpot"):
        level_points("", "", found.levels, latency)
    for line in (found.edges[ALL], *found.edges.values()):
        for load in (line.meets, line.fails):
            if load is not None and not found.level(load).valid:
                raise ValueError(f"no valid run at {load:g}, a load that it names")


def json_schema() -> dict[str, Any]:
    """JSON Schema of the document."""
    return msgspec.json.schema(Document)
