"""What a step may still hold: tokens, seconds and transient bytes; and how large a chunk fits."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

from baton.scheduler.cost import CostModel


@dataclass(slots=True)
class Share:
    """Part of a step's tokens and seconds. `seconds` is infinite while nothing decodes."""

    tokens: float
    seconds: float


class Cut(NamedTuple):
    """What a step computes of a prompt: `size` tokens, through the next `layers` layers."""

    size: int
    layers: int


NOTHING = Cut(0, 0)


class Budget:
    """Room for prefill chunks beside the decodes of one step.

    A chunk is as large as tokens and predicted bytes allow. If it takes longer than a step may, it
    is carried through the layers over several steps, a few layers at a time, with decodes in
    between: cut by tokens instead, every piece would gather (and for latent attention project up)
    all the context again, and read all experts' weights. By tokens it is cut only until one layer
    of it fits in a step's time, or while another chunk is under way.

    Only the floor may exceed seconds and bytes: the first chunk of a step is at least one page, or
    one layer, so that prefill always advances. Tokens are never exceeded.

    Args:
        left: prompt tokens of a step (decodes come on top), and seconds that its decodes leave.
        tokens, longest: what the decodes hold, for the account of bytes.
        memory: bytes of a step. A chunk that passes by layers runs apart from the other rows, so
            it has these bytes, and as many tokens as a step may hold, to itself.
        under_way: whether a chunk is on its way through the layers.
    """

    def __init__(
        self,
        cost: CostModel,
        page_size: int,
        num_layers: int,
        left: Share,
        tokens: int,
        longest: int,
        memory: int,
        *,
        under_way: bool = False,
    ) -> None:
        self._cost = cost
        self._page_size = page_size
        self._num_layers = num_layers
        self._memory = memory
        self._step_tokens = tokens
        self._longest = longest
        self._under_way = under_way
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

    def chunk(self, start: int, remaining: int, share: Share) -> Cut:
        """The next chunk of a prompt that has computed `start` and lacks `remaining`; NOTHING when
        not even a page fits. A cut chunk ends at a page's end where possible."""
        tokens = min(share.tokens, self.left.tokens)
        room = self._cost.bytes.chunk_within(self._memory, self._step_tokens, self._longest, start)
        in_time = self._cost.chunk_within(share.seconds, start)
        fits = min(tokens, room, in_time)
        if fits >= remaining:
            return Cut(remaining, self._num_layers)
        page_end = self._page_size - start % self._page_size
        size = self.align(start, int(max(0.0, fits)))
        if in_time < min(tokens, room):
            deep = self._deep(start, remaining, share)
            if deep.size > max(size, page_end):
                return deep
        if size < page_end:
            size = min(page_end, int(self.left.tokens)) if self.chunks == 0 else 0
        return Cut(min(size, remaining), self._num_layers) if size else NOTHING

    def layers(self, start: int, size: int, done: int, share: Share) -> int:
        """How many layers more a chunk that is under way passes in this step."""
        whole, left = self._cost.added(size, start), self._num_layers - done
        if whole <= 0.0 or share.seconds == math.inf:
            return left
        fit = int(max(0.0, share.seconds) / whole * self._num_layers)
        return min(left, fit if self.chunks else max(1, fit))

    def align(self, start: int, size: int) -> int:
        """`size` cut back to the last page end it reaches, or as it is if it reaches none."""
        end = (start + size) // self._page_size * self._page_size
        return end - start if end > start else size

    def spend(self, start: int, cut: Cut, share: Share) -> None:
        """Book a chunk."""
        seconds = self._cost.added(cut.size, start) * (cut.layers / self._num_layers)
        self.chunks += 1
        self.left.seconds -= seconds
        share.seconds -= seconds
        if cut.layers < self._num_layers:
            self._under_way = True
            return
        self.left.tokens -= cut.size
        share.tokens -= cut.size
        self._step_tokens += cut.size
        self._longest = max(self._longest, start + cut.size)

    def _deep(self, start: int, remaining: int, share: Share) -> Cut:
        """The chunk to carry through the layers from this step on, if there can be one."""
        if self._under_way or self._num_layers < 2 or share.seconds <= 0.0:
            return NOTHING
        fits = min(
            self.total.tokens,
            self._cost.bytes.chunk_within(self._memory, 0, 0, start),
            self._cost.chunk_within(share.seconds * self._num_layers, start),
        )
        size = remaining if fits >= remaining else self.align(start, int(max(0.0, fits)))
        if size <= 0:
            return NOTHING
        return Cut(size, min(self._num_layers - 1, self.layers(start, size, 0, share)))
