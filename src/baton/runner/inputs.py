"""Turns rows of a step into flat device tensors, using the device's own counters for positions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from baton.core.forward import ForwardBatch
from baton.core.step import Row
from baton.ops.host import upload
from baton.runner.slots import Slots


@dataclass
class StepInputs:
    """What the model needs for one pass of `T` tokens in `B` rows, `S` of which sample.

    ids: int64 [T]. slots: int64 [B]. lengths: int64 [B].
    sample_rows: which rows sample. sample_index: int64 [S] into the T tokens.
    """

    ids: torch.Tensor
    batch: ForwardBatch
    slots: torch.Tensor
    lengths: torch.Tensor
    sample_rows: list[int]
    sample_index: torch.Tensor


def build_inputs(rows: Sequence[Row], slots: Slots, page_size: int) -> StepInputs:
    """One packed host-to-device copy; everything else is computed on the device."""
    packed, sizes, sample_rows = _pack(rows)
    parts = torch.split(upload(packed, slots.pages.device), sizes)
    slot_t, length_t, row_t, offset_t, ids_t, sample_t, from_device = parts
    if len(from_device):
        # A row without host ids is one token long, so its token index is its end minus one.
        where = length_t.cumsum(0)[from_device] - 1
        ids_t = ids_t.index_copy(0, where, slots.read(slot_t[from_device]))
    starts = slots.computed[slot_t]
    positions = starts[row_t] + offset_t
    width = max(-(-(row.start + row.length) // page_size) for row in rows)
    pages = slots.pages[slot_t, :width]
    flat = pages[row_t, positions // page_size] * page_size + positions % page_size
    if slots.debug:
        _check(rows, starts)
        pages = _mask_unused(rows, pages, page_size)
    batch = ForwardBatch(
        query_lens=[row.length for row in rows],
        context_lens=[row.start for row in rows],
        positions=positions,
        slots=flat,
        pages=pages,
    )
    return StepInputs(ids_t, batch, slot_t, length_t, sample_rows, sample_t)


def _pack(rows: Sequence[Row]) -> tuple[torch.Tensor, list[int], list[int]]:
    """What only the host knows of `B` rows and their `T` tokens, as one int64 tensor: slots and
    lengths `[B]`; each token's row, its offset in it, and its id, 0 where only the device knows it
    `[T]`; tokens that are sampled from; rows whose id the device knows. Then the sizes of these
    parts, and which rows sample."""
    count = len(rows)
    lengths = np.fromiter((row.length for row in rows), dtype=np.int64, count=count)
    ends = np.cumsum(lengths)
    total = int(ends[-1])
    row_of = np.repeat(np.arange(count), lengths)
    offsets = np.arange(total) - np.repeat(ends - lengths, lengths)
    ids = np.zeros(total, dtype=np.int64)
    on_device: list[int] = []
    for i, row in enumerate(rows):
        if row.tokens:
            ids[ends[i] - row.length : ends[i]] = row.ids
        else:
            on_device.append(i)
    sample_rows = [i for i, row in enumerate(rows) if row.sample]
    slot_ids = np.fromiter((row.slot for row in rows), dtype=np.int64, count=count)
    packed = np.concatenate(
        [
            slot_ids,
            lengths,
            row_of,
            offsets,
            ids,
            ends[sample_rows] - 1,
            np.asarray(on_device, dtype=np.int64),
        ]
    )
    sizes = [count, count, total, total, total, len(sample_rows), len(on_device)]
    return torch.from_numpy(packed), sizes, sample_rows


def following(
    rows: Sequence[Row], inputs: StepInputs, sampled: torch.Tensor | None
) -> torch.Tensor:
    """The id behind each token of a pass, int64 `[T]`: in the row, known to the host, or `sampled
    [S]` by the pass itself."""
    found = inputs.ids.roll(-1)
    behind = upload([max(0, row.next_token) for row in rows], found.device, torch.int64)
    if sampled is not None:
        index = upload(inputs.sample_rows, found.device, torch.int64)
        behind = behind.index_copy(0, index, sampled)
    return found.index_copy(0, inputs.lengths.cumsum(0) - 1, behind)


def _check(rows: Sequence[Row], starts: torch.Tensor) -> None:
    expected = [row.start for row in rows]
    if starts.tolist() != expected:
        raise AssertionError(f"device lengths {starts.tolist()} are not the host's {expected}")


def _mask_unused(rows: Sequence[Row], pages: torch.Tensor, page_size: int) -> torch.Tensor:
    """Table entries past a row's end are poison; a padded gather may read them, so give it 0."""
    ends = torch.tensor([-(-(row.start + row.length) // page_size) for row in rows])
    unused = torch.arange(pages.shape[1]).unsqueeze(0) >= ends.unsqueeze(1)
    return pages.masked_fill(unused.to(pages.device), 0)
