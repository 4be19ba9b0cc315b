"""Workloads of set lengths: one shape, the grid of shapes, a mixture and its control."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from baton.bench.record import Load
from baton.bench.workload.job import Job, Workload, WorkloadError

#: requests of a grid point for each of its slots: the first ones of a closed loop all begin at once
ROUNDS = 4
KI = 1024
#: prompt length -> share of the requests: long ones are few, and most of the tokens
BUCKETS = {KI: 40.0, 4 * KI: 25.0, 16 * KI: 15.0, 64 * KI: 10.0, 128 * KI: 6.0, 192 * KI: 4.0}

#: sigma of outputs that are all but 1 or the most
MOST_SPREAD = 10.0


def fixed(isl: int, osl: int, count: int, warm: int = 0) -> Workload:
    """`count` requests of `isl` prompt and `osl` output tokens that share nothing, after `warm`
    others of the same shape."""
    _positive(isl=isl, osl=osl, requests=count)
    if warm < 0:
        raise WorkloadError(f"warm must be at least 0, got {warm}")
    about = {"name": "fixed", "isl": isl, "osl": osl, "requests": count, "warm": warm}
    extra = [Job(((count + i, isl),), osl) for i in range(warm)]
    return Workload(
        [Job(((i, isl),), osl, group=label(isl, osl)) for i in range(count)],
        about,
        before=(("warm", extra),) if extra else (),
        before_concurrency=warm or 1,
    )


def label(isl: int, osl: int) -> str:
    """`8192 -> 1024` as people write it: `8K/1K`."""
    return f"{short(isl)}/{short(osl)}"


def short(tokens: int) -> str:
    """`4096 -> "4K"`; what is no multiple of 1024 stays as it is."""
    return f"{tokens // KI}K" if tokens % KI == 0 else str(tokens)


@dataclass(frozen=True)
class Point:
    """One run of a sweep."""

    name: str
    workload: Workload
    load: Load


def grid(
    isl: Sequence[int],
    osl: Sequence[int],
    concurrency: Sequence[int],
    rounds: int = ROUNDS,
) -> list[Point]:
    """A closed loop for each combination, `rounds` requests for each slot."""
    _positive(rounds=rounds)
    return [
        Point(
            f"{short(i)}-{short(o)}-c{c}",
            fixed(i, o, c * rounds, warm=min(c, 2)),
            Load(kind="closed", concurrency=c),
        )
        # one run of each, however often it was named
        for i in dict.fromkeys(isl)
        for o in dict.fromkeys(osl)
        for c in dict.fromkeys(concurrency)
    ]


def mixed(
    buckets: dict[int, float], osl: int, count: int, seed: int = 0, spread: float = 0.5
) -> Workload:
    """Prompts of very different lengths in one stream, in seeded order.

    Args:
        buckets: prompt length -> weight.
        osl: mean output tokens.
        spread: sigma of their log-normal distribution; cut at 8 times the mean. 0 is none.
    """
    _positive(osl=osl, requests=count)
    if not buckets or any(n < 1 or not 0 < weight < math.inf for n, weight in buckets.items()):
        raise WorkloadError("buckets: expected lengths of at least 1 with weights above 0")
    if not 0 <= spread <= MOST_SPREAD:
        raise WorkloadError(f"spread of outputs must be from 0 to {MOST_SPREAD:g}, got {spread:g}")
    draw = random.Random(seed)
    lengths = _portions(buckets, count)
    draw.shuffle(lengths)
    jobs = [
        Job(((i, isl),), output, group=short(isl))
        for i, (isl, output) in enumerate(
            zip(lengths, _outputs(draw, osl, spread, count), strict=True)
        )
    ]
    about: dict[str, Any] = {
        "name": "mixed",
        "buckets": {str(n): weight for n, weight in buckets.items()},
        "osl": osl,
        "osl_spread": spread,
        "requests": count,
        "seed": seed,
        "groups": [short(n) for n in sorted(buckets)],
    }
    return Workload(jobs, about)


def control(mixture: Workload) -> Workload:
    """As many requests with as many tokens in all, every one of the same length."""
    count = len(mixture.jobs)
    inputs = _even(sum(job.length for job in mixture.jobs), count)
    outputs = _even(sum(job.max_tokens for job in mixture.jobs), count)
    jobs = [
        Job(((i, isl),), osl, group="control")
        for i, (isl, osl) in enumerate(zip(inputs, outputs, strict=True))
    ]
    return Workload(jobs, {**mixture.about, "name": "control", "groups": []})


def _even(total: int, count: int) -> Iterator[int]:
    low, more = divmod(total, count)
    return (low + (i < more) for i in range(count))


def _portions(weights: dict[int, float], count: int) -> list[int]:
    """`count` keys in proportion to their weights, largest remainders first."""
    total = sum(weights.values())
    exact = {key: count * weight / total for key, weight in weights.items()}
    found = {key: int(value) for key, value in exact.items()}
    rest = sorted(exact, key=lambda key: found[key] - exact[key])
    for key in rest[: count - sum(found.values())]:
        found[key] += 1
    return [key for key, times in found.items() for _ in range(times)]


def _outputs(draw: random.Random, mean: int, sigma: float, count: int) -> list[int]:
    values = (mean * math.exp(draw.gauss(-sigma * sigma / 2, sigma)) for _ in range(count))
    return [max(1, min(round(value), 8 * mean)) for value in values]


def _positive(**values: int) -> None:
    for name, value in values.items():
        if value < 1:
            raise WorkloadError(f"{name} must be at least 1, got {value}")
