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


def engine(
    slots: int = 32, *, speed: float = 1.0, requests: int = 400, seed: int = 0, broken: float = 0.0
) -> Measure:
    """A batching server: prompts are computed one after the other, answers slow one another down,
    a share of `broken` requests fails. Its runs say where they come from, as real ones do."""

    def measure(load: Load, replicate: int, stretch: int) -> Run:
        assert load.rate is not None
        count = requests * stretch
        generator = np.random.default_rng([seed, replicate, round(load.rate * 10000)])
        at = np.cumsum(generator.exponential(1 / load.rate, count))
        at -= at[0]
        inputs = generator.choice([1024, 4096, 16384], count, p=[0.6, 0.3, 0.1])
        outputs = generator.integers(40, 160, count)
        fails = generator.random(count) < broken
        prefill, ends = 0.0, [0.0] * slots
        records = []
        for i in range(count):
            prompt, tokens, due = int(inputs[i]), int(outputs[i]), float(at[i])
            cached = prompt // 2 if i % 3 == 0 else 0
            start = max(due, prefill, heapq.heappop(ends))
            prefill = start + (prompt - cached) / 40_000 / speed
            busy = sum(end > prefill for end in ends)
            step = (0.012 + 0.0011 * busy) / speed
            gaps = step * generator.gamma(25, 1 / 25, tokens)
            arrivals = (prefill + 0.01 + np.cumsum(gaps)).tolist()
            heapq.heappush(ends, arrivals[-1])
            failed = bool(fails[i])
            records.append(
                Record(
                    index=i,
                    scheduled=due,
                    sent=due + 0.0004,
                    end=arrivals[-1],
                    arrivals=arrivals[: 3 if failed else tokens],
                    input_tokens=prompt,
                    asked_output=tokens,
                    reported_input=prompt,
                    output_tokens=None if failed else tokens,
                    cached_tokens=cached,
                    shared_tokens=cached,
                    group=f"{prompt // 1024}K",
                    status="error" if failed else "ok",
                    error="the server closed the stream" if failed else None,
                )
            )
        return Run(
            name=f"{load.rate:g}-{replicate}",
            started="2030-01-02T03:04:05+00:00",
            workload={"name": "mixed", "buckets": [1024, 4096, 16384], "seed": seed},
            load=load,
            server={"url": "http://127.0.0.1:8000", "model": "hy3", "commit": "0123456789ab"},
            client={"version": "0.1.0", "workers": 2, "lag": {"p99": 0.0009}},
            seconds=records[-1].end,
            records=records,
        )

    return measure
