"""The reference backend: plain PyTorch on any device, the CPU path and the oracle.

A prefill chunk attends to its context (gathered from the pages, in blocks, unmasked) and to
itself (causal); the partial results merge by log-sum-exp. Decode rows of similar length form
one padded batch, and a KV head's query heads take the place of the query length, so nothing is
expanded. MLA multiplies keys and values out for prefill and stays in the latent space for
decode (arXiv 2405.04434, 2.1.2).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from baton.attention.backend import AttentionBackend, row_starts
from baton.attention.spec import AttentionNeed, GQASpec, MLASpec
from baton.core.forward import ForwardBatch
from baton.core.kv import KVView
from baton.ops.attention import attend, merge

CONTEXT_BLOCK = 16384  # context tokens gathered at once, to bound memory
SHORT = 512  # decode rows up to this many tokens always share one batch


@dataclass(frozen=True)
class Chunk:
    """One sequence's prefill: its rows of the step, and the pages of its context in blocks."""

    start: int
    stop: int
    context: list[tuple[torch.Tensor, int]]


@dataclass(frozen=True)
class DecodeGroup:
    """Decode rows that are computed as one padded batch of `[rows, padded]` keys.

    `rows` are flat rows of the step (None: all, in order). `unused` are flat indices into the
    gathered `[rows, heads, padded]` of what lies past a row's end: zeroed after gathering, since
    a page's tail may hold anything, NaN included; `mask` is -inf there.
    """

    rows: torch.Tensor | None
    pages: torch.Tensor
    unused: torch.Tensor | None
    mask: torch.Tensor | None


@dataclass(frozen=True)
class DecodePlan:
    """Groups of decode rows; `inverse` puts their results back in order (None: in order)."""

    groups: list[DecodeGroup]
    inverse: torch.Tensor | None


