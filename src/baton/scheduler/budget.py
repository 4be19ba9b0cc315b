"""What a step may still hold: tokens, seconds and transient bytes; and how large a chunk fits."""

from __future__ import annotations

import math
from dataclasses import dataclass

from baton.scheduler.cost import CostModel


@dataclass(slots=True)
class Share:
    """Part of a step's tokens and seconds. `seconds` is infinite while nothing decodes."""

    tokens: float
    seconds: float


class Budget:
    """Room for prefill chunks beside the decodes of one step.

    A chunk is the largest that keeps predicted seconds, predicted bytes and tokens within their
    limits. Only the floor may exceed seconds and bytes: the first chunk of a step is at least one
    page, so that prefill always advances. Tokens are never exceeded.
    """

    def __init__(
        self, cost: CostModel, page_size: int, left: Share, tokens: int, longest: int, memory: int
    ) -> None:
        self._cost = cost
        self._page_size = page_size
        self._memory = memory
        self._step_tokens = tokens
        self._longest = longest
        self.left = left
        self.total = Share(left.tokens, left.seconds)
        self.chunks = 0

    def share(self, lanes: int, waiting: int) -> Share:
        """What a lane may use now, out of `lanes` with work of which `waiting` come later: all
        that is left except half of an even share for each of those."""
        keep = waiting / (2 * lanes)
        # An unbounded step stays so for each lane; max() keeps a late lane's share from sinking.
        seconds = self.left.seconds
        if seconds != math.inf:
            seconds -= keep * max(0.0, self.total.seconds)
        return Share(self.left.tokens - keep * self.total.tokens, seconds)

    def chunk(self, start: int, remaining: int, share: Share) -> int:
        """Tokens of the next chunk of a prompt that has computed `start` and lacks `remaining`;
        0 when not even a page fits. A cut chunk ends at a page's end where possible."""
        fits = min(
            share.tokens,
            self.left.tokens,
            self._cost.chunk_within(share.seconds, start),
            self._cost.bytes.chunk_within(self._memory, self._step_tokens, self._longest, start),
        )
        if fits >= remaining:
            return remaining
        page_end = self._page_size - start % self._page_size
        size = self.align(start, int(max(0.0, fits)))
        if size < page_end:
            size = min(page_end, int(self.left.tokens)) if self.chunks == 0 else 0
        return min(size, remaining)

    def align(self, start: int, size: int) -> int:
        """`size` cut back to the last page end it reaches, or as it is if it reaches none."""
        end = (start + size) // self._page_size * self._page_size
        return end - start if end > start else size

    def spend(self, start: int, size: int, share: Share) -> None:
        """Book a chunk."""
        seconds = self._cost.added(size, start)
        for part in (self.left, share):
            part.tokens -= size
            part.seconds -= seconds
        self._step_tokens += size
        self._longest = max(self._longest, start + size)
        self.chunks += 1
