"""Conversations: each turn's prompt is all that was said before and a new message, after a pause.

What the server answered is not known when the prompts are made, so its place in the history is
taken by made-up tokens of the same number: a server that also caches its answers cannot hit these.
"""

from __future__ import annotations

import math
import random
from dataclasses import asdict, dataclass

from baton.bench.workload.job import Job, Workload, WorkloadError


@dataclass(frozen=True)
class Sessions:
    """Lengths in tokens, times in seconds.

    sessions / turns: conversations, and requests of each.
    system: prompt that begins every conversation.
    first / message: what the user says at first, and at each later turn.
    osl: the answers.
    think: mean pause between an answer's end and the next turn, exponential.
    """

    sessions: int = 16
    turns: int = 5
    system: int = 512
    first: int = 1024
    message: int = 128
    osl: int = 128
    think: float = 5.0
    seed: int = 0


def session(shape: Sessions) -> Workload:
    """All turns of all conversations.

    Raises:
        WorkloadError: a number that makes no sense.
    """
    counts = (shape.sessions, shape.turns, shape.first, shape.message, shape.osl)
    if min(counts) < 1 or shape.system < 0 or not 0 <= shape.think < math.inf:
        raise WorkloadError(
            "sessions, turns, first, message and osl must be at least 1, system and think 0"
        )
    draw = random.Random(shape.seed)
    jobs: list[Job] = []
    for number in range(shape.sessions):
        jobs += _turns(shape, number, draw)
    return Workload(jobs, {"name": "session", **asdict(shape)})


def _turns(shape: Sessions, number: int, draw: random.Random) -> list[Job]:
    ids = iter(range(1 + 2 * shape.turns * number, 1 + 2 * shape.turns * (number + 1)))
    known: tuple[tuple[int, int], ...] = ((0, shape.system),) if shape.system else ()
    # the first conversation to come finds nothing in the cache
    shared = shape.system if number else 0
    jobs = []
    for turn in range(shape.turns):
        prompt = (*known, (next(ids), shape.message if turn else shape.first))
        think = draw.expovariate(1 / shape.think) if turn and shape.think else 0.0
        jobs.append(
            Job(
                prompt,
                shape.osl,
                group=f"turn {turn + 1}",
                shared=shared,
                session=number,
                turn=turn,
                think=round(think, 3),
            )
        )
        shared = sum(tokens for _, tokens in prompt)
        known = (*prompt, (next(ids), shape.osl))
    return jobs
