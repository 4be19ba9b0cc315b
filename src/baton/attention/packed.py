"""Prefill through an attention library: rows packed, context gathered, partial results merged.

The libraries know nothing of pages, so a chunk's context and the chunk itself (whose keys are in
the pages by then) are gathered to one bounded workspace that every layer reuses; at long context
the copy is under 1 % of the time. MLA is un-absorbed: gathered latents become keys and values of
every head first (arXiv 2405.04434, 2.1.2). Per step:

- sequences without context use the step's own rows, all in one call;
- sequences whose context and chunk fit the workspace share one call, causal from the lower right
  corner (query i of n sees keys up to `len(k) - n + i`);
- a longer one goes block by block: full blocks of context unmasked, the rest causal, merged
  exactly by log-sum-exp in float32. Memory does not grow with the context.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import ClassVar

import torch
import torch.nn.functional as F

from baton.attention.backend import AttentionBackend, consecutive, rows_of
from baton.attention.spec import AttentionNeed, MLASpec
from baton.core.forward import ForwardBatch
from baton.core.kv import KVView
from baton.ops.attention import merge_into
from baton.ops.dtypes import wide
from baton.ops.host import upload
from baton.ops.kv_pages import gather_tokens
from baton.ops.mla import join_keys

WORKSPACE = 512 << 20  # bytes of gathered (and multiplied out) context at once

Result = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class Piece:
    """One library call: queries of some sequences against a stretch of each one's keys.

    q_lens, k_lens: tokens of each sequence. cu_q, cu_k: their running sums, int32 `[n + 1]`.
    causal: from the lower right corner.
    pages: int64 `[n, P]`, where the keys lie; None: they are the rows' own.
    """

    q_lens: list[int]
    k_lens: list[int]
    cu_q: torch.Tensor
    cu_k: torch.Tensor
    causal: bool
    pages: torch.Tensor | None


@dataclass(frozen=True)
class Group:
    """Packed prefill rows `[start, stop)` and the pieces whose results merge into theirs."""

    start: int
    stop: int
    pieces: list[Piece]


@dataclass(frozen=True)
class PackedPlan:
    """rows: flat rows of the step that prefill, in order; a slice where they are consecutive."""

    rows: slice | torch.Tensor
    groups: list[Group]


KeysValues = Callable[[Group, Piece], Result]


class PackedBackend(AttentionBackend):
    """The part that all library backends share; they add `attend`."""

    halves: ClassVar[tuple[str, ...]] = ("prefill",)

    def __init__(self, need: AttentionNeed) -> None:
        super().__init__(need)
        self._buffers: dict[str, torch.Tensor] = {}

    def attend(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, piece: Piece, need_lse: bool
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Attention of packed rows.

        Args:
            q: `[sum(q_lens), H, Dk]`. k: `[sum(k_lens), Hk, Dk]`. v: `[sum(k_lens), Hk, Dv]`.
                Last dims contiguous.
            piece: lengths and mask.
            need_lse: whether the log-sum-exp is wanted.

        Returns:
            `(out [sum(q_lens), H, Dv], lse float32 [sum(q_lens), H] of any strides, or None)`.
        """
        raise NotImplementedError

    # -- planning ------------------------------------------------------------------------

    def held_context(self, page_size: int) -> int:
        """See AttentionBackend; a multiple of the page size."""
        spec, size = self.need.spec, self.need.dtype.itemsize
        per_token = spec.kv_shape.width
        if isinstance(spec, MLASpec):
            keys_and_values = 2 * spec.nope_dim + spec.rope_dim + spec.value_dim
            per_token += spec.num_heads * keys_and_values
        return max(1, WORKSPACE // (per_token * size) // page_size) * page_size

    def plan_prefill(
        self, batch: ForwardBatch, sequences: Sequence[int], page_size: int
    ) -> PackedPlan:
        """See AttentionBackend."""
        budget, start = self.held_context(page_size), 0
        groups: list[Group] = []
        run: list[int] = []
        tokens = 0
        for i in sequences:
            context, new = batch.context_lens[i], batch.query_lens[i]
            if context > 0 and context + new > budget:
                start = self._close(batch, run, groups, start)
                groups.append(self._long(batch, i, start, budget, page_size))
                start, run = start + new, []
                continue
            fresh = context == 0
            full = bool(run) and tokens + context + new > budget and not fresh
            if run and (full or fresh != (batch.context_lens[run[0]] == 0)):
                start, run = self._close(batch, run, groups, start), []
            tokens = (tokens if run else 0) + context + new
            run.append(i)
        self._close(batch, run, groups, start)
        return PackedPlan(rows_of(batch, sequences), groups)

    def _close(self, batch: ForwardBatch, run: list[int], groups: list[Group], start: int) -> int:
        """Make one group of the sequences in `run`; where the next one starts."""
        if not run:
            return start
        q_lens = [batch.query_lens[i] for i in run]
        k_lens = [batch.query_lens[i] + batch.context_lens[i] for i in run]
        pages = None if q_lens == k_lens else _tables(batch, run)
        groups.append(
            Group(start, start + sum(q_lens), [_piece(batch, q_lens, k_lens, True, pages)])
        )
        return start + sum(q_lens)

    def _long(self, batch: ForwardBatch, i: int, start: int, budget: int, page_size: int) -> Group:
        """Blocks of context, then what is left of it together with the chunk: as much as fits, or
        the chunk alone."""
        context, new = batch.context_lens[i], batch.query_lens[i]
        rest = -(-max(0, context + new - budget) // page_size) * page_size
        rest = min(rest, context // page_size * page_size)
        bounds = [*range(0, rest, budget), rest, context + new]
        pieces = []
        for begin, end in pairwise(bounds):
            first, last = begin // page_size, -(-end // page_size)
            pages = batch.pages[i : i + 1, first:last]
            pieces.append(_piece(batch, [new], [end - begin], end > rest, pages))
        return Group(start, start + new, pieces)

    # -- running -------------------------------------------------------------------------

    def prefill_gqa(
        self, plan: PackedPlan, view: KVView, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> torch.Tensor:
        """See AttentionBackend."""
        k, v = k[plan.rows], v[plan.rows]

        def keys_values(group: Group, piece: Piece) -> Result:
            if piece.pages is None:
                return k[group.start : group.stop], v[group.start : group.stop]
            return self._gather(view, piece)

        return self._run(plan, q[plan.rows], keys_values)

    def prefill_mla(
        self,
        plan: PackedPlan,
        view: KVView,
        q: torch.Tensor,
        latent: torch.Tensor,
        up: torch.Tensor,
    ) -> torch.Tensor:
        """See AttentionBackend."""
        latent = latent[plan.rows]

        def keys_values(group: Group, piece: Piece) -> Result:
            if piece.pages is None:
                return self._expand(latent[group.start : group.stop], up)
            return self._expand(self._gather(view, piece)[0][:, 0], up)

        return self._run(plan, q[plan.rows], keys_values)

    def _run(self, plan: PackedPlan, q: torch.Tensor, keys_values: KeysValues) -> torch.Tensor:
        parts = []
        for group in plan.groups:
            rows = q[group.start : group.stop]
            if len(group.pieces) == 1:
                piece = group.pieces[0]
                parts.append(self.attend(rows, *keys_values(group, piece), piece, False)[0])
                continue
            acc: torch.Tensor | None = None
            acc_lse: torch.Tensor | None = None
            for piece in group.pieces:
                out, lse = self.attend(rows, *keys_values(group, piece), piece, True)
                assert lse is not None
                if acc is None or acc_lse is None:
                    acc = out.to(wide(q.dtype), memory_format=torch.contiguous_format, copy=True)
                    acc_lse = lse.to(acc.dtype).contiguous()
                else:
                    merge_into(acc, acc_lse, out, lse)
            assert acc is not None
            parts.append(acc.to(q.dtype))
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _gather(self, view: KVView, piece: Piece) -> Result:
        """Keys `[sum(k_lens), Hk, Dk]` and values of a piece; good until the next call."""
        assert piece.pages is not None
        shape, total, paged = view.shape, sum(piece.k_lens), view.paged()
        key = self._buffer("key", total, shape.heads, shape.key_dim)
        value = (
            key[..., : shape.value_dim]
            if shape.shared_value
            else self._buffer("value", total, shape.heads, shape.value_dim)
        )
        if paged is not None:
            gather_tokens(paged[0], piece.pages, piece.k_lens, piece.cu_k, key)
            if not shape.shared_value:
                gather_tokens(paged[1], piece.pages, piece.k_lens, piece.cu_k, value)
            return key, value
        start = 0
        for i, length in enumerate(piece.k_lens):  # a format that has to be unpacked
            pages = piece.pages[i : i + 1, : -(-length // view.page_size)]
            for out, found in zip((key, value), view.gather(pages), strict=True):
                out[start : start + length] = found[0, :, :length].transpose(0, 1)
            start += length
        return key, value

    def _expand(self, latent: torch.Tensor, up: torch.Tensor) -> Result:
        """Keys `[L, H, nope + rope]` and values `[L, H, value_dim]` of `latent [L, ...]`."""
        spec = self.need.spec
        assert isinstance(spec, MLASpec)
        both = F.linear(latent[:, : spec.latent_dim], up.flatten(0, 1)).view(-1, *up.shape[:2])
        dim = spec.nope_dim + spec.rope_dim
        key = self._buffer("expanded", latent.shape[0], spec.num_heads, dim)
        join_keys(both[..., : spec.nope_dim], latent[:, spec.latent_dim :], key)
        return key, both[..., spec.nope_dim :]

    def _buffer(self, name: str, *shape: int) -> torch.Tensor:
        """Memory that is kept and grows; the stream orders its uses, layer after layer."""
        size = 1
        for extent in shape:
            size *= extent
        held = self._buffers.get(name)
        if held is None or held.numel() < size:
            self._buffers.pop(name, None)
            held = torch.empty(size, dtype=self.need.dtype, device=self.need.device)
            self._buffers[name] = held
        return held[:size].view(*shape)

    def warm_up(self) -> None:
        """Run each kind of call once, so that libraries compile before a request waits."""
        spec, device, dtype = self.need.spec, self.need.device, self.need.dtype
        if isinstance(spec, MLASpec):
            heads, dims = spec.num_heads, (spec.nope_dim + spec.rope_dim, spec.value_dim)
        else:
            heads, dims = spec.num_kv_heads, (spec.head_dim, spec.head_dim)
        # Libraries compile apart: few rows from many, one sequence from several, masked or not.
        kinds = (
            ([256], [256], True), ([256], [128], False), ([200, 200], [200, 300], True),
            ([2], [66], True), ([2], [64], False), ([2, 3], [2, 9], True),
        )  # fmt: skip
        for q_lens, k_lens, causal in kinds:
            rows = sum(q_lens)
            q = torch.zeros(rows, spec.num_heads, dims[0], dtype=dtype, device=device)
            k, v = (torch.zeros(sum(k_lens), heads, d, dtype=dtype, device=device) for d in dims)
            cu_q, cu_k = (_sums(lens, device) for lens in (q_lens, k_lens))
            self.attend(q, k, v, Piece(q_lens, k_lens, cu_q, cu_k, causal, None), True)


def _sums(lens: list[int], device: torch.device) -> torch.Tensor:
    """Running sums, int32 `[n + 1]`."""
    if len(lens) == 1:  # all that a graph has: no copy from host memory may be part of it
        return torch.arange(2, dtype=torch.int32, device=device) * lens[0]
    return upload(torch.tensor([0, *accumulate(lens)], dtype=torch.int32), device)


def _piece(
    batch: ForwardBatch,
    q_lens: list[int],
    k_lens: list[int],
    causal: bool,
    pages: torch.Tensor | None,
) -> Piece:
    cu_q = _sums(q_lens, batch.pages.device)
    cu_k = cu_q if q_lens == k_lens else _sums(k_lens, batch.pages.device)
    return Piece(q_lens, k_lens, cu_q, cu_k, causal, pages)


def _tables(batch: ForwardBatch, sequences: list[int]) -> torch.Tensor:
    """Page tables of `sequences`, a view where they are consecutive."""
    if consecutive(sequences):
        return batch.pages[sequences[0] : sequences[0] + len(sequences)]
    return batch.pages[upload(torch.tensor(sequences), batch.pages.device)]
