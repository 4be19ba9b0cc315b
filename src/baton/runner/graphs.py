"""CUDA graphs of whole steps: decodes by batch bucket, single short prompts by token bucket.

A decode's graph ends with the choice of tokens by temperature, which becomes the slots' last token,
so that a step of plain decodes is one launch and one copy back.

A graph reads everything that changes from fixed places: a few numbers that the host copies in
before each replay, and the slots' own lengths, last tokens and page tables on the device. What a
bucket has too many of is padding: decode rows of the scrap slot, whose length stays 0 and whose
pages are the scrap page; prompt tokens after the prompt's end, which causal attention hides from
the real ones and which are stored on the scrap page. Other steps run eagerly.

Without `capture()` the same padded steps are launched one kernel at a time, so that results do not
depend, to the bit, on whether graphs are on: libraries choose kernels by the padded shape.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from baton.core.forward import ForwardBatch, Model
from baton.core.garbage import uncollected
from baton.core.kv import KVView
from baton.core.step import Row
from baton.ops.host import staging
from baton.runner.sampler import Sampler
from baton.runner.slots import Slots

#: Prompts of up to so many tokens run through graphs: longer ones keep the device busy enough to
#: hide the host's launches.
PROMPT_BUCKETS = (64, 128, 256, 512, 768, 1024, 1536, 2048, 3072, 4096)


def batch_buckets(most: int) -> list[int]:
    """Decode batches to capture, up to `most`: dense where padding would cost most."""
    sizes = [1, 2, 4, 8, *range(16, 129, 16), *range(160, 257, 32), *range(320, 1025, 64)]
    return [*(size for size in sizes if size < most), most]


@dataclass(frozen=True)
class Replayed:
    """What a step left, good until the next one: float32 logits `[rows, vocab]`, and for decodes
    what `Sampler.choose` chose from them, int64 `[2, rows or more]` (see `Slots.advance`)."""

    logits: torch.Tensor
    chosen: torch.Tensor | None = None


@dataclass(frozen=True)
class _Captured:
    graph: torch.cuda.CUDAGraph
    result: Replayed


class StepGraphs:
    """Captured steps.

    Args:
        max_batch: largest decode batch.
        max_prompt: longest prompt to capture, in tokens.
    """

    def __init__(
        self,
        model: Model,
        views: Sequence[KVView],
        slots: Slots,
        sampler: Sampler,
        page_size: int,
        max_batch: int,
        max_prompt: int,
    ) -> None:
        self._model, self._views, self._slots, self._page_size = model, views, slots, page_size
        self._sampler = sampler
        #: slots of the decodes that lie in `_rows`, with the bucket's padding
        self._laid: list[int] = []
        device = slots.pages.device
        self._batches = batch_buckets(max_batch)
        longest = max_prompt if model.graph_prompts else 0
        self._prompts = [size for size in PROMPT_BUCKETS if size <= longest]
        #: decodes: slot ids [max_batch], then 1 for a real row and 0 for padding [max_batch]
        self._rows = torch.zeros(2, max_batch, dtype=torch.int64, device=device)
        self._rows[0] = slots.scrap
        #: a prompt: slot id, length, then its token ids
        self._prompt = torch.zeros(2 + PROMPT_BUCKETS[-1], dtype=torch.int64, device=device)
        self._prompt[:2] = torch.tensor([slots.scrap, 1])
        self._arange = torch.arange(PROMPT_BUCKETS[-1], device=device)
        self._decodes: dict[int, _Captured] = {}
        self._prefills: dict[int, _Captured] = {}

    @property
    def captured(self) -> bool:
        """Whether `run` replays graphs."""
        return bool(self._decodes)

    @torch.inference_mode()
    def run_once(self) -> None:
        """Run every bucket once, eagerly, on padding."""
        for size in self._batches:
            self._decode_body(size)
        for size in self._prompts:
            self._prefill_body(size)
        self._slots.computed[self._slots.scrap] = 0  # prompts moved it

    @uncollected()  # a graph that ends while another is captured breaks that one
    @torch.inference_mode()
    def capture(self, brief: StepGraphs) -> None:
        """Capture every bucket, largest first, in one shared memory pool.

        Args:
            brief: the same steps through one layer of each kind. They run first, since a kernel
                cannot be loaded while one is captured, nor may what libraries keep be allocated.
        """
        pool = torch.cuda.graph_pool_handle()
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            brief.run_once()
        torch.cuda.current_stream().wait_stream(stream)
        for size in reversed(self._prompts):
            self._prefills[size] = _capture(self._prefill_body, size, pool, stream)
        for size in reversed(self._batches):
            self._decodes[size] = _capture(self._decode_body, size, pool, stream)
        torch.cuda.synchronize()

    def passes(self, rows: Sequence[int], of: Sequence[Row]) -> list[list[int]]:
        """Which of `rows` (indices into `of`) run together: decodes beside a single prompt that
        fits a graph go through two graphs, since together they would fit none; others together."""
        decodes = [i for i in rows if not of[i].tokens]
        prompts = [i for i in rows if of[i].tokens]
        if decodes and len(prompts) == 1 and self._prompt_size(of[prompts[0]]) is not None:
            return [decodes, prompts]
        return [list(rows)]

    def run(self, rows: list[Row]) -> Replayed | None:
        """Replay a pass, lengths advanced; None when no graph fits."""
        if all(not row.tokens for row in rows):
            return self._decode(rows)
        return self._prefill(rows[0]) if len(rows) == 1 else None

    def _decode(self, rows: list[Row]) -> Replayed | None:
        count = len(rows)
        size = next((size for size in self._batches if size >= count), None)
        if size is None:
            return None
        pad = size - count
        slots = [row.slot for row in rows] + [self._slots.scrap] * pad
        if slots != self._laid:
            host = staging((2, size), self._rows.device, torch.int64)
            values = host.numpy()
            values[0], values[1, :count], values[1, count:] = slots, 1, 0
            self._rows[:, :size].copy_(host, non_blocking=True)
            self._laid = slots
        found = self._step(self._decodes, self._decode_body, size)
        return Replayed(found.logits[:count], found.chosen)

    def _prefill(self, row: Row) -> Replayed | None:
        size = self._prompt_size(row)
        if size is None:
            return None
        host = staging(2 + size, self._prompt.device, torch.int64)
        values, end = host.numpy(), 2 + row.length
        values[0], values[1], values[2:end], values[end:] = row.slot, row.length, row.ids, 0
        self._prompt[: 2 + size].copy_(host, non_blocking=True)
        return self._step(self._prefills, self._prefill_body, size)

    def _prompt_size(self, row: Row) -> int | None:
        """Bucket of a whole prompt of which only the last position is wanted."""
        if row.start > 0 or row.score >= 0 or row.prompt_logprobs >= 0:
            return None
        return next((size for size in self._prompts if size >= row.length), None)

    def _step(
        self, captured: dict[int, _Captured], body: Callable[[int], Replayed], size: int
    ) -> Replayed:
        if size not in captured:
            return body(size)
        captured[size].graph.replay()
        return captured[size].result

    def _decode_body(self, size: int) -> Replayed:
        """One decode of the first `size` fixed rows. Device tensors only, shapes fixed."""
        state = self._slots
        slots, live = self._rows[0, :size], self._rows[1, :size]
        inputs = state.decode_inputs(slots, self._page_size)
        batch = ForwardBatch(
            query_lens=[1] * size,
            context_lens=[0] * size,  # unknown to the host; a plan for a graph must not read them
            positions=inputs.positions,
            slots=inputs.kv_slots,
            pages=inputs.pages,
        )
        logits = self._model.logits(self._forward(inputs.ids, batch)).float()
        chosen = self._sampler.choose(logits, slots)
        return Replayed(logits, state.advance(slots, live, chosen, self._sampler.generated))

    def _prefill_body(self, size: int) -> Replayed:
        """A prompt of `length <= size` tokens, nothing of it in the cache yet."""
        inputs = self._slots.prompt_inputs(self._prompt, size, self._page_size)
        batch = ForwardBatch(
            query_lens=[size],
            context_lens=[0],
            positions=self._arange[:size],
            slots=inputs.kv_slots,
            pages=inputs.pages,
        )
        hidden = self._forward(self._prompt[2 : 2 + size], batch)
        return Replayed(self._model.logits(hidden.index_select(0, inputs.last)).float())

    def _forward(self, ids: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        return self._model.forward(ids, self._model.plan(batch, self._views))


def _capture(
    body: Callable[[int], Replayed],
    size: int,
    pool: Any,
    stream: torch.cuda.Stream,
) -> _Captured:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool, stream=stream):
        result = body(size)
    return _Captured(graph, result)
