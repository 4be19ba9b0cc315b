"""Damage planted in a running engine through its public seams, to see whether a judge notices."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from baton.attention.positions.rotary import RotaryPositions
from baton.attention.spec import MLASpec
from baton.attention.torch_backend import Chunk, TorchBackend, _expand
from baton.core.forward import ForwardBatch
from baton.core.kv import KVView
from baton.engine.llm import LLM
from baton.ops.attention import attend, merge
from baton.ops.rope import Rotation

Damage = Callable[[LLM], None]
Gathered = tuple[torch.Tensor, torch.Tensor]


class View:
    """A KVView that passes everything on, so that kernels cannot go around it."""

    def __init__(self, inner: KVView) -> None:
        self.inner, self.shape, self.page_size = inner, inner.shape, inner.page_size

    def store(self, slots: torch.Tensor, key: torch.Tensor, value: torch.Tensor | None) -> None:
        self.inner.store(slots, key, value)

    def gather(self, pages: torch.Tensor, out: Gathered | None = None) -> Gathered:
        return self.inner.gather(pages, out)

    def poison(self, pages: torch.Tensor) -> None:
        self.inner.poison(pages)

    def paged(self) -> None:
        return None


class Rounded(View):
    """Everything is rounded to `2 ** bits` steps between the least and the largest value of the
    tensor that is stored."""

    def __init__(self, inner: KVView, bits: int) -> None:
        super().__init__(inner)
        self.steps = 2**bits - 1

    def store(self, slots: torch.Tensor, key: torch.Tensor, value: torch.Tensor | None) -> None:
        self.inner.store(slots, self._round(key), None if value is None else self._round(value))

    def _round(self, x: torch.Tensor) -> torch.Tensor:
        low, high = x.amin(), x.amax()
        step = (high - low) / self.steps
        return ((x - low) / step).round() * step + low


class SwappedKeys(TorchBackend):
    """Prefill takes keys of two pages of each sequence for one another's; values stay where they
    are. Of MLA, whose keys and values are made from one latent, the keys that are made."""

    first, second = 0, 1

    def prefill_mla(
        self,
        plan: list[Chunk],
        view: KVView,
        q: torch.Tensor,
        latent: torch.Tensor,
        up: torch.Tensor,
    ) -> torch.Tensor:
        spec, size, parts = self.need.spec, view.page_size, []
        assert isinstance(spec, MLASpec)
        for chunk in plan:
            rows = slice(chunk.start, chunk.stop)
            queries = q[rows].transpose(0, 1)[None]
            keys, values = _expand(latent[rows], up, spec)
            out, lse = attend(queries, keys, values, spec.scale, causal=True)
            assert len(chunk.context) < 2, "pages are counted from the start of the one block"
            for pages, length in chunk.context:
                keys, values = _expand(self._gather(view, pages)[0][0, 0, :length], up, spec)
                place = torch.arange(length)
                if length >= (self.second + 1) * size:
                    a, b = (torch.arange(size) + page * size for page in (self.first, self.second))
                    place[a], place[b] = b, a
                more = attend(queries, keys[:, :, place], values, spec.scale)
                out, lse = merge(out, lse, *more)
            parts.append(out[0].transpose(0, 1))
        return torch.cat(parts)


class Windowed(TorchBackend):
    """Prefill sees the first page's `sinks` tokens and the last `window`, by whole pages."""

    sinks, window = 4, 1024

    def plan_prefill(
        self, batch: ForwardBatch, sequences: Sequence[int], page_size: int
    ) -> list[Chunk]:
        chunks = []
        plans = super().plan_prefill(batch, sequences, page_size)
        for i, chunk in zip(sequences, plans, strict=True):
            length = batch.context_lens[i]
            first = max(0, length - self.window) // page_size
            context = []
            if length:
                pages = batch.pages[i : i + 1, first : -(-length // page_size)]
                context.append((pages, length - first * page_size))
            if first:
                context.append((batch.pages[i : i + 1, :1], min(self.sinks, page_size)))
            chunks.append(replace(chunk, context=context))
        return chunks


class Shifted(RotaryPositions):
    """Positions from `start` on are `by` too large."""

    def __init__(self, inner: RotaryPositions, start: int, by: int) -> None:
        self.inner, self.start, self.by = inner, start, by

    def rotation(self, positions: torch.Tensor) -> Rotation:
        return self.inner.rotation(positions + self.by * (positions >= self.start))


def wrap_views(llm: LLM, wrap: Callable[[KVView], KVView]) -> None:
    """Every layer's pages are seen through `wrap` from now on."""
    views = llm.core.executor.runner.views
    llm.core.executor.runner.views = [wrap(view) for view in views]


def rounded(bits: int) -> Damage:
    """KV in so many bits with a plain scale per tensor."""
    return lambda llm: wrap_views(llm, lambda view: Rounded(view, bits))


def swapped_pages(first: int, second: int) -> Damage:
    """Keys of one page swapped with those of another that comes later."""

    def plant(llm: LLM) -> None:
        attention = llm.core.executor.runner.model.attention
        attention.prefill = SwappedKeys(attention.prefill.need)
        attention.prefill.first, attention.prefill.second = first, second

    return plant


def cut_to_window(window: int, sinks: int = 4) -> Damage:
    """Attention that sees a window and a few first tokens only."""

    def plant(llm: LLM) -> None:
        attention = llm.core.executor.runner.model.attention
        attention.prefill = Windowed(attention.prefill.need)
        attention.prefill.window, attention.prefill.sinks = window, sinks

    return plant


def shifted_positions(start: int, by: int) -> Damage:
    """Positions that are wrong from one on."""

    def plant(llm: LLM) -> None:
        attention = llm.core.executor.runner.model.attention
        attention.positions = Shifted(attention.positions, start, by)

    return plant
