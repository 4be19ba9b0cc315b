"""Request slots that live on the device: the truth about lengths, last tokens and page tables.

The host only ever appends pages and names slots. Debug mode (`BATON_DEBUG=1`) poisons every field
of an unused slot and checks that each sampled token is read by exactly one later step.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from baton.core.step import Row, StepPlan
from baton.ops.host import upload_together
from baton.ops.step import DecodeInputs, PromptInputs, advance, decode_inputs, prompt_inputs

#: Far outside any vocabulary or pool, so that a stray read fails loudly instead of quietly.
POISON = -(2**40)


class Slots:
    """Device state of up to `num_slots` requests.

    last_token: int64 [num_slots], the newest sampled id, not yet in the KV cache.
    computed: int64 [num_slots], tokens in the KV cache.
    pages: int64 [num_slots, max_pages], page ids in order of position.
    fresh: bool [num_slots], a sampled token waits to be read (debug mode only).

    One more row, `scrap`, pads batches: length 0, token 0, and only the page after the pool's
    last one, which nobody owns.
    """

    def __init__(
        self, num_slots: int, num_pages: int, max_pages: int, device: torch.device, *, debug: bool
    ) -> None:
        fill, rows = POISON if debug else 0, num_slots + 1
        self.last_token = torch.full((rows,), fill, dtype=torch.int64, device=device)
        # What the host writes is one tensor, so that one copy and one kernel write it.
        size = rows * max_pages + rows
        self._from_host = torch.full((size,), fill, dtype=torch.int64, device=device)
        self.pages = self._from_host[:-rows].view(rows, max_pages)
        self.computed = self._from_host[-rows:]
        self.fresh = torch.zeros(rows, dtype=torch.bool, device=device)
        self.scrap = num_slots
        self.last_token[self.scrap] = 0
        self.computed[self.scrap] = 0
        self.pages[self.scrap] = num_pages
        self.debug = debug
        self._num_pages = [0] * num_slots  # host count of pages in each table

    def apply(self, plan: StepPlan) -> None:
        """Release, admit and extend page tables, in that order, before the step's rows run."""
        for slot in plan.release:
            self._num_pages[slot] = 0
            if self.debug:
                self.last_token[slot] = POISON
                self.computed[slot] = POISON
                self.pages[slot] = POISON
                self.fresh[slot] = False
        where: list[int] = []  # places in `_from_host`
        what: list[int] = []  # to be written there
        starts = {row.slot: row.start for row in plan.rows} if plan.admit else {}
        for admit in plan.admit:
            self._num_pages[admit.slot] = 0
            where.append(self.pages.numel() + admit.slot)
            what.append(starts.get(admit.slot, 0))
        for row in plan.rows:
            if row.pages:
                held, width = self._num_pages[row.slot], self.pages.shape[1]
                self._num_pages[row.slot] = after = held + len(row.pages)
                assert after <= width, f"slot {row.slot}: {after} pages in a table of {width}"
                where += range(row.slot * width + held, row.slot * width + after)
                what += row.pages
        if where:
            self._from_host.index_copy_(0, *upload_together((where, what), self._from_host.device))

    def read(self, slots: torch.Tensor) -> torch.Tensor:
        """Last tokens of `slots` [n]; in debug mode each may be read once."""
        if self.debug:
            if not bool(self.fresh[slots].all()):
                stale = slots[~self.fresh[slots]].tolist()
                raise AssertionError(f"slots {stale}: last token read twice or never written")
            self.fresh[slots] = False
        return self.last_token[slots]

    def write(self, slots: torch.Tensor, tokens: torch.Tensor) -> None:
        """Publish sampled `tokens` [n] of `slots` [n] for the next step."""
        if self.debug:
            self.fresh[slots] = True
        self.last_token[slots] = tokens

    def decode_inputs(self, slots: torch.Tensor, page_size: int) -> DecodeInputs:
        """What a decode of `slots` [n] reads. Not in debug mode: see `read`."""
        return decode_inputs(slots, self.last_token, self.computed, self.pages, page_size)

    def prompt_inputs(self, head: torch.Tensor, size: int, page_size: int) -> PromptInputs:
        """What a prompt of `head` (int64: slot, length) reads, of `size` tokens with its padding;
        its length is counted. Not in debug mode, whose unused pages are poison."""
        return prompt_inputs(head, size, self.computed, self.pages, page_size)

    def advance(
        self,
        slots: torch.Tensor,
        live: torch.Tensor,
        chosen: tuple[torch.Tensor, torch.Tensor],
        generated: torch.Tensor,
    ) -> torch.Tensor:
        """Publish `chosen` tokens [n] of a decode of `slots` [n] whose rows are `live` (1, else
        0): lengths and tokens `generated` (int64 [num_slots + 1]) grow by one. Returns the tokens
        and which of them come from unusable logits, int64 [2, n]. Not in debug mode: see
        `write`."""
        state = self.last_token, self.computed, generated
        return advance(slots, live, *chosen, *state)

    def occupy(self, count: int, context: int, width: int, num_pages: int) -> None:
        """Before any request: the first `count` slots look as if `context` tokens lay in `width`
        pages each, any pages. `vacate` ends that."""
        pages = torch.arange(count * width, device=self.pages.device) % num_pages
        self.pages[:count, :width] = pages.view(count, width)
        self.computed[:count] = context
        self.last_token[:count] = torch.arange(count, device=self.pages.device)

    def vacate(self, count: int) -> None:
        """Empty the first `count` slots."""
        for held in (self.pages, self.computed, self.last_token):
            held[:count] = 0

    def void(self, rows: Sequence[Row]) -> None:
        """Leave the slots of rows that failed as if they had run, with id 0 for their samples: the
        requests are lost, but the step behind it, already planned, must find what it expects."""
        for row in rows:
            if row.ends:
                self.computed[row.slot] = row.start + row.length
            if row.sample:
                self.last_token[row.slot] = 0
                self.fresh[row.slot] = True
