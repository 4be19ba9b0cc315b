"""Traces made from published statistics, so that nothing has to be downloaded.

"conversation" is fitted to the one-hour conversation trace of Mooncake (Qin et al., FAST'25):
log-normal prompt lengths (median 6,909, mean 12,035 tokens), outputs of 343 tokens on average,
3.4 requests a second, 39% of requests continuing an earlier one after a pause with median 135 s,
one block that begins every prompt, and an ideal prefix hit of 37% of prompt tokens. "chat" and
"code" have the lengths and rates of the two traces of Azure (Patel et al., Splitwise, ISCA 2024),
which tell of no sharing.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterator
from dataclasses import dataclass

from baton.bench.workload.job import Job, WorkloadError
from baton.bench.workload.trace import BLOCK, blocks


@dataclass(frozen=True)
class Traffic:
    """What the traffic looks like. Lengths in tokens, times in seconds.

    rate: requests per second, all turns counted.
    turns: mean turns of a conversation; 1.63 makes 39% of requests continuations.
    pause_median: from one turn of a conversation to the next; log-normal, sigma 1.07.
    first_median: first prompt after the common blocks; log-normal with `first_sigma`.
    message_median: what a later turn adds after the previous answer; log-normal, sigma 1.
    output_mean: answers; normal with `output_sigma`, one in fifty much longer. With
        `output_median`, log-normal with that median and mean instead.
    system_blocks: blocks of 512 tokens that begin every prompt.
    """

    rate: float = 3.4
    turns: float = 1.63
    pause_median: float = 135.0
    first_median: float = 5600.0
    first_sigma: float = 1.12
    input_max: int = 126_195
    message_median: float = 300.0
    output_mean: float = 330.0
    output_sigma: float = 200.0
    output_median: float | None = None
    output_max: int = 2000
    system_blocks: int = 1


TRAFFIC = {
    "conversation": Traffic(),
    "chat": Traffic(
        rate=5.53,
        turns=1.0,
        first_median=900.0,
        first_sigma=0.72,
        input_max=14_050,
        output_mean=211.0,
        output_median=129.0,
        output_max=1000,
        system_blocks=0,
    ),
    "code": Traffic(
        rate=2.57,
        turns=1.0,
        first_median=1450.0,
        first_sigma=0.95,
        input_max=7437,
        output_mean=28.0,
        output_median=13.0,
        output_max=1899,
        system_blocks=0,
    ),
}


def synthesize(count: int, seed: int = 0, traffic: Traffic | None = None) -> list[Job]:
    """The first `count` requests of a seeded stream of conversations, in order of arrival.

    Raises:
        WorkloadError: `count` is below 1.
    """
    if count < 1:
        raise WorkloadError(f"requests must be at least 1, got {count}")
    traffic = traffic or Traffic()
    draw = random.Random(seed)
    ids = itertools.count(traffic.system_blocks)
    turns: list[tuple[float, int, Job]] = []
    start, order = 0.0, itertools.count()
    # Conversations begin at the rate that makes all their turns together arrive at `rate`. Once
    # `count` turns came before the next beginning, later conversations cannot add any to them.
    while True:
        for at, job in _conversation(draw, traffic, start, ids):
            turns.append((at, next(order), job))
        start += draw.expovariate(traffic.rate / traffic.turns)
        if len(turns) >= count:
            turns.sort(key=lambda turn: turn[:2])
            if turns[count - 1][0] <= start:
                return [job for _, _, job in turns[:count]]


def _conversation(
    draw: random.Random, traffic: Traffic, at: float, ids: Iterator[int]
) -> Iterator[tuple[float, Job]]:
    """Turns that each begin with the whole blocks of the one before."""
    known = tuple(range(traffic.system_blocks))
    length = traffic.system_blocks * BLOCK + max(
        1.0, _lognormal(draw, traffic.first_median, traffic.first_sigma)
    )
    while True:
        length = min(int(length), traffic.input_max)
        whole = known[: length // BLOCK]
        fresh = -(-length // BLOCK) - len(whole)
        known = whole + tuple(itertools.islice(ids, fresh))
        output = _output(draw, traffic)
        yield at, Job(blocks(known, length), output, round(at, 3))
        if length == traffic.input_max or draw.random() < 1 / traffic.turns:
            return
        known = known[: length // BLOCK]
        at += _lognormal(draw, traffic.pause_median, 1.07)
        length += output + _lognormal(draw, traffic.message_median, 1.0)


def _lognormal(draw: random.Random, median: float, sigma: float) -> float:
    return median * math.exp(draw.gauss(0.0, sigma))


def _output(draw: random.Random, traffic: Traffic) -> int:
    if traffic.output_median is not None:
        sigma = math.sqrt(2 * math.log(traffic.output_mean / traffic.output_median))
        value = _lognormal(draw, traffic.output_median, sigma)
    else:
        value = draw.gauss(traffic.output_mean, traffic.output_sigma)
        if draw.random() < 0.02:
            value = traffic.output_mean * draw.uniform(2.0, 4.5)
    return max(1, min(round(value), traffic.output_max))
