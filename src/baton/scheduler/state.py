"""One request inside the scheduler, and the table of those that have a device slot.

           admit                      finish / abort / fail
WAITING ----------> RUNNING ------------------------------------> ENDED
   ^                   |  no row in flight: pages and slot return at once
   |      preempt      |  otherwise they return when the last such row commits
   +---- LEAVING <-----+
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import IntEnum

from baton.core.request import PositionLogprobs, Request, Timing
from baton.kv.manager import KVManager, KVSequence


class Status(IntEnum):
    """Where a sequence is; see the drawing above."""

    WAITING = 0
    RUNNING = 1
    LEAVING = 2
    ENDED = 3


@dataclass(slots=True, eq=False)
class Sequence:
    """Host state of one request.

    tokens: prompt and every output token that has been read, int64; never a placeholder.
    placeholders: tokens sampled on the device, or about to be, that were not read yet.
    computed: tokens whose KV is on the device once all steps in flight are done (upper bound).
    prefill_end: the first `prefill_end` tokens are sent by id; after that each step computes the
        slot's last sampled token, so `computed == len(tokens) + placeholders - 1`.
    limit: most tokens the sequence may grow to, prompt included.
    capacity: tokens its page table covers.
    chunk, passed: a chunk of so many tokens behind `computed` is under way through the layers, and
        has been planned through the first `passed`; 0 when there is none.
    in_flight: rows in steps that were planned and not committed.
    """

    request: Request
    order: int
    tokens: array[int]
    num_prompt: int
    limit: int
    seed: int
    stops: frozenset[int]
    kv: KVSequence
    timing: Timing
    status: Status = Status.WAITING
    lane: int = 0
    uncached: int = 0
    computed: int = 0
    placeholders: int = 0
    prefill_end: int = 0
    capacity: int = 0
    chunk: int = 0
    passed: int = 0
    in_flight: int = 0
    slot: int = -1
    scheduled: bool = False
    cached_tokens: int = 0
    #: memory shortage: pages that were available when it last did not fit, and plans it has waited
    refused_at: int = -1
    bypassed: int = 0
    #: entries for positions 1.. while the prompt is computed; None: not wanted or handed over
    prompt_logprobs: list[PositionLogprobs] | None = None

    @property
    def rank(self) -> tuple[int, int]:
        """Better requests compare lower: priority, then arrival."""
        return (self.request.priority, self.order)

    @property
    def prefilling(self) -> bool:
        """Tokens known by id are still to be computed."""
        return self.computed < self.prefill_end

    @property
    def cacheable(self) -> bool:
        """May start from the prefix cache: not while every prompt position must be computed."""
        return self.prompt_logprobs is None and self.request.score != 0

    @property
    def score(self) -> int:
        """Of the tokens behind `computed`, the first that is to be scored; -1: none ever."""
        wanted = self.request.score
        return -1 if wanted < 0 else max(0, wanted - self.computed)


@dataclass(slots=True)
class Seats:
    """Device slots: who has one, which are free, which the runner must be told to release.

    running: sequences that may be planned, in order of admission.
    leaving: preempted or ended sequences that hold slot and pages until their rows commit.
    """

    num_slots: int
    kv: KVManager
    running: dict[str, Sequence] = field(default_factory=dict)
    leaving: dict[int, Sequence] = field(default_factory=dict)
    free: list[int] = field(default_factory=list)
    vacated: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.free = list(range(self.num_slots - 1, -1, -1))

    def take(self, sequence: Sequence, hit: int) -> None:
        """Give a waiting sequence a slot. It holds its first pages, and `hit` tokens in them need
        no computing."""
        sequence.slot = self.free.pop()
        sequence.status = Status.RUNNING
        sequence.computed = hit
        sequence.capacity = len(sequence.kv.pages) * self.kv.page_size
        sequence.prefill_end = len(sequence.tokens)
        self.running[sequence.request.request_id] = sequence

    def leave(self, sequence: Sequence, status: Status) -> bool:
        """Stop planning a running sequence; True if slot and pages are back already."""
        del self.running[sequence.request.request_id]
        sequence.status = status
        if sequence.in_flight:
            self.leaving[sequence.slot] = sequence
            return False
        self.vacate(sequence)
        return True

    def vacate(self, sequence: Sequence) -> None:
        """Take slot and pages back; nothing in flight may use them."""
        assert sequence.in_flight == 0, "vacate while a step may use the pages"
        assert sequence.placeholders == 0, "a token was neither read nor dropped"
        self.leaving.pop(sequence.slot, None)
        self.kv.release(sequence.kv)
        self.free.append(sequence.slot)
        self.vacated.append(sequence.slot)
        sequence.slot = -1
        sequence.computed = sequence.capacity = sequence.prefill_end = 0
        sequence.chunk = sequence.passed = 0
        if sequence.prompt_logprobs is not None:
            sequence.prompt_logprobs = []

    def returning(self) -> int:
        """Pages (an upper bound: some may be shared) that leaving sequences will give back."""
        return sum(len(sequence.kv.pages) for sequence in self.leaving.values())

    def worst(self, below: Sequence) -> Sequence | None:
        """The running sequence to preempt for `below`: worst rank, and worse than `below`."""
        victim = max(self.running.values(), key=lambda sequence: sequence.rank)
        return victim if victim.rank > below.rank else None

    def holders(self) -> Iterator[Sequence]:
        """Every sequence that has a slot."""
        yield from self.running.values()
        yield from self.leaving.values()

    def check(self) -> None:
        """Assert that each slot has one owner and that counts agree with page tables."""
        held = [sequence.slot for sequence in self.holders()]
        assert sorted(held + self.free) == list(range(self.num_slots)), "a slot is lost or shared"
        for sequence in self.running.values():
            assert sequence.status is Status.RUNNING
            assert sequence.capacity == len(sequence.kv.pages) * self.kv.page_size
            assert sequence.computed + sequence.chunk <= sequence.capacity, "tokens without a page"
            if not sequence.prefilling:
                known = len(sequence.tokens) + sequence.placeholders
                assert sequence.computed == known - 1, "computed tokens do not chase known ones"
        for sequence in self.leaving.values():
            assert sequence.in_flight > 0, "a sequence leaves without a reason to wait"
