"""A scheduler without a runner: requests, plans, and answers made up for them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from baton.core.request import Request, TokenOutput
from baton.core.sampling import SamplingParams
from baton.core.step import RowResult, StepPlan, StepResult
from baton.kv.manager import KVManager
from baton.scheduler.cost import CostModel
from baton.scheduler.scheduler import Scheduler
from helpers.configs import make_config


def make(cost: CostModel | None = None, **changes: Any) -> Scheduler:
    config = make_config(**changes)
    kv = KVManager(config.num_pages, config.page_size, b"x", config.prefix_caching)
    ticks: Iterator[float] = iter(range(1, 10**9))
    return Scheduler(config, kv, cost or CostModel(), clock=lambda: float(next(ticks)))


def ask(name: str, length: int = 10, first: int = 1, **changes: Any) -> Request:
    """A request for 4 tokens; equal `first` means equal prefixes."""
    sampling = {"max_tokens": 4, **changes.pop("sampling", {})}
    prompt = [(first + i) % 90 + 1 for i in range(length)]
    return Request(request_id=name, prompt=prompt, sampling=SamplingParams(**sampling), **changes)


def answer(plan: StepPlan, token: int = 5, seconds: float = 0.01) -> StepResult:
    rows = [RowResult(token if row.sample else -1) for row in plan.rows]
    return StepResult(plan.step, rows, seconds)


def step(scheduler: Scheduler, token: int = 5) -> tuple[StepPlan, list[TokenOutput]]:
    plan = scheduler.plan()
    assert plan is not None
    scheduler.check()
    outputs = scheduler.commit(answer(plan, token))
    scheduler.check()
    return plan, outputs


def finish(scheduler: Scheduler, token: int = 5) -> list[TokenOutput]:
    outputs = []
    while scheduler.has_work():
        outputs += step(scheduler, token)[1]
    return outputs
