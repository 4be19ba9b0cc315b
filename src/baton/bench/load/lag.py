"""How late the client itself is: what it adds to every latency it reports."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any

import numpy as np

from baton.bench.load.http import clock

#: share of the median TTFT that the client's lag may reach in 95 of 100 samples
SHARE = 0.05
#: seconds of lag that no clock of an event loop can be blamed for
FLOOR = 0.002
#: seconds between ticks
PERIOD = 0.01


async def tick(late: list[float]) -> None:
    """Append how late the event loop wakes, until cancelled: data waits as long to be read."""
    due = clock() + PERIOD
    while True:
        await asyncio.sleep(due - clock())
        now = clock()
        late.append(max(0.0, now - due))
        due = max(due + PERIOD, now)


def lag_summary(ticks: Iterable[float], sends: Iterable[float]) -> dict[str, Any]:
    """Percentiles in seconds of the event loop's lag and of sends after their time."""
    return {"loop": _percentiles(ticks), "send": _percentiles(sends)}


def judge(lag: dict[str, Any], ttft: float | None) -> str | None:
    """Why the run is invalid, if the client was too slow for a median TTFT of `ttft` seconds."""
    if ttft is None:
        return None
    worst = max(lag["loop"]["p95"] or 0.0, lag["send"]["p95"] or 0.0)
    limit = max(FLOOR, SHARE * ttft)
    if worst <= limit:
        return None
    return (
        f"the client was too slow: its lag of {worst * 1000:.1f} ms (p95) is above "
        f"{limit * 1000:.1f} ms, {SHARE:.0%} of the median TTFT; use more --workers, a machine of "
        "its own, or a lower load"
    )


def _percentiles(values: Iterable[float]) -> dict[str, float | None]:
    samples = np.fromiter(values, dtype=np.float64)
    if not len(samples):
        return dict.fromkeys(("p50", "p95", "p99", "max"))
    names = {"p50": 50, "p95": 95, "p99": 99, "max": 100}
    return {name: float(np.percentile(samples, point)) for name, point in names.items()}
