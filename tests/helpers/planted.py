"""Servers that are only a formula or a queue: a `measure` of the search with a known capacity."""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable

import numpy as np

from baton.bench.record import Load, Record, Run

#: met at and missed beyond; seconds
TTFT, TPOT = 1.0, 0.05
#: share of requests with the rest of the latency: what meets and what misses
FAST, SLOW = 0.2, 3.0

Measure = Callable[[Load, int, int], Run]


def value(load: Load) -> float:
    """Rate or concurrency."""
    return load.rate if load.rate is not None else float(load.concurrency or 0)


def planted(
    share: Callable[[float], float],
    *,
    kind: str = "ttft",
    requests: int = 300,
    seed: int = 0,
    wobble: float = 0.0,
    fails_at: float = math.inf,
) -> Measure:
    """Requests that meet an objective with a chance of share(load).

    Args:
        kind: the objective that the rest miss, "ttft" or "tpot".
        wobble: standard deviation of the server's speed between runs, as a share.
        fails_at: load from which some requests fail.
    """

    def measure(load: Load, replicate: int, stretch: int) -> Run:
        count = requests * stretch
        at = value(load)
        generator = np.random.default_rng([seed, replicate, round(at * 10000)])
        met = generator.random(count) < share(at * math.exp(wobble * generator.normal()))
        gap = 1 / at if load.kind == "open" else 0.1
        records = []
        for i in range(count):
            first = FAST if met[i] or kind != "ttft" else SLOW
            per_token = 0.02 if met[i] or kind != "tpot" else 0.2
            start = i * gap
            broken = at >= fails_at and i % 10 == 0
            records.append(
                Record(
                    index=i,
                    scheduled=start,
                    sent=start,
                    end=start + first + 9 * per_token,
                    arrivals=[start + first + k * per_token for k in range(10)],
                    input_tokens=100,
                    reported_input=100,
                    output_tokens=10,
                    status="error" if broken else "ok",
                    error="refused" if broken else None,
                )
            )
        return Run(name=f"{at:g}-{replicate}", load=load, records=records)

    return measure


def queue(
    servers: int, mean: float, *, requests: int = 600, seed: int = 0, spread: float = 0.5
) -> Measure:
    """A first-come queue for `servers` slots, each held for a gamma-distributed time whose mean is
    `mean` seconds: TTFT is the wait and a tenth of the service; TPOT never misses."""

    def measure(load: Load, replicate: int, stretch: int) -> Run:
        count = requests * stretch
        assert load.rate is not None
        generator = np.random.default_rng([seed, replicate, round(load.rate * 10000)])
        at = np.cumsum(generator.exponential(1 / load.rate, count))
        at -= at[0]
        times = generator.gamma(1 / spread**2, mean * spread**2, count)
        free = [0.0] * servers
        records = []
        for i, (scheduled, service) in enumerate(zip(at, times, strict=True)):
            start = max(float(scheduled), heapq.heappop(free))
            end = start + float(service)
            heapq.heappush(free, end)
            first = start + 0.1 * float(service)
            records.append(
                Record(
                    index=i,
                    scheduled=float(scheduled),
                    sent=float(scheduled),
                    end=end,
                    arrivals=[first, end],
                    input_tokens=100,
                    output_tokens=100,
                )
            )
        return Run(name=f"{load.rate:g}-{replicate}", load=load, records=records)

    return measure
