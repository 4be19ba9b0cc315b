"""Seeded mixes of requests: what arrives when, what is aborted, on how tight an engine.

A mix says nothing about how it is run; `drive` runs one against any launch/collect pair, so the
same mixes serve a fake runner and the real one.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from baton.core.errors import QueueFull, RequestError
from baton.core.request import Request, TokenOutput
from baton.core.sampling import SamplingParams
from baton.core.step import StepPlan, StepResult
from baton.scheduler.scheduler import Scheduler


@dataclass
class Mix:
    """One scenario. `requests` and `aborts` are due before the loop turn they name."""

    seed: int
    requests: list[tuple[int, Request]]
    aborts: list[tuple[int, str]]
    failures: dict[str, int]  # request id -> how many of its rows go well before one fails
    config: dict[str, Any]  # fields of EngineConfig to change
    asynchronous: bool

    def request(self, request_id: str) -> Request:
        """The request with this id."""
        return next(request for _, request in self.requests if request.request_id == request_id)


@dataclass
class Run:
    """What came of a mix."""

    outputs: dict[str, list[TokenOutput]] = field(default_factory=dict)
    refused: set[str] = field(default_factory=set)
    aborted: set[str] = field(default_factory=set)
    turns: int = 0

    def tokens(self, request_id: str) -> list[int]:
        """All tokens of a request."""
        return [token for out in self.outputs.get(request_id, []) for token in out.token_ids]


def make_mix(seed: int, vocab_size: int = 97, plain: bool = False, longest: int = 160) -> Mix:
    """Mix number `seed`. `plain`: greedy without failures, scores or prompt log-probabilities,
    for runners that compare with a model run alone. `longest`: prompt tokens, at most."""
    rng = random.Random(seed)
    page_size = rng.choice([1, 2, 4, 16])
    config = _config(rng, page_size, longest)
    pool_tokens = config["num_pages"] * page_size
    stems = [[rng.randrange(1, vocab_size) for _ in range(longest)] for _ in range(2)]
    salts = rng.choice([[""], ["", "tenant"]])
    mix = Mix(seed, [], [], {}, config, rng.random() < 0.6)
    turn = 0
    for number in range(rng.randint(2, 24)):
        turn += rng.choice([0, 0, 0, 1, 3, 10])
        length = min(_length(rng, longest), config["max_model_len"] - 1, pool_tokens)
        stem = rng.choice(stems)
        shared = rng.choice([0, length // 2, length * 3 // 4, length - 1, length])
        prompt = stem[:shared] + [rng.randrange(1, vocab_size) for _ in range(length - shared)]
        output = rng.choice([1, 3, 10, 40, 60])
        request = Request(
            request_id=f"r{number}",
            prompt=prompt,
            sampling=_sampling(rng, min(output, max(1, pool_tokens - length)), vocab_size, plain),
            priority=rng.choice([0, 0, 0, -1, 2]),
            cache_salt=rng.choice(salts),
            score=0 if not plain and rng.random() < 0.05 else -1,
        )
        mix.requests.append((turn, request))
        if rng.random() < 0.15:
            mix.aborts.append((turn + rng.randint(0, 30), request.request_id))
        if not plain and rng.random() < 0.05:
            mix.failures[request.request_id] = rng.randint(0, 4)
    return mix


def _config(rng: random.Random, page_size: int, longest: int) -> dict[str, Any]:
    pages = rng.choice([longest // 2, longest, longest, longest * 8]) // page_size + 1
    return {
        "page_size": page_size,
        "num_pages": max(4, pages),
        "max_model_len": rng.choice([longest, longest * 2]),
        "max_num_seqs": rng.choice([1, 2, 4, 8, 32]),
        "max_num_batched_tokens": rng.choice([8, 32, 64, 512]),
        "max_num_queued_reqs": rng.choice([4, 1024, 1024]),
        "step_time": rng.choice([0.0, 2e-3, 5e-3, 1.0]),
        "step_memory": rng.choice([1, 4000, 1 << 40]),
        "prefix_caching": rng.random() < 0.8,
        "seed": rng.randrange(100),
    }


def _length(rng: random.Random, longest: int) -> int:
    top = rng.choice([3, longest // 4, longest // 4, longest])
    return rng.randint(1, max(1, top))


def _sampling(rng: random.Random, output: int, vocab_size: int, plain: bool) -> SamplingParams:
    stops = rng.sample(range(1, vocab_size), rng.choice([0, 0, 0, 3]))
    if plain:
        return SamplingParams(max_tokens=output, temperature=0.0, stop_token_ids=stops)
    return SamplingParams(
        max_tokens=output if rng.random() < 0.9 else None,
        min_tokens=rng.choice([0, 0, 0, min(3, output)]),
        seed=rng.choice([None, rng.randrange(1000)]),
        stop_token_ids=stops,
        ignore_eos=rng.random() < 0.3,
        presence_penalty=rng.choice([0.0, 0.0, 0.5]),
        prompt_logprobs=rng.choice([None, None, None, None, None, None, 2]),
    )


def drive(
    mix: Mix,
    scheduler: Scheduler,
    launch: Callable[[StepPlan], None],
    collect: Callable[[], StepResult],
    most_turns: int = 20_000,
) -> Run:
    """Run a mix to its end with integrity checked every turn. Asynchronous mixes plan and launch
    one step ahead of what is committed."""
    run, in_flight = Run(), 0
    requests, aborts = sorted(mix.requests, key=lambda item: item[0]), sorted(mix.aborts)
    depth = 2 if mix.asynchronous else 1
    while requests or scheduler.has_work():
        assert run.turns < most_turns, f"mix {mix.seed} does not end"
        while requests and requests[0][0] <= run.turns:
            _submit(scheduler, requests.pop(0)[1], run)
        while aborts and aborts[0][0] <= run.turns:
            _abort(scheduler, aborts.pop(0)[1], run)
        plan = scheduler.plan() if in_flight < depth else None
        scheduler.check()
        if plan is not None:
            launch(plan)
            in_flight += 1
        elif in_flight == 0 and scheduler.has_work():
            raise AssertionError(f"mix {mix.seed}: work, nothing in flight, and no plan")
        if in_flight == depth or (plan is None and in_flight):
            for output in scheduler.commit(collect()):
                run.outputs.setdefault(output.request_id, []).append(output)
            in_flight -= 1
            scheduler.check()
        run.turns += 1
    return run


def _submit(scheduler: Scheduler, request: Request, run: Run) -> None:
    try:
        scheduler.add(request)
    except (QueueFull, RequestError):
        run.refused.add(request.request_id)


def _abort(scheduler: Scheduler, request_id: str, run: Run) -> None:
    done = any(out.finish_reason for out in run.outputs.get(request_id, []))
    if not done and request_id not in run.refused:
        run.aborted.add(request_id)
    scheduler.abort(request_id)
