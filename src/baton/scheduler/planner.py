"""Chooses the rows of a step: every decode, then chunks of prompts by length lane.

Between two steps a chunk may be under way through the layers: one of all, see `Budget`.

Under pressure, in this order: a chunk is split, idle cached pages are evicted, the worst running
request is preempted. A request that could not run even alone is refused when it arrives.

Two invariants keep memory from filling with half-computed prompts:
  * a request that holds KV never waits behind one that holds none: nothing is admitted in a step
    in which a running request lacked a page, nor unless its whole prompt fits beside what the
    running ones still need to finish theirs;
  * a lane starts a prompt only when its earlier ones got all they need, so at most one prompt per
    lane is partly computed.
"""

from __future__ import annotations

import math

from baton.config.engine import EngineConfig
from baton.kv.manager import KVManager, Match
from baton.scheduler.budget import Budget, Cut, Share
from baton.scheduler.cost import CostModel
from baton.scheduler.draft import NONE, Draft
from baton.scheduler.queue import NUM_LANES, Queue
from baton.scheduler.state import Seats, Sequence, Status

#: A request that did not fit for this many plans lets nobody else in until it does.
PATIENCE = 256

#: Share of a step's time that prefill has even when decodes alone take longer than a step may.
LEAST = 0.1


class Planner:
    """Turns running and waiting sequences into a Draft. Touches only host state."""

    def __init__(
        self, config: EngineConfig, kv: KVManager, cost: CostModel, seats: Seats, queue: Queue
    ) -> None:
        self._kv, self._cost, self._seats, self._queue = kv, cost, seats, queue
        self._max_tokens = config.max_num_batched_tokens
        self._num_layers = config.model.num_layers
        self._step_time = config.step_time
        self._memory = config.step_memory
        self._skipped = [0] * NUM_LANES
        self.preemptions = 0
        self.patience = PATIENCE

    def draft(self) -> Draft:
        """Choose the next step's rows; empty when nothing can run now."""
        draft = Draft()
        draft.partial = self._decodes(draft)
        if draft.partial or len(self._queue):
            self._prefills(draft)
        return draft

    # Decodes -----------------------------------------------------------------------------------

    def _decodes(self, draft: Draft) -> list[Sequence]:
        """Plan one token for each running decode; returns the sequences that still prefill."""
        partial, needy = [], []
        for sequence in self._seats.running.values():
            if sequence.computed < sequence.prefill_end:
                partial.append(sequence)
            elif sequence.computed + 1 >= sequence.limit:
                continue  # its last token is on its way
            elif sequence.computed == sequence.capacity:
                needy.append(sequence)
            else:
                draft.decode(sequence, NONE)
        # Best rank first: a worse one must not take the page that a better one then preempts for.
        for sequence in sorted(needy, key=lambda sequence: sequence.rank):
            if sequence.status is not Status.RUNNING:  # preempted by one before it
                continue
            pages = self._grow(draft, sequence, sequence.computed + 1)
            if pages is not None:
                draft.decode(sequence, pages)
        return partial

    def _grow(self, draft: Draft, sequence: Sequence, num_tokens: int) -> list[int] | None:
        """Pages for a running sequence, preempting worse ones if there is no other way. None:
        not in this step, because the pages come back only when a step in flight commits."""
        kv, seats = self._kv, self._seats
        while (pages := kv.grow(sequence.kv, num_tokens)) is None:
            need = kv.pages_for(num_tokens) - len(sequence.kv.pages)
            victim = None
            if kv.available + seats.returning() < need:
                victim = seats.worst(below=sequence)
            if victim is None:
                draft.starved = True
                return None
            self._preempt(victim)
        sequence.capacity += len(pages) * kv.page_size
        return pages

    def _preempt(self, victim: Sequence) -> None:
        self.preemptions += 1
        if self._seats.leave(victim, Status.LEAVING):
            self.requeue(victim)

    def requeue(self, sequence: Sequence) -> None:
        """Let a preempted sequence, which holds nothing any more, wait for its next turn."""
        sequence.status = Status.WAITING
        self._queue.push(sequence, self.uncached(sequence))

    def uncached(self, sequence: Sequence) -> int:
        """Tokens a sequence without pages would have to compute now."""
        return len(sequence.tokens) - len(self._match(sequence).pages) * self._kv.page_size

    def _match(self, sequence: Sequence) -> Match:
        if sequence.cacheable:
            wanted = sequence.request.score
            most = len(sequence.tokens) - 1 if wanted < 0 else wanted
            return self._kv.match(sequence.kv, sequence.tokens, most)
        return Match([], 0)

    # Prefills ----------------------------------------------------------------------------------

    def _prefills(self, draft: Draft) -> None:
        """Share what the decodes leave among the lanes that have work."""
        lanes: list[list[Sequence]] = [[] for _ in range(NUM_LANES)]
        for sequence in sorted(draft.partial, key=lambda sequence: sequence.rank):
            lanes[sequence.lane].append(sequence)
        order = [lane for lane in range(NUM_LANES) if lanes[lane] or self._queue.head(lane)]
        # A lane that got nothing last time goes first; otherwise the shortest does.
        order.sort(key=lambda lane: (-self._skipped[lane], lane))
        budget = self._budget(draft)
        blocker = self._blocker(order)
        for position, lane in enumerate(order):
            before = budget.chunks
            share = budget.share(len(order), len(order) - position - 1)
            if self._continue(draft, budget, share, lanes[lane]):
                self._start(draft, budget, share, lane, blocker)
            served = budget.chunks > before
            self._skipped[lane] = 0 if served else self._skipped[lane] + 1

    def _budget(self, draft: Draft) -> Budget:
        seconds = math.inf
        if draft.decodes:
            seconds = self._step_time - self._cost.predict(draft.features)
            seconds = max(seconds, LEAST * self._step_time)
        # Decodes come on top: taken off, they would leave every chunk a page short of its size.
        left = Share(self._max_tokens, seconds)
        return Budget(
            self._cost,
            self._kv.page_size,
            self._num_layers,
            left,
            draft.tokens,
            draft.longest,
            self._memory,
            under_way=any(sequence.chunk for sequence in draft.partial),
        )

    def _blocker(self, order: list[int]) -> Sequence | None:
        """The request that was passed over too often: until it fits, only it may start."""
        heads = [head for lane in order if (head := self._queue.head(lane)) is not None]
        tired = [head for head in heads if head.bypassed >= self.patience]
        return min(tired, key=lambda head: head.order, default=None)

    def _continue(
        self, draft: Draft, budget: Budget, share: Share, partial: list[Sequence]
    ) -> bool:
        """Advance a lane's partly computed prompts; True if each got all it needs."""
        for sequence in partial:
            if sequence.status is not Status.RUNNING:  # preempted since
                continue
            start, remaining = sequence.computed, sequence.prefill_end - sequence.computed
            if sequence.chunk:
                layers = budget.layers(start, sequence.chunk, sequence.passed, share)
                if layers <= 0:
                    return False
                self._book(draft, budget, share, sequence, Cut(sequence.chunk, layers), NONE)
                if sequence.prefilling:
                    return False
                continue
            cut = budget.chunk(start, remaining, share)
            size = cut.size
            if size <= 0:
                return False
            room = sequence.capacity + self._kv.available * self._kv.page_size - start
            if size > room:  # split first; if nothing is left to split, make room for one page
                page = self._kv.page_size - start % self._kv.page_size
                size = room if room > 0 else min(size, page)
            pages = self._grow(draft, sequence, start + size)
            if pages is None:
                return False
            self._book(draft, budget, share, sequence, Cut(size, cut.layers), pages)
            if sequence.prefilling:
                return False
        return True

    def _book(
        self,
        draft: Draft,
        budget: Budget,
        share: Share,
        sequence: Sequence,
        cut: Cut,
        pages: list[int],
    ) -> None:
        budget.spend(sequence.computed, cut, share)
        draft.chunk(sequence, cut, self._num_layers, pages)

    def _start(
        self, draft: Draft, budget: Budget, share: Share, lane: int, blocker: Sequence | None
    ) -> None:
        """Start waiting prompts of a lane while slots, pages and its share last."""
        while not draft.starved and self._seats.free:
            sequence = self._queue.head(lane)
            if sequence is None or (blocker is not None and sequence is not blocker):
                return
            if not budget.chunk(0, min(self._kv.page_size, sequence.uncached), share).size:
                return
            match = self._fits(draft, sequence)
            if match is None:
                return
            hit = self._kv.hold(sequence.kv, match)
            remaining = len(sequence.tokens) - hit
            cut = budget.chunk(hit, remaining, share)
            if not cut.size or self._kv.grow(sequence.kv, hit + cut.size) is None:
                self._kv.release(sequence.kv)
                return
            self._queue.remove(sequence)
            self._seats.take(sequence, hit)
            draft.enter(sequence)
            self._book(draft, budget, share, sequence, cut, list(sequence.kv.pages))
            if sequence.prefilling:
                draft.partial.append(sequence)
                return
            blocker = None if sequence is blocker else blocker

    def _fits(self, draft: Draft, sequence: Sequence) -> Match | None:
        """What a waiting sequence can share, if its whole prompt fits beside what running
        requests need: the rest of partly computed prompts, and a page for each to decode into."""
        kv, running = self._kv, self._seats.running
        reserved = min(len(running), kv.num_pages // 16)
        for other in draft.partial:
            if other.status is Status.RUNNING:
                reserved += kv.pages_for(other.prefill_end) - len(other.kv.pages)
        available = kv.available - reserved
        alone = not running and not self._seats.leaving
        if not alone and available <= sequence.refused_at:
            sequence.bypassed += 1
            return None
        match = self._match(sequence)
        need = kv.pages_for(min(len(sequence.tokens) + 1, sequence.limit - 1))
        need -= len(match.pages) - match.idle
        if available >= need or alone:
            return match
        sequence.refused_at = available
        sequence.bypassed += 1
        return None
