"""Runs side by side: differences with intervals, and what makes them hard to compare."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from baton.bench.metrics import Slo, input_tokens, measured, meets, output_tokens
from baton.bench.record import Record, Run
from baton.bench.report.document import Comparison, Difference, RunSummary, latencies
from baton.bench.stats import (
    Interval,
    Samples,
    effective,
    enough,
    mean_difference,
    percentile_difference,
    share_difference,
)
from baton.core.errors import ConfigError

#: parameters of a workload that say which requests of their kind are sent, not of which kind
SEEDS = ("seed", "prompt_seed", "arrival_seed")
#: that say how many, or how they are spelt; a difference is told and not refused
SIZE = ("requests", "warm", "loops", "cut", "trace_seconds", "timeout", "limit", "body")
#: equal spans of a run whose rates are taken as samples of its throughput
WINDOWS = 20


class Figure(NamedTuple):
    """What is compared: its place, its name, its form, and whether more is better."""

    metric: str
    label: str
    form: str
    more_is_better: bool


FIGURES = [
    *(
        Figure(f"latency.{kind}.{p}", f"{kind.upper()} {p}", "time", False)
        for kind in ("ttft", "tpot", "e2e")
        for p in ("p50", "p95", "p99")
    ),
    Figure("throughput.requests", "Requests/s", "rate", True),
    Figure("throughput.output", "Output tokens/s", "rate", True),
    Figure("throughput.total", "Total tokens/s", "rate", True),
    Figure("attainment.all", "Attainment, all objectives", "share", True),
    Figure("attainment.ttft", "Attainment, TTFT", "share", True),
    Figure("attainment.tpot", "Attainment, TPOT", "share", True),
    Figure("attainment.e2e", "Attainment, E2E", "share", True),
    Figure("goodput.requests", "Goodput, requests/s", "rate", True),
    Figure("hit.token", "Prefix hit by token", "share", True),
]


def check_workloads(runs: Sequence[Run], allow: bool) -> list[str]:
    """Warnings about what differs between the first run's traffic and the others'; seeds may.

    Raises:
        ConfigError: workloads differ in more than size, and `allow` is not set.
    """
    warnings = []
    base = runs[0]
    for other in runs[1:]:
        names = f"{base.name} and {other.name}"
        different = _different(base.workload, other.workload)
        serious = [name for name in different if name not in SIZE]
        if serious and not allow:
            told = "; ".join(
                f"{n}: {base.workload.get(n)!r} and {other.workload.get(n)!r}" for n in serious[:3]
            )
            raise ConfigError(
                f"{names} were given different workloads ({told}): their figures do not say which "
                "server is faster. --allow-different compares them all the same"
            )
        if different:
            warnings.append(f"{names} were given workloads that differ in {', '.join(different)}")
        if base.load != other.load:
            warnings.append(f"{names} were offered different loads")
    return warnings


def _different(a: Mapping[str, Any], b: Mapping[str, Any]) -> list[str]:
    return sorted(name for name in {*a, *b} if name not in SEEDS and a.get(name) != b.get(name))


def compare(
    base: int, other: int, runs: Sequence[Run], told: Sequence[RunSummary], slo: Slo | None
) -> Comparison:
    """All figures that both runs have, other less base.

    Args:
        base / other: indices into runs and their summaries.
    """
    a, b = runs[base], runs[other]
    intervals = _intervals(a, b, slo)
    rows = []
    for figure in FIGURES:
        x, y = _look(told[base].metrics, figure.metric), _look(told[other].metrics, figure.metric)
        if x is None and y is None:
            continue
        interval = intervals.get(figure.metric)
        difference = y - x if x is not None and y is not None else None
        rows.append(
            Difference(
                metric=figure.metric,
                label=figure.label,
                form=figure.form,
                base=x,
                other=y,
                difference=difference,
                relative=difference / x if difference is not None and x else None,
                interval=interval,
                verdict=_verdict(interval, figure),
            )
        )
    return Comparison(base=base, other=other, rows=rows)


def _look(metrics: Mapping[str, Any], path: str) -> float | None:
    found: Any = metrics
    for name in path.split("."):
        found = found.get(name) if isinstance(found, dict) else None
    return None if found is None else float(found)


def _verdict(interval: Interval | None, figure: Figure) -> str:
    if interval is None or interval.low is None or interval.high is None:
        return "n too small" if figure.metric.startswith("latency") else ""
    if interval.low <= 0 <= interval.high:
        return "no clear difference"
    return "better" if (interval.low > 0) == figure.more_is_better else "worse"


def _intervals(a: Run, b: Run, slo: Slo | None) -> dict[str, Interval | None]:
    """Of each difference, by metric."""
    found: dict[str, Interval | None] = {}
    mine, theirs = (latencies(sorted(measured(run), key=_due)) for run in (a, b))
    for kind in mine:
        for percent in (50, 95, 99):
            if enough(len(mine[kind]), percent) and enough(len(theirs[kind]), percent):
                found[f"latency.{kind}.p{percent}"] = percentile_difference(
                    mine[kind], theirs[kind], percent
                )
    rates, other_rates = _window_rates(a), _window_rates(b)
    for kind in rates.keys() & other_rates.keys():
        found[f"throughput.{kind}"] = mean_difference(rates[kind], other_rates[kind])
    if slo:
        met, other_met = _outcomes(a, slo), _outcomes(b, slo)
        for name in met:
            found[f"attainment.{name}"] = share_difference(*met[name], *other_met[name])
    return found


def _due(record: Record) -> float:
    return record.scheduled


def _outcomes(run: Run, slo: Slo) -> dict[str, tuple[float, float]]:
    """Good and total samples that each objective's outcomes are worth."""
    met = [meets(r, slo) for r in sorted(measured(run), key=_due)]
    found = {}
    for name in meets(Record(index=0, scheduled=0, sent=0), slo):
        outcomes = [m[name] for m in met]
        worth = effective(outcomes)
        found[name] = (worth * sum(outcomes) / max(1, len(outcomes)), worth)
    return found


def _window_rates(run: Run) -> dict[str, Samples]:
    """Requests and tokens per second in equal spans of the run: batch means, whose spread says how
    far the run's own rate can be trusted. A prompt counts when its first token comes."""
    good = [r for r in measured(run) if r.status == "ok" and r.arrivals]
    if not good:
        return {}
    edges = np.linspace(min(r.scheduled for r in good), max(r.end for r in good), WINDOWS + 1)
    width = max(float(edges[1] - edges[0]), 1e-9)

    def rate(times: Sequence[float] | Samples, amounts: Sequence[float] | Samples) -> Samples:
        counts: Samples = np.histogram(times, edges, weights=amounts)[0]
        return counts / width

    sizes = np.array([len(r.arrivals) for r in good])
    each = np.repeat(np.array([output_tokens(r) for r in good]) / sizes, sizes)
    output = rate(np.concatenate([np.array(r.arrivals) for r in good]), each)
    prompts = rate([r.arrivals[0] for r in good], [float(input_tokens(r)) for r in good])
    ends = rate([r.end for r in good], [1.0] * len(good))
    return {"requests": ends, "output": output, "total": prompts + output}
