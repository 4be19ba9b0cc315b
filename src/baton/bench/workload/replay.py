"""A trace as a workload: scaled without losing who shares what with whom."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any

from baton.bench.workload.job import Job, Workload, WorkloadError
from baton.bench.workload.trace import BLOCK


@dataclass(frozen=True)
class Scales:
    """How a trace is changed.

    time: times are multiplied by it; 0 sends everything at once.
    length / output: prompt and output lengths are multiplied by them. A segment becomes the nearest
        whole number of tokens, at least one, so that equal segments stay equal.
    loops: how often the trace runs, one after the other, with other prompts each time.
    max_tokens: longer requests are cut: segments leave the end of the prompt, so that prefixes stay
        shared. None cuts none.

    Raises:
        WorkloadError: a scale that makes no sense.
    """

    time: float = 1.0
    length: Fraction = Fraction(1)
    output: Fraction = Fraction(1)
    loops: int = 1
    max_tokens: int | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.time < float("inf") or self.length <= 0 or self.output <= 0:
            raise WorkloadError("time scale must be at least 0, length and output scale above 0")
        if self.loops < 1 or (self.max_tokens or 2) < 2:
            raise WorkloadError("loops must be at least 1, the longest request 2 tokens")


def replay(jobs: Sequence[Job], scales: Scales, source: str) -> Workload:
    """The trace's requests as they will be sent, with what an endless cache would have held."""
    scaled, cut = [], 0
    for job in _looped(jobs, scales.loops):
        whole = _scaled(job, scales)
        scaled.append(_cut(whole, scales.max_tokens))
        cut += scaled[-1] != whole
    times = [job.at for job in jobs if job.at is not None]
    about: dict[str, Any] = {
        "name": "replay",
        "trace": source,
        "trace_seconds": max(times) - min(times) if times else None,
        "requests": len(scaled),
        "time_scale": scales.time,
        "length_scale": str(scales.length),
        "output_scale": str(scales.output),
        "loops": scales.loops,
        "max_tokens": scales.max_tokens,
        "cut": cut,
        "block": max(1, round(BLOCK * scales.length)),
    }
    return Workload(with_shared(scaled), about)


def _looped(jobs: Sequence[Job], loops: int) -> Iterator[Job]:
    """The trace again and again, each time with ids and sessions of its own."""
    ids = 1 + max(number for job in jobs for number, _ in job.segments)
    sessions = 1 + max((job.session or 0 for job in jobs), default=0)
    first = jobs[0].at or 0.0
    # from the last arrival of one loop to the first of the next: the trace's mean gap
    span = ((jobs[-1].at or 0.0) - first) * (1 + 1 / max(len(jobs) - 1, 1))
    for loop in range(loops):
        for job in jobs:
            yield replace(
                job,
                segments=tuple((number + loop * ids, tokens) for number, tokens in job.segments)
                if loop
                else job.segments,
                at=None if job.at is None else job.at - first + loop * span,
                session=None if job.session is None else job.session + loop * sessions,
            )


def _scaled(job: Job, scales: Scales) -> Job:
    length, output = scales.length, scales.output
    segments = job.segments
    if length != 1:
        segments = tuple((number, max(1, round(n * length))) for number, n in segments)
    return replace(
        job,
        segments=segments,
        max_tokens=max(1, round(job.max_tokens * output)),
        at=None if job.at is None else job.at * scales.time,
        think=job.think * scales.time,
    )


def _cut(job: Job, most: int | None) -> Job:
    """At most `most` tokens in all: half of them for the output, then whole segments."""
    if most is None or job.length + job.max_tokens <= most:
        return job
    output = min(job.max_tokens, most // 2)
    kept, left = [], most - output
    for number, tokens in job.segments:
        if tokens > left:
            break
        kept.append((number, tokens))
        left -= tokens
    if not kept:
        kept = [(job.segments[0][0], left)]
    return replace(job, segments=tuple(kept), max_tokens=output)


def with_shared(jobs: Iterable[Job]) -> list[Job]:
    """Jobs in order of time, with the tokens of each that an endless prefix cache would have held:
    the longest begin of its prompt that an earlier one has, one token less than all of it."""
    whole: dict[tuple[int, int, int], int] = {}  # (prompt so far, id, tokens) -> prompt so far
    longest: dict[tuple[int, int], int] = {}  # (prompt so far, id) -> tokens
    found = []
    for job in sorted(jobs, key=lambda job: job.at or 0.0):
        so_far, shared, known = 0, 0, True
        for number, tokens in job.segments:
            if known:
                shared += min(tokens, longest.get((so_far, number), 0))
                known = (so_far, number, tokens) in whole
            longest[so_far, number] = max(tokens, longest.get((so_far, number), 0))
            so_far = whole.setdefault((so_far, number, tokens), len(whole) + 1)
        found.append(replace(job, shared=min(shared, job.length - 1)))
    return found
