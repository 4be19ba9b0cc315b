"""A conversation-like trace made from published statistics, so that nothing has to be downloaded.

The defaults are fitted to the one-hour conversation trace of Mooncake (Qin et al., FAST'25):
log-normal prompt lengths (median 6,909, mean 12,035 tokens), outputs of 343 tokens on average,
3.4 requests a second, 39% of requests continuing an earlier one after a pause with median 135 s,
one block that begins every prompt, and an ideal prefix hit of 37% of prompt tokens.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterator
from dataclasses import dataclass

from baton.bench.trace import BLOCK, TraceRequest


@dataclass(frozen=True)
class Conversations:
    """What the traffic looks like. Lengths in tokens, times in seconds.

    rate: requests per second, all turns counted.
    turns: mean turns of a conversation; 1.63 makes 39% of requests continuations.
    pause_median: from one turn of a conversation to the next; log-normal, sigma 1.07.
    first_median: first prompt after the common blocks; log-normal with `first_sigma`.
    message_median: what a later turn adds after the previous answer; log-normal, sigma 1.
    output_mean: answers; normal with `output_sigma`, one in fifty much longer.
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
    output_max: int = 2000
    system_blocks: int = 1


def synthesize(count: int, seed: int = 0, shape: Conversations | None = None) -> list[TraceRequest]:
    """The first `count` requests of a seeded stream of conversations, in order of arrival."""
    shape = shape or Conversations()
    draw = random.Random(seed)
    ids = itertools.count(shape.system_blocks)
    turns: list[tuple[float, int, TraceRequest]] = []
    start, order = 0.0, itertools.count()
    # Conversations begin at the rate that makes all their turns together arrive at `rate`. Once
    # `count` turns came before the next beginning, later conversations cannot add any to them.
    while True:
        for request in _conversation(draw, shape, start, ids):
            turns.append((request.at, next(order), request))
        start += draw.expovariate(shape.rate / shape.turns)
        if len(turns) >= count:
            turns.sort()
            if turns[count - 1][0] <= start:
                return [request for _, _, request in turns[:count]]


def _conversation(
    draw: random.Random, shape: Conversations, at: float, ids: Iterator[int]
) -> Iterator[TraceRequest]:
    """Turns that each begin with the whole blocks of the one before."""
    blocks = tuple(range(shape.system_blocks))
    length = shape.system_blocks * BLOCK + _lognormal(draw, shape.first_median, shape.first_sigma)
    while True:
        length = min(int(length), shape.input_max)
        whole = blocks[: length // BLOCK]
        fresh = -(-length // BLOCK) - len(whole)
        known = whole + tuple(itertools.islice(ids, fresh))
        output = _output(draw, shape)
        yield TraceRequest(round(at, 3), length, output, known)
        if length == shape.input_max or draw.random() < 1 / shape.turns:
            return
        blocks = known[: length // BLOCK]
        at += _lognormal(draw, shape.pause_median, 1.07)
        length += output + _lognormal(draw, shape.message_median, 1.0)


def _lognormal(draw: random.Random, median: float, sigma: float) -> float:
    return median * math.exp(draw.gauss(0.0, sigma))


def _output(draw: random.Random, shape: Conversations) -> int:
    value = draw.gauss(shape.output_mean, shape.output_sigma)
    if draw.random() < 0.02:
        value = shape.output_mean * draw.uniform(2.0, 4.5)
    return max(1, min(round(value), shape.output_max))
