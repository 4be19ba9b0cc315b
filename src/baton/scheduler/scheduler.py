"""Decides what runs next. There is no prefill phase and no decode phase: every request has
computed tokens chasing known tokens, and each step moves some of them on.

`plan()` may be called while one step is in flight, before its results are known. Counts advance
when a step is planned; ids, sealing of pages, and finishing follow when it commits. A sequence
that ends or is preempted with a row in flight keeps slot and pages until that row commits.
"""

from __future__ import annotations

import random
import time
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from baton.config.engine import EngineConfig
from baton.core.errors import RequestError
from baton.core.request import FinishReason, Request, Timing, TokenOutput
from baton.core.stats import EngineStats
from baton.core.step import RowResult, StepPlan, StepResult
from baton.kv.manager import KVManager
from baton.scheduler.admission import Admission
from baton.scheduler.cost import CostModel, Features
from baton.scheduler.draft import Draft
from baton.scheduler.planner import Planner
from baton.scheduler.queue import Queue
from baton.scheduler.state import Seats, Sequence, Status


class RowOwner(NamedTuple):
    """Whose tokens `[start, start + length)` a row of a plan computes, and `Request.score`."""

    request_id: str
    start: int
    length: int
    score: int


class Scheduler:
    """Requests in, plans out, results in, outputs out. Pure host state, one thread."""

    def __init__(
        self,
        config: EngineConfig,
        kv: KVManager,
        cost: CostModel,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        # A decode is one token, so that decodes never fill a step in which a prompt waits.
        self._seats = Seats(min(config.max_num_seqs, config.max_num_batched_tokens), kv)
        self._queue = Queue()
        self._planner = Planner(config, kv, cost, self._seats, self._queue)
        self._admission = Admission(config, kv, self._queue)
        self._config, self.kv, self._cost, self._clock = config, kv, cost, clock
        self._in_flight: deque[tuple[int, Draft]] = deque()
        self._stats = EngineStats(kv_pages_total=kv.num_pages)
        self._seeds = random.Random(config.seed)
        self._eos = frozenset(config.model.eos_token_ids)
        self._next_order = self._next_step = 0

    # What callers do ----------------------------------------------------------------------------

    def add(self, request: Request, *, room: int = 1) -> None:
        """Accept a request.

        Args:
            room: how many must find room in the queue, this one and others like it that follow;
                0 asks nothing of the queue.

        Raises:
            RequestError: it can never run, or its id is in use.
            QueueFull: too much is waiting already.
        """
        try:
            sequence = self._sequence(request)
            uncached = self._planner.uncached(sequence)
            if room:
                self._admission.make_room(uncached, room)
        except Exception:
            self._stats.rejected += 1
            raise
        self._queue.push(sequence, uncached)
        self._next_order += 1
        self._stats.prompt_tokens += len(request.prompt)

    def abort(self, request_id: str) -> None:
        """Drop a request, with no further output for it. Unknown ids are ignored."""
        sequence = self._find(request_id)
        if sequence is None:
            return
        self._stats.aborted += 1
        self._end(sequence)

    def plan(self) -> StepPlan | None:
        """The next step, or None when nothing can run before the step in flight commits."""
        assert len(self._in_flight) <= 1, "plan() with two steps in flight"
        draft = self._planner.draft()
        if not draft.rows:
            return None
        if draft.admit:
            self._note_first(draft)
        step = self._next_step
        self._next_step += 1
        self._in_flight.append((step, draft))
        release, self._seats.vacated = self._seats.vacated, []
        return StepPlan(step, release, draft.admit, draft.rows)

    def commit(self, result: StepResult) -> list[TokenOutput]:
        """Apply the results of the oldest step in flight."""
        step, draft = self._in_flight.popleft()
        assert result.step == step, f"result of step {result.step}, expected {step}"
        assert len(result.rows) == len(draft.rows), "a row has no result"
        outputs: list[TokenOutput] = []
        for index, sequence in enumerate(draft.sequences):
            self._commit_row(draft, index, sequence, result.rows[index], outputs)
        stats = self._stats
        stats.steps += 1
        stats.step_seconds += result.seconds
        stats.computed_tokens += draft.tokens
        self._admission.observe(draft.tokens, result.seconds)
        self._cost.observe(draft.features, result.seconds)
        return outputs

    def has_work(self) -> bool:
        """Anything waiting, running or in flight."""
        return bool(self._queue or self._seats.running or self._in_flight)

    def rows(self, step: int) -> list[RowOwner]:
        """Who owns each row of a planned step; valid until that step commits."""
        for number, draft in self._in_flight:
            if number == step:
                pairs = zip(draft.sequences, draft.rows, strict=True)
                return [
                    RowOwner(s.request.request_id, r.start, r.length, s.request.score)
                    for s, r in pairs
                ]
        raise KeyError(f"step {step} is not in flight")

    def stats(self) -> EngineStats:
        """A snapshot of counters and gauges. `host_seconds` and passes are the engine's
        to fill."""
        stats = self._stats
        stats.running = len(self._seats.running)
        stats.waiting = len(self._queue)
        stats.kv_pages_used = self.kv.used
        stats.kv_pages_cached = self.kv.cached
        stats.preemptions = self._planner.preemptions
        stats.longest_step = self.longest_step()
        return EngineStats(**{name: getattr(stats, name) for name in stats.__struct_fields__})

    def longest_step(self) -> float:
        """Seconds that a step takes at most, by the cost model as it is now: as many tokens as fit,
        in chunks that pass all layers and in one on its way through them, as many rows as there are
        slots, all of it behind the longest context."""
        config, rows = self._config, self._seats.num_slots
        chunks, longest = 2.0 * config.max_num_batched_tokens, float(config.max_model_len)
        read = rows * longest
        return self._cost.predict(Features(chunks + rows, chunks * longest, read, rows, read))

    def check(self) -> None:
        """Assert that pages, slots and counts are consistent."""
        self._seats.check()
        self._queue.check()
        holders = list(self._seats.holders())
        self.kv.check([sequence.kv for sequence in holders])
        rows = [sequence for _, draft in self._in_flight for sequence in draft.sequences]
        for sequence in holders:
            assert sequence.in_flight == rows.count(sequence), "rows in flight differ"
        for sequence in self._queue:
            assert sequence.status is Status.WAITING
            assert not sequence.kv.pages, "a waiting request holds pages"
        partial = [
            sequence.lane for sequence in self._seats.running.values() if sequence.prefilling
        ]
        assert len(partial) == len(set(partial)), "two prompts of one lane are partly computed"
        under_way = sum(sequence.chunk > 0 for sequence in self._seats.running.values())
        assert under_way <= 1, "two chunks are under way through the layers"

    # Details ------------------------------------------------------------------------------------

    def _sequence(self, request: Request) -> Sequence:
        name = request.request_id
        if self._find(name) is not None:
            raise RequestError(f"request id {name!r} is in use", param="request_id")
        limit, tokens = self._admission.limit(request), self._admission.ids(request)
        sampling = request.sampling
        # Drawn even if the user gave one, so that one request's options never change another's.
        drawn = self._seeds.getrandbits(63)
        stops = frozenset(sampling.stop_token_ids)
        return Sequence(
            request=request,
            order=self._next_order,
            tokens=tokens,
            num_prompt=len(request.prompt),
            limit=limit,
            seed=drawn if sampling.seed is None else sampling.seed,
            stops=stops if sampling.ignore_eos else stops | self._eos,
            kv=self.kv.open(request.cache_salt),
            timing=Timing(arrival=request.arrival),
            prompt_logprobs=None if sampling.prompt_logprobs is None else [],
        )

    def _find(self, request_id: str) -> Sequence | None:
        """The sequence of a request that has not ended."""
        found = self._queue.get(request_id) or self._seats.running.get(request_id)
        if found is not None:
            return found
        for sequence in self._seats.leaving.values():
            if sequence.request.request_id == request_id and sequence.status is Status.LEAVING:
                return sequence
        return None

    def _note_first(self, draft: Draft) -> None:
        """Account for sequences that are scheduled for the first time in this step."""
        now = self._clock()
        for sequence, row in zip(draft.sequences, draft.rows, strict=True):
            if not sequence.scheduled:
                sequence.scheduled = True
                sequence.timing.scheduled = now
                sequence.cached_tokens = row.start
                self._stats.prefix_queries += sequence.num_prompt
                self._stats.prefix_hits += row.start

    def _commit_row(
        self,
        draft: Draft,
        index: int,
        sequence: Sequence,
        result: RowResult,
        outputs: list[TokenOutput],
    ) -> None:
        row = draft.rows[index]
        sequence.in_flight -= 1
        if row.sample:
            sequence.placeholders -= 1
        if sequence.status is Status.ENDED:
            if not sequence.in_flight:
                self._seats.vacate(sequence)
            return
        if result.error is not None:
            self._stats.failed += 1
            outputs.append(self._finish(sequence, FinishReason.ERROR, error=result.error))
            return
        if row.sample:
            sequence.tokens.append(result.token)
        computed = row.start + row.length if row.ends else row.start
        if computed // self.kv.page_size > sequence.kv.sealed:
            self.kv.seal(sequence.kv, sequence.tokens, computed)
        if sequence.prompt_logprobs is not None and result.prompt_logprobs is not None:
            sequence.prompt_logprobs.extend(result.prompt_logprobs)
        if row.sample:
            outputs.append(self._sampled(sequence, result))
        if sequence.status is Status.LEAVING and not sequence.in_flight:
            self._seats.vacate(sequence)
            self._planner.requeue(sequence)

    def _sampled(self, sequence: Sequence, result: RowResult) -> TokenOutput:
        """Output for the token just appended, which may be the last."""
        self._stats.generation_tokens += 1
        token, timing = result.token, sequence.timing
        count = len(sequence.tokens) - sequence.num_prompt
        reason: FinishReason | None = None
        if token in sequence.stops and count >= sequence.request.sampling.min_tokens:
            reason = FinishReason.STOP
        elif len(sequence.tokens) >= sequence.limit:
            reason = FinishReason.LENGTH
        output = TokenOutput(
            request_id=sequence.request.request_id,
            token_ids=[token],
            logprobs=None if result.logprobs is None else [result.logprobs],
            cached_tokens=sequence.cached_tokens,
        )
        if count == 1:
            timing.first_token = self._clock()
            if sequence.prompt_logprobs is not None:
                known = sequence.prompt_logprobs[: sequence.num_prompt - 1]
                output.prompt_logprobs = [None, *known]
                sequence.prompt_logprobs = None
        if reason is not None:
            output.finish_reason = reason
            sampling = sequence.request.sampling
            is_eos = token in self._eos and not sampling.ignore_eos
            if reason is FinishReason.STOP and not is_eos:
                output.stop_reason = token
            self._close(sequence, output)
        return output

    def _finish(self, sequence: Sequence, reason: FinishReason, error: str) -> TokenOutput:
        output = TokenOutput(
            request_id=sequence.request.request_id,
            finish_reason=reason,
            cached_tokens=sequence.cached_tokens,
            error=error,
        )
        self._close(sequence, output)
        return output

    def _close(self, sequence: Sequence, output: TokenOutput) -> None:
        """End a sequence whose row has just committed."""
        sequence.timing.finished = self._clock()
        output.timing = sequence.timing
        self._stats.finished += output.finish_reason is not FinishReason.ERROR
        self._end(sequence)

    def _end(self, sequence: Sequence) -> None:
        """Stop everything for a sequence; what rows in flight use stays until they commit."""
        if sequence.status is Status.WAITING:
            self._queue.remove(sequence)
            sequence.status = Status.ENDED
        elif sequence.status is Status.RUNNING:
            self._seats.leave(sequence, Status.ENDED)
        else:
            sequence.status = Status.ENDED
            if not sequence.in_flight:
                self._seats.vacate(sequence)
