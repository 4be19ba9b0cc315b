"""A runner without a model. Page contents are token ids, and the next token is a hash of every
visible token read *through the page table*: a wrong page, a wrong start, or a page freed too early
shows up as a wrong token or as poison."""

from __future__ import annotations

import zlib
from array import array
from collections import deque
from dataclasses import dataclass, field

from baton.core.request import PositionLogprobs, Request, TokenLogprob
from baton.core.step import Admit, Row, RowResult, StepPlan, StepResult
from baton.kv.manager import KVManager
from baton.scheduler.cost import pairs

VOCAB = 97


def next_token(prefix: list[int], seed: int) -> int:
    """What the fake model says after `prefix`."""
    return zlib.crc32(array("i", prefix).tobytes(), seed & 0xFFFFFFFF) % VOCAB


def alone(request: Request, eos: tuple[int, ...], limit: int) -> list[int]:
    """Tokens of a request that runs by itself; `limit` bounds prompt plus output."""
    sampling, tokens = request.sampling, list(request.prompt)
    if request.score >= 0:
        limit = len(tokens) + 1
    elif sampling.max_tokens is not None:
        limit = min(limit, len(tokens) + sampling.max_tokens)
    stops = set(sampling.stop_token_ids) | (set() if sampling.ignore_eos else set(eos))
    while len(tokens) < limit:
        tokens.append(next_token(tokens, sampling.seed or 0))
        if tokens[-1] in stops and len(tokens) - len(request.prompt) >= sampling.min_tokens:
            break
    return tokens[len(request.prompt) :]


@dataclass
class Slot:
    """Device state of one slot."""

    admit: Admit
    pages: list[int] = field(default_factory=list)
    last: int | None = None


class FakeRunner:
    """Runs plans at once, returns results in order. `failing[slot owner]` is not its business:
    failures are injected by `fail(plan row) -> error or None`."""

    def __init__(
        self,
        num_slots: int,
        kv: KVManager,
        seconds_per_token: float = 1e-4,
        num_layers: int = 1,
    ) -> None:
        self.kv = kv
        self.num_layers = num_layers
        self.seconds_per_token = seconds_per_token
        self.slots: list[Slot | None] = [None] * num_slots
        self.memory: list[int | None] = [None] * (kv.num_pages * kv.page_size)
        self.results: deque[StepResult] = deque()
        self.errors: dict[int, str] = {}  # row index -> error, for the next launch
        self.under_way: tuple[int, int, int, int] | None = None  # slot, start, length, layers done
        self.deep_chunks = 0
        self.next_step = 0

    def launch(self, plan: StepPlan) -> None:
        """Run one plan."""
        assert plan.step == self.next_step
        self.next_step += 1
        size = self.kv.page_size
        for page in self.kv.drain_freed():
            self.memory[page * size : (page + 1) * size] = [None] * size
        for slot in plan.release:
            assert self.slots[slot] is not None, "release of an empty slot"
            self.slots[slot] = None
            if self.under_way and self.under_way[0] == slot:
                self.under_way = None
        for admit in plan.admit:
            assert self.slots[admit.slot] is None, "admit to a slot in use"
            self.slots[admit.slot] = Slot(admit)
        written: dict[int, int] = {}
        ended = [self._pass(row) for row in plan.rows]
        inputs = [
            self._write(row, written, index) if ended[index] else []
            for index, row in enumerate(plan.rows)
        ]
        rows = [
            self._read(row, ids, written, index) if ended[index] else RowResult()
            for index, (row, ids) in enumerate(zip(plan.rows, inputs, strict=True))
        ]
        assert sum(row.layers is not None for row in plan.rows) <= 1
        for index, message in self.errors.items():
            rows[index].error = message
        self.errors = {}
        seconds = 1e-3
        for row in plan.rows:
            share = 1.0 if row.layers is None else (row.layers[1] - row.layers[0]) / self.num_layers
            seconds += share * self.seconds_per_token * row.length
            seconds += share * 1e-8 * pairs(row.length, row.start)
        self.results.append(StepResult(plan.step, rows, seconds))

    def collect(self) -> StepResult:
        """The oldest result not collected."""
        return self.results.popleft()

    def _pass(self, row: Row) -> bool:
        """Take a row through its layers; whether it has passed all of them."""
        slot = self.slots[row.slot]
        assert slot is not None, "row for an empty slot"
        slot.pages.extend(row.pages)
        if row.layers is None:
            assert row.ends
            assert self.under_way is None or self.under_way[0] != row.slot, "overtakes itself"
            return True
        first, last = row.layers
        assert first < last
        chunk = (row.slot, row.start, row.length)
        if first == 0:
            self.deep_chunks += 1
        else:
            assert not row.pages
            assert self.under_way == (*chunk, first), "goes on where no chunk stands"
        self.under_way = None if row.ends else (*chunk, last)
        assert not (row.sample and not row.ends)
        return row.ends

    def _write(self, row: Row, written: dict[int, int], index: int) -> list[int]:
        slot = self.slots[row.slot]
        assert slot is not None
        assert row.length > 0
        assert row.start + row.length <= len(slot.pages) * self.kv.page_size, "table too short"
        ids = row.ids.tolist()
        if not ids:
            assert row.length == 1
            assert slot.last is not None, "no sampled token in the slot"
            ids = [slot.last]
        assert len(ids) == row.length
        for offset, token in enumerate(ids):
            position = self._position(slot, row.start + offset)
            assert position not in written, "two rows write one position"
            self.memory[position] = token
            written[position] = index
        return ids

    def _read(self, row: Row, ids: list[int], written: dict[int, int], index: int) -> RowResult:
        slot = self.slots[row.slot]
        assert slot is not None
        prefix = []
        for number in range(row.start + row.length):
            position = self._position(slot, number)
            token = self.memory[position]
            assert token is not None, "a poisoned position is read"
            assert written.get(position, index) == index, "reads what another row writes"
            prefix.append(token)
        result = RowResult()
        if row.prompt_logprobs >= 0:
            following = [*ids[1:], row.next_token]
            result.prompt_logprobs = [
                PositionLogprobs(TokenLogprob(token, -float(row.start + offset), 1), [])
                for offset, token in enumerate(following)
            ]
        if row.sample:
            admit = slot.admit
            if admit.tokens and slot.last is None:
                assert admit.tokens == prefix[: len(admit.tokens)], "penalties see wrong tokens"
            if slot.last is None:
                assert admit.num_prompt + admit.num_output == len(prefix), "counts at admission"
            result.token = slot.last = next_token(prefix, admit.sampling.seed or 0)
        return result

    def _position(self, slot: Slot, number: int) -> int:
        size = self.kv.page_size
        return slot.pages[number // size] * size + number % size
