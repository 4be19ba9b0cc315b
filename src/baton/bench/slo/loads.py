"""The five loads of a shape, and the Pareto front over configurations, as rows for people."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from baton.bench.slo.edge import Edge
from baton.bench.slo.level import ALL, SUCCESS, Level
from baton.bench.slo.search import Found
from baton.bench.stats import Interval

#: what each of the five is, in the order of the table
FIVE = {
    SUCCESS: "max successful",
    "peak": "peak tokens/s",
    "ttft": "max meeting TTFT",
    "tpot": "max meeting TPOT",
    "e2e": "max meeting E2E",
    ALL: "max meeting all",
}


class Row(msgspec.Struct, kw_only=True):
    """One of the five loads and what was measured there.

    load: None where no load did it.
    mark: "" for a boundary that was found; ">=" where every load offered still met it, or where the
        limit of runs came before a failing load.
    share / interval: of requests that met the row's own criterion; at the peak, all objectives.
    total / output / requests: tokens and requests per second, means of the runs at this load.
    ttft / tpot: p95 in seconds, of the longest run.
    """

    name: str
    label: str
    load: float | None = None
    mark: str = ""
    share: float | None = None
    interval: Interval | None = None
    total: float | None = None
    output: float | None = None
    requests: float | None = None
    ttft: float | None = None
    tpot: float | None = None
    runs: int = 0


def five(found: Found) -> list[Row]:
    """The rows that the search looked for."""
    rows = []
    for name, label in FIVE.items():
        if name == "peak":
            if found.plan.table:
                rows.append(_row(found, name, label, found.peak, ALL))
        elif name in found.edges:
            line = found.edges[name]
            row = _row(found, name, label, line.meets, name)
            row.mark = _mark(line)
            rows.append(row)
    return rows


def _mark(line: Edge) -> str:
    return ">=" if line.meets is not None and line.fails is None else ""


def _row(found: Found, name: str, label: str, load: float | None, criterion: str) -> Row:
    row = Row(name=name, label=label, load=load)
    if load is None:
        return row
    level = found.level(load)
    longest = max(level.valid, key=lambda trial: trial.sent)
    row.share, row.interval = level.share(criterion), level.interval(criterion)
    row.total, row.output = level.mean("total"), level.mean("output")
    row.requests, row.runs = level.mean("requests"), len(level.valid)
    row.ttft, row.tpot = longest.latency["ttft"]["p95"], longest.latency["tpot"]["p95"]
    return row


class LevelRow(msgspec.Struct, kw_only=True):
    """One load of a search: the valid runs at it together.

    shares: of requests sent that met each criterion. interval: of the share that met all.
    total: tokens per second, mean of the runs.
    verdict: of this load's own runs about all objectives: "meets" or "fails" beyond doubt,
        "unclear", "behind" where the server fell behind, "invalid" without a valid run.
    """

    load: float
    runs: int
    sent: int
    shares: dict[str, float]
    interval: Interval
    total: float
    verdict: str


def levels(found: Found) -> list[LevelRow]:
    """Every load measured, the lowest first."""
    rows = []
    for level in found.levels:
        word: str = level.verdict(ALL, found.goal.attainment)
        rows.append(
            LevelRow(
                load=level.load,
                runs=len(level.trials),
                sent=sum(trial.sent for trial in level.valid),
                shares={name: level.share(name) for name in found.goal.criteria},
                interval=level.interval(ALL),
                total=level.mean("total"),
                verdict="invalid" if not level.valid else "behind" if level.saturated else word,
            )
        )
    return rows


class Point(msgspec.Struct, kw_only=True):
    """A configuration at a load: `gain` is better when higher, `cost` when lower.

    front: no other point has at least this gain at no more cost.
    """

    config: str
    load: str
    gain: float
    cost: float
    front: bool = False


def front(points: Sequence[Point]) -> list[Point]:
    """The points, those on the Pareto front marked."""
    marked: list[Point] = []
    best = float("-inf")
    # by cost, the higher gain first: a point is on the front if it beats all cheaper ones
    for point in sorted(points, key=lambda p: (p.cost, -p.gain)):
        marked.append(msgspec.structs.replace(point, front=point.gain > best))
        best = max(best, point.gain)
    return marked


def level_points(config: str, unit: str, levels: Sequence[Level], latency: str) -> list[Point]:
    """Output tokens per second against the p95 of a latency in seconds, a point for each level."""
    points = []
    for level in levels:
        if not level.valid:
            continue
        cost = max(level.valid, key=lambda trial: trial.sent).latency[latency]["p95"]
        if cost is not None:
            gain = level.mean("output")
            points.append(Point(config=config, load=f"{level.load:g} {unit}", gain=gain, cost=cost))
    return points
