"""The plots of a report, from records and summaries."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from baton.bench.metrics import measured, ttft
from baton.bench.record import Record, Run
from baton.bench.report.axis import linear, logarithmic, shares
from baton.bench.report.document import Document, RunSummary, SearchSummary, latencies
from baton.bench.report.forms import show
from baton.bench.report.plot import Pair, Plot
from baton.bench.slo.level import ALL, Goal
from baton.bench.slo.loads import Point
from baton.bench.stats import falling

#: points of one curve; more are not seen
POINTS = 300
#: dots, and steps, of one timeline
DOTS, STEPS = 1500, 3000
#: dots that need not be small to be told apart
FEW = 200
NAMES = {"ttft": "time to first token", "tpot": "time per output token", "e2e": "end to end"}


def distribution(
    runs: Sequence[Run], told: Sequence[RunSummary], kind: str, goal: Goal | None
) -> Plot | None:
    """How many of the sent requests were at most so slow; None where no run has the latency."""
    counted = [measured(run, summary.window) for run, summary in zip(runs, told, strict=True)]
    curves = [np.sort(latencies(records)[kind]) for records in counted]
    if not any(len(curve) for curve in curves):
        return None
    limit = getattr(goal.slo, kind) if goal else None
    ends = [v for c in curves if len(c) for v in (c[0], c[-1])]
    x = logarithmic(ends if limit is None else [*ends, limit], "tick", most=4)
    plot = Plot(
        f"{kind.upper()}, {NAMES[kind]}",
        x,
        shares(),
        y_name="share of sent requests at most so slow",
    )
    if goal is not None and limit is not None:
        plot.rule(x=limit, text=f"limit {show(limit, 'tick')}")
        plot.rule(y=goal.attainment, text=show(goal.attainment, "whole"))
    for i, (records, curve, summary) in enumerate(zip(counted, curves, told, strict=True)):
        places = np.unique(np.linspace(0, len(curve) - 1, POINTS).astype(int))
        points = [(float(curve[k]), (k + 1) / len(records)) for k in places if len(curve)]
        points = [(points[0][0], 0.0), *points] if points else []
        plot.line(points, i, summary.name if len(runs) > 1 else "")
    return plot


def timeline(run: Run, series: int, goal: Goal | None) -> list[Plot]:
    """Requests in flight, and TTFT of each request, over the run's seconds."""
    records = sorted(measured(run), key=lambda r: r.scheduled)
    if not records:
        return []
    begin = records[0].scheduled
    x = linear([max(r.end for r in records) - begin], "load", tight=True)
    steps = _in_flight(records, begin)
    counts = linear([y for _, y in steps], "count", most=3)
    busy = Plot("Requests in flight", x, counts, low=True, bare=True)
    busy.line(_thin(steps), series)
    waits = [(r.scheduled - begin, w) for r in records if (w := ttft(r)) is not None]
    lost = [r.scheduled - begin for r in records if r.status != "ok"]
    first = Plot(
        "TTFT of each request, by its scheduled send" + _thinned(len(waits)),
        x,
        logarithmic([w for _, w in waits], "tick", most=4),
        x_name="seconds since the first scheduled send",
    )
    limit = goal.slo.ttft if goal else None
    if limit is not None:
        first.rule(y=limit, text=f"limit {show(limit, 'tick')}")
    name = "answered" if lost else ""
    first.dots(waits[:: -(-len(waits) // DOTS) or 1], series, name, "small" * (len(waits) > FEW))
    if lost:
        first.dots([(at, first.y.high) for at in lost], series, "failed", "lost")
    return [busy, first]


def _thinned(count: int) -> str:
    stride = -(-count // DOTS)
    return f" (one in {stride} drawn)" if stride > 1 else ""


def _in_flight(records: Sequence[Record], begin: float) -> list[Pair]:
    changes = sorted(
        [(r.sent - begin, 1) for r in records] + [(r.end - begin, -1) for r in records]
    )
    steps: list[Pair] = [(0.0, 0.0)]
    for at, change in changes:
        before = steps[-1][1]
        steps += [(at, before), (at, before + change)]
    return steps


def _thin(steps: Sequence[Pair]) -> list[Pair]:
    """All steps, or the highest and the lowest of each short span where they are too many."""
    if len(steps) <= STEPS:
        return list(steps)
    size = -(-2 * len(steps) // STEPS)
    kept: list[Pair] = []
    for i in range(0, len(steps), size):
        span = steps[i : i + size]
        low, high = min(span, key=lambda p: p[1]), max(span, key=lambda p: p[1])
        kept += sorted({low, high})
    return kept


def attainment(search: SearchSummary) -> Plot:
    """Share of requests that meet each criterion, by load, with intervals of that of all."""
    found, goal = search.found, search.found.goal
    levels = [level for level in found.levels if level.valid]
    loads = [level.load for level in levels]
    plot = Plot(
        "Requests that meet their objectives, by load",
        linear(loads, "load", tight=True),
        shares(),
        x_name=search.unit,
        y_name="share of sent requests",
    )
    plot.rule(y=goal.attainment, text=f"target {show(goal.attainment, 'whole')}")
    if search.capacity is not None:
        plot.rule(x=search.capacity, text=f"{search.capacity:g} {search.unit}")
    for i, name in enumerate(goal.objectives if len(goal.objectives) > 1 else (), start=1):
        plot.line([(level.load, level.share(name)) for level in levels], i, name.upper(), "thin")
    fit = falling([level.share(ALL) for level in levels], [level.weight(ALL) for level in levels])
    plot.line(list(zip(loads, fit, strict=True)), 0, "all, falling fit")
    for level in levels:
        ends = level.interval(ALL)
        plot.whisker(level.load, ends.low or 0.0, 1.0 if ends.high is None else ends.high, 0)
    plot.dots([(level.load, level.share(ALL)) for level in levels], 0, "all, 95% interval")
    return plot


def throughput(search: SearchSummary) -> Plot:
    """Tokens per second by load."""
    levels = [level for level in search.found.levels if level.valid]
    totals = [(level.load, level.mean("total")) for level in levels]
    outputs = [(level.load, level.mean("output")) for level in levels]
    plot = Plot(
        "Tokens per second, by load",
        linear([level.load for level in levels], "load", tight=True),
        linear([rate for _, rate in totals], "count"),
        x_name=search.unit,
        y_name="tokens/s",
    )
    if search.capacity is not None:
        plot.rule(x=search.capacity)
    for i, (points, name) in enumerate(((totals, "input and output"), (outputs, "output"))):
        plot.line(points, i, name)
        plot.dots(points, i)
    return plot


def pareto(made: Document, latency: str) -> Plot:
    """Output tokens per second against a latency, a line for each configuration."""
    points = made.pareto[latency]
    plot = Plot(
        f"Output tokens per second against p95 {latency.upper()}: up and left is better",
        logarithmic([p.cost for p in points], "tick", most=4),
        linear([p.gain for p in points], "count"),
        x_name=f"p95 {latency.upper()}",
        y_name="output tokens/s",
    )
    plot.line([(p.cost, p.gain) for p in points if p.front], 0, "Pareto front", "front")
    configs = list(dict.fromkeys(p.config for p in sorted(points, key=lambda p: p.config)))
    for i, config in enumerate(configs):
        mine = [p for p in points if p.config == config]
        for p in mine:
            kind = "" if p.front else "beaten"
            plot.dots([(p.cost, p.gain)], i, kind=kind, tip=f"{config}: {p.load}")
        plot.dots([], i, config)
    for p in _ends([p for p in points if p.front]):
        plot.label(p.cost, p.gain, p.load)
    return plot


def _ends(points: Sequence[Point]) -> list[Point]:
    """The first and the last, once if they are one."""
    return list(points[:1]) + list(points[1:][-1:])
