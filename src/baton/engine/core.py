"""The engine loop: plan, launch, and commit one step behind. No sockets, no text, no processes."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence

from baton.config.engine import EngineConfig
from baton.core import env
from baton.core.errors import BatonError, Unavailable
from baton.core.log import get_logger
from baton.core.request import Request, TokenOutput
from baton.core.stats import EngineStats
from baton.core.step import RowResult, Scores, StepPlan, StepResult
from baton.engine.executor import Executor
from baton.kv.manager import KVManager
from baton.runner.runner import Ticket
from baton.scheduler.scheduler import Scheduler

log = get_logger("engine")


class EngineCore:
    """Requests in, token outputs out, one call of `step()` at a time; single-threaded.

    With `async_scheduling` two steps are in flight: step N+1 is planned and launched before step
    N is read, so the device never waits for the host.
    """

    def __init__(self, config: EngineConfig, scheduler: Scheduler, executor: Executor) -> None:
        self.config = config
        self.scheduler = scheduler
        self.executor = executor
        self.scores: dict[str, list[Scores]] = {}
        self._in_flight: deque[tuple[StepPlan, Ticket]] = deque()
        self._depth = 2 if config.async_scheduling else 1
        self._debug = env.DEBUG.get()
        self._host_seconds = 0.0

    @property
    def kv(self) -> KVManager:
        """The page account."""
        return self.scheduler.kv

    def add(self, requests: Sequence[Request], *, limited: bool = True) -> None:
        """Queue requests together, or none of them.

        Args:
            limited: whether the queue's limits apply; not for a caller who waits for the answers.

        Raises:
            RequestError: one of them is not acceptable, or they are more than may ever wait.
            QueueFull: there is no room for all of them now.
        """
        added: list[str] = []
        room = len(requests) if limited else 0
        try:
            for request in requests:
                self.scheduler.add(request, room=room if not added else 0)
                added.append(request.request_id)
        except BatonError:
            for request_id in added:
                self.scheduler.abort(request_id)
            raise

    def abort(self, request_id: str) -> None:
        """Stop a request; its pages are free once no step in flight reads them."""
        self.scheduler.abort(request_id)

    def has_work(self) -> bool:
        """True while anything is waiting, running or in flight."""
        return bool(self._in_flight) or self.scheduler.has_work()

    def step(self) -> list[TokenOutput]:
        """Launch the next step if there is one, then commit the oldest step in flight.

        Returns what that commit produced; empty while the pipeline fills.

        Raises:
            Unavailable: a rank died; the engine cannot go on.
        """
        begin = time.perf_counter()
        plan = self.scheduler.plan() if len(self._in_flight) < self._depth else None
        if plan is not None:
            if self._debug:
                self._poison_freed()
            self._in_flight.append((plan, self.executor.launch(plan)))
        self._host_seconds += time.perf_counter() - begin
        if not self._in_flight or (plan is not None and len(self._in_flight) < self._depth):
            return []
        return self._commit()

    def check(self) -> None:
        """Raise Unavailable if a rank has died; for a caller that has nothing to step."""
        self.executor.check()

    def stats(self) -> EngineStats:
        """Counters of the scheduler, the host time spent around steps, and passes run."""
        stats = self.scheduler.stats()
        stats.host_seconds = self._host_seconds
        stats.graph_passes, stats.eager_passes = self.executor.passes
        return stats

    def close(self) -> None:
        """End the runner and all ranks."""
        self.executor.close()

    def _commit(self) -> list[TokenOutput]:
        plan, ticket = self._in_flight.popleft()
        try:
            result = self.executor.collect(ticket)
        except (Unavailable, AssertionError):
            raise
        except Exception as error:  # the step's requests fail; the engine goes on
            log.exception("step %d failed", plan.step)
            message = f"the step that ran this request failed: {type(error).__name__}: {error}"
            result = StepResult(plan.step, [RowResult(error=message) for _ in plan.rows], 0.0)
        begin = time.perf_counter()
        if result.scores:
            owners = self.scheduler.rows(plan.step)
            for row, scores in result.scores.items():
                owner = owners[row]
                if owner.start <= owner.score:  # the first time, or again after a preemption
                    self.scores.pop(owner.request_id, None)
                self.scores.setdefault(owner.request_id, []).append(scores)
        outputs = self.scheduler.commit(result)
        if self._debug:
            self.scheduler.check()
        self._host_seconds += time.perf_counter() - begin
        return outputs

    def _poison_freed(self) -> None:
        freed = self.kv.drain_freed()
        if freed:
            self.executor.poison(freed)
