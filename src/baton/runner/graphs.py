"""CUDA graphs of whole decode steps, one per batch bucket.

A graph reads everything that changes from fixed places: which slots run (one small copy from the
host per step), and the slots' own lengths, last tokens and page tables on the device. A batch is
padded to its bucket with the scrap slot, whose length stays 0 and whose pages are the scrap page,
so a padded row writes where nobody reads. Steps with prefill rows run eagerly.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from baton.core.forward import ForwardBatch, Model
from baton.core.kv import KVView
from baton.runner.slots import Slots


def buckets(most: int) -> list[int]:
    """Batch sizes to capture, up to `most`: dense where padding would cost most, then by 16."""
    sizes = [1, 2, 4, 8, *range(16, 257, 16), *range(288, 1025, 32)]
    kept = [size for size in sizes if size < most]
    return [*kept, most]


@dataclass(frozen=True)
class _Captured:
    graph: torch.cuda.CUDAGraph
    logits: torch.Tensor  # float32 [bucket, vocab], overwritten by every replay


class DecodeGraphs:
    """Captured decode steps of batches up to `most` rows.

    `replays` and `misses` count steps served here and decode steps that no bucket held.
    """

    def __init__(
        self, model: Model, views: Sequence[KVView], slots: Slots, page_size: int, most: int
    ) -> None:
        self._model, self._views, self._slots, self._page_size = model, views, slots, page_size
        device = slots.pages.device
        self._ids = torch.full((most,), slots.scrap, dtype=torch.int64, device=device)
        self._live = torch.zeros(most, dtype=torch.int64, device=device)
        self._sizes = buckets(most)
        self._captured: dict[int, _Captured] = {}
        self.replays = self.misses = 0

    @torch.inference_mode()
    def capture(self) -> None:
        """Capture every bucket, largest first, in one shared memory pool."""
        pool = torch.cuda.graph_pool_handle()
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        for size in reversed(self._sizes):
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                self._body(size)  # compiles kernels and fills caches outside the capture
            torch.cuda.current_stream().wait_stream(stream)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=pool, stream=stream):
                logits = self._body(size)
            self._captured[size] = _Captured(graph, logits)
        torch.cuda.synchronize()

    def run(self, slot_ids: list[int]) -> torch.Tensor | None:
        """Logits float32 `[n, vocab]` of one decode of each slot, lengths advanced; None when no
        bucket holds that many. Valid until the next call."""
        count = len(slot_ids)
        size = next((size for size in self._sizes if size >= count), None)
        if size is None:
            self.misses += 1
            return None
        padding = [self._slots.scrap] * (size - count)
        host = torch.tensor(
            [[*slot_ids, *padding], [1] * count + [0] * (size - count)], dtype=torch.int64
        ).pin_memory()
        self._ids[:size].copy_(host[0], non_blocking=True)
        self._live[:size].copy_(host[1], non_blocking=True)
        captured = self._captured[size]
        captured.graph.replay()
        self.replays += 1
        return captured.logits[:count]

    def _body(self, size: int) -> torch.Tensor:
        """One decode of the first `size` fixed rows. Device tensors only, shapes fixed."""
        state, page_size = self._slots, self._page_size
        slots = self._ids[:size]
        positions = state.computed[slots]
        pages = state.pages[slots]
        page = pages.gather(1, (positions // page_size)[:, None])[:, 0]
        batch = ForwardBatch(
            query_lens=[1] * size,
            context_lens=[0] * size,  # unknown to the host; a plan for a graph must not read them
            positions=positions,
            slots=page * page_size + positions % page_size,
            pages=pages,
        )
        context = self._model.plan(batch, self._views)
        hidden = self._model.forward(state.last_token[slots], context)
        state.computed.index_add_(0, slots, self._live[:size])
        return self._model.logits(hidden).float()
