"""Whether a server falls ever further behind an open loop: requests in flight and TTFT both grow.

An open loop above a server's capacity may still meet its objectives for a while, because the queue
is short at first. Both slopes tell what a longer run would show. Either alone does not: requests in
flight grow in every run until the first ones end, and TTFT wanders with prompt lengths.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from baton.bench.metrics import e2e, ttft
from baton.bench.record import Record
from baton.bench.stats import Samples, Trend, trend

#: neighbouring requests resemble one another; means of so many batches hardly do
BATCHES = 10
FEWEST = 5 * BATCHES
#: one-sided 1% of Student's t at 8 degrees of freedom is 2.9
SURE = 2.9
#: rise over the run as a share of its mean: a queue that grows from nothing has 1.8
IN_FLIGHT_RISE, TTFT_RISE = 0.4, 0.9


def saturated(records: Sequence[Record]) -> str | None:
    """How both grow, in words, or None where they do not or there are too few requests to tell.

    Args:
        records: measured requests of an open loop, also of one that is still running.
    """
    if len(records) < FEWEST:
        return None
    order = sorted(records, key=lambda r: r.scheduled)
    first, last = order[0].scheduled, order[-1].scheduled
    if last <= first:
        return None
    edges = np.linspace(first, last, BATCHES + 1)
    waiting = trend((edges[1:] + edges[:-1]) / 2, _in_flight(order, edges))
    batches = np.array_split(np.arange(len(order)), BATCHES)
    times = [float(np.mean([order[i].scheduled for i in batch])) for batch in batches]
    firsts = [float(np.mean([_first(order[i]) for i in batch])) for batch in batches]
    slower = trend(times, firsts)
    if waiting is None or slower is None:
        return None
    if not (_grows(waiting, IN_FLIGHT_RISE) and _grows(slower, TTFT_RISE)):
        return None
    return (
        f"in flight grows by {waiting.slope:.3g} requests a second and TTFT by "
        f"{slower.slope * 1000:.3g} ms a second"
    )


def _grows(line: Trend, rise: float) -> bool:
    return line.t >= SURE and line.rise >= rise


def _first(record: Record) -> float:
    """TTFT; of a request without a token, as long as it was waited for."""
    waited = ttft(record)
    return e2e(record) if waited is None else waited


def _in_flight(records: Sequence[Record], edges: Samples) -> Samples:
    """Mean requests between scheduled send and end, in each span between edges."""
    starts = np.array([r.scheduled for r in records])
    ends = np.array([r.end for r in records])
    spans = [
        float(np.clip(np.minimum(ends, high) - np.maximum(starts, low), 0, None).sum())
        for low, high in pairwise(edges)
    ]
    return np.array(spans) / np.diff(edges)