class TorchBackend(AttentionBackend):
    """Attention in plain PyTorch; serves everything."""

    def __init__(self, need: AttentionNeed) -> None:
        super().__init__(need)
        self._kept = [torch.empty(0, dtype=need.dtype), torch.empty(0, dtype=need.dtype)]

    def plan_prefill(
        self, batch: ForwardBatch, sequences: Sequence[int], page_size: int
    ) -> list[Chunk]:
        """See AttentionBackend."""
        starts = row_starts(batch)
        block = max(1, CONTEXT_BLOCK // page_size) * page_size
        chunks = []
        for i in sequences:
            context = []
            for begin in range(0, batch.context_lens[i], block):
                length = min(block, batch.context_lens[i] - begin)
                first, last = begin // page_size, -(-(begin + length) // page_size)
                context.append((batch.pages[i : i + 1, first:last], length))
            chunks.append(Chunk(starts[i], starts[i] + batch.query_lens[i], context))
        return chunks

    def plan_decode(
        self, batch: ForwardBatch, sequences: Sequence[int], page_size: int
    ) -> DecodePlan:
        """See AttentionBackend. Rows are grouped so that padding at most doubles the work."""
        order = sorted(sequences, key=lambda i: -batch.context_lens[i])
        groups: list[list[int]] = []
        for i in order:
            longest = batch.context_lens[groups[-1][0]] if groups else 0
            if not groups or (longest > SHORT and batch.context_lens[i] * 2 < longest):
                groups.append([])
            groups[-1].append(i)
        starts = row_starts(batch)
        if len(groups) == 1:
            return DecodePlan([self._group(batch, list(sequences), starts, page_size)], None)
        place = {sequence: position for position, sequence in enumerate(order)}
        inverse = torch.tensor([place[i] for i in sequences], device=batch.pages.device)
        return DecodePlan([self._group(batch, g, starts, page_size) for g in groups], inverse)

    def _group(
        self, batch: ForwardBatch, sequences: list[int], starts: list[int], page_size: int
    ) -> DecodeGroup:
        device = batch.pages.device
        lengths = [batch.context_lens[i] + 1 for i in sequences]
        count = -(-max(lengths) // page_size)
        if len(sequences) == len(batch.query_lens) and sequences == sorted(sequences):
            rows, pages = None, batch.pages[:, :count]
        else:
            rows = torch.tensor([starts[i] for i in sequences], device=device)
            pages = batch.pages[torch.tensor(sequences, device=device), :count]
        if min(lengths) == count * page_size:
            return DecodeGroup(rows, pages, None, None)
        # On the host, where lengths are known: finding them on a GPU would wait for it.
        past = (torch.arange(count * page_size) >= torch.tensor(lengths)[:, None])[:, None]
        unused = past.expand(-1, self.need.spec.kv_shape.heads, -1).flatten().nonzero()[:, 0]
        mask = torch.zeros(past.shape, dtype=self.need.dtype).masked_fill_(past, -torch.inf)
        return DecodeGroup(rows, pages, unused.to(device), mask[:, None].to(device))

    def _gather(self, view: KVView, pages: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """`view.gather` of `pages [B, P]`; the result is good until the next call.

        On a CPU it goes to memory that is kept: fresh pages of memory cost more to touch than
        their copy does, and every layer of every step would ask for them.
        """
        if pages.device.type != "cpu":
            return view.gather(pages)
        shape = view.shape
        size = pages.shape[0], shape.heads, pages.shape[1] * view.page_size
        key = self._scratch(0, (*size, shape.key_dim))
        value = key if shape.shared_value else self._scratch(1, (*size, shape.value_dim))
        return view.gather(pages, (key, value))

    def _scratch(self, number: int, shape: tuple[int, ...]) -> torch.Tensor:
        """Kept memory `number`, grown to hold `shape`."""
        size = math.prod(shape)
        if self._kept[number].numel() < size:
            with torch.inference_mode(False):
                self._kept[number] = torch.empty(size, dtype=self.need.dtype)
        return self._kept[number][:size].view(shape)

    def _gather_group(self, group: DecodeGroup, view: KVView) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values `[rows, heads, padded, dim]`, zero past each row's end."""
        keys, values = self._gather(view, group.pages)
        if group.unused is not None:
            keys.view(-1, keys.shape[-1]).index_fill_(0, group.unused, 0.0)
            if not view.shape.shared_value:
                values.view(-1, values.shape[-1]).index_fill_(0, group.unused, 0.0)
        return keys, values

    def prefill_gqa(
        self,
        plan: list[Chunk],
        view: KVView,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
    ) -> torch.Tensor:
        """See AttentionBackend."""
        scale = self.need.spec.scale
        parts = []
        for chunk in plan:
            rows = slice(chunk.start, chunk.stop)
            queries = _heads_first(q[rows])
            out, lse = attend(
                queries, _heads_first(k[rows]), _heads_first(v[rows]), scale, causal=True
            )
            for pages, length in chunk.context:
                keys, values = self._gather(view, pages)
                more = attend(queries, keys[:, :, :length], values[:, :, :length], scale)
                out, lse = merge(out, lse, *more)
            parts.append(out[0].transpose(0, 1))
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def decode_gqa(self, plan: DecodePlan, view: KVView, q: torch.Tensor) -> torch.Tensor:
        """See AttentionBackend."""
        spec = self.need.spec
        assert isinstance(spec, GQASpec)
        group_size = spec.num_heads // spec.num_kv_heads
        parts = []
        for group in plan.groups:
            keys, values = self._gather_group(group, view)
            queries = _rows(q, group).reshape(-1, spec.num_kv_heads, group_size, spec.head_dim)
            out, _ = attend(queries, keys, values, spec.scale, mask=group.mask)
            parts.append(out.flatten(1, 2))
        return _in_order(parts, plan)

    def prefill_mla(
        self,
        plan: list[Chunk],
        view: KVView,
        q: torch.Tensor,
        latent: torch.Tensor,
        up: torch.Tensor,
    ) -> torch.Tensor:
        """See AttentionBackend. Un-absorbed: latents become keys and values of every head."""
        spec = self.need.spec
        assert isinstance(spec, MLASpec)
        parts = []
        for chunk in plan:
            rows = slice(chunk.start, chunk.stop)
            queries = _heads_first(q[rows])
            keys, values = _expand(latent[rows], up, spec)
            out, lse = attend(queries, keys, values, spec.scale, causal=True)
            for pages, length in chunk.context:
                keys, values = _expand(self._gather(view, pages)[0][0, 0, :length], up, spec)
                out, lse = merge(out, lse, *attend(queries, keys, values, spec.scale))
            parts.append(out[0].transpose(0, 1))
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def decode_mla(
        self, plan: DecodePlan, view: KVView, q: torch.Tensor, up: torch.Tensor
    ) -> torch.Tensor:
        """See AttentionBackend. Absorbed: queries move into the latent space, one KV head."""
        spec = self.need.spec
        assert isinstance(spec, MLASpec)
        up_key, up_value = up[:, : spec.nope_dim], up[:, spec.nope_dim :]
        parts = []
        for group in plan.groups:
            keys, _ = self._gather_group(group, view)
            query = _rows(q, group)
            moved = torch.einsum("rhn,hnl->rhl", query[..., : spec.nope_dim], up_key)
            query = torch.cat((moved, query[..., spec.nope_dim :]), -1)[:, None]
            # Values are the keys' first columns; attending to whole keys needs no copy of them.
            out, _ = attend(query, keys, keys, spec.scale, mask=group.mask)
            mixed = out[:, 0, :, : spec.latent_dim]
            parts.append(torch.einsum("rhl,hvl->rhv", mixed, up_value))
        return _in_order(parts, plan)


def _rows(q: torch.Tensor, group: DecodeGroup) -> torch.Tensor:
    """The group's rows of `q [T, H, D]`."""
    return q if group.rows is None else q[group.rows]


def _heads_first(x: torch.Tensor) -> torch.Tensor:
    """`[L, H, D] -> [1, H, L, D]`."""
    return x.transpose(0, 1)[None]


def _expand(
    latent: torch.Tensor, up: torch.Tensor, spec: MLASpec
) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys `[1, H, L, nope + rope]` and values `[1, H, L, value_dim]` of latents `[L, ...]`."""
    wide = F.linear(latent[:, : spec.latent_dim], up.flatten(0, 1)).view(-1, *up.shape[:2])
    shared = latent[:, None, spec.latent_dim :].expand(-1, spec.num_heads, -1)
    keys = torch.cat((wide[..., : spec.nope_dim], shared), -1)
    return _heads_first(keys), _heads_first(wide[..., spec.nope_dim :])


def _in_order(parts: list[torch.Tensor], plan: DecodePlan) -> torch.Tensor:
    """Groups' results in the order of the planned sequences."""
    return parts[0] if plan.inverse is None else torch.cat(parts)[plan.inverse]
