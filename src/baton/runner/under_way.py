"""The chunk of a prompt that waits between two layers, from one step to another.

`Row.layers` says how far each step takes it:

    layers [0, 9)     begins: inputs are built, the attention planned, tokens embedded
    layers [9, 18)    goes on
    layers [18, 27)   `ends`: lengths move on and a token may be sampled, as behind any other pass

There is one at most. It is also gone when its request gives up the slot, when another begins, and
when a step fails.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from baton.core.forward import ForwardContext, Hidden, Model
from baton.core.kv import KVView
from baton.core.step import Row
from baton.runner.inputs import StepInputs, build_inputs
from baton.runner.slots import Slots


class ChunkLost(Exception):
    """The layers below were computed by a step that failed."""

    def __init__(self) -> None:
        super().__init__("an earlier step that computed part of this chunk failed")


@dataclass
class _Chunk:
    slot: int
    inputs: StepInputs
    context: ForwardContext
    hidden: Hidden


class UnderWay:
    """Keeps the chunk, and takes it through the layers."""

    def __init__(self, model: Model, views: Sequence[KVView], slots: Slots, page_size: int) -> None:
        self._model, self._views, self._slots, self._page_size = model, views, slots, page_size
        self._chunk: _Chunk | None = None

    def drop(self) -> None:
        """Forget the chunk: nobody knows how far a step that failed has come with it."""
        self._chunk = None

    def release(self, slot: int) -> None:
        """Forget the chunk if its request was the one in `slot`."""
        if self._chunk is not None and self._chunk.slot == slot:
            self._chunk = None

    def advance(
        self, row: Row, first: int, last: int
    ) -> tuple[StepInputs, ForwardContext, torch.Tensor] | None:
        """Take the chunk of `row` through layers `[first, last)`, which begins it if `first` is 0.

        Returns:
            When the row `ends` it: its inputs, its context and the final normed hidden states
            `[T, hidden]`; else None.

        Raises:
            ChunkLost: it is not here to go on with.
        """
        if first == 0:
            inputs = build_inputs([row], self._slots, self._page_size)
            context = self._model.plan(inputs.batch, self._views)
            self._chunk = _Chunk(row.slot, inputs, context, self._model.embed(inputs.ids))
        chunk = self._chunk
        if chunk is None or chunk.slot != row.slot:
            raise ChunkLost
        chunk.hidden = self._model.through(chunk.hidden, chunk.context, first, last)
        if not row.ends:
            return None
        self._chunk = None
        inputs = chunk.inputs
        if row.sample:  # only now known: the rows before it did not end
            inputs = replace(inputs, sample_rows=[0], sample_index=inputs.lengths - 1)
        return inputs, chunk.context, chunk.hidden.normed
