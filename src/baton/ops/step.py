"""What a step of decodes does outside its model: fetch what the device knows of its rows, and keep
what they have become.

S rows, each of a slot of its own, but for rows that pad the batch: these may share a slot.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from baton.ops.dispatch import int_kernels


class DecodeInputs(NamedTuple):
    """Int64, `[S]` each: token `ids`, their `positions`, their places in the KV cache (`kv_slots`:
    page times page size plus offset); and the rows' page tables, `pages` `[S, P]`."""

    ids: Tensor
    positions: Tensor
    kv_slots: Tensor
    pages: Tensor


def decode_inputs(
    slots: Tensor, last_token: Tensor, computed: Tensor, pages: Tensor, page_size: int
) -> DecodeInputs:
    """What a decode of `slots` reads.

    Args:
        slots: int64 `[S]`, contiguous.
        last_token: int64 `[N]`, each slot's newest token, which is not in the KV cache yet.
        computed: int64 `[N]`, tokens that are.
        pages: int64 `[N, P]`, contiguous: each slot's page ids in order of position.
        page_size: tokens of a page.
    """
    if int_kernels(slots):
        from baton.ops.triton import step as kernels

        return DecodeInputs(*kernels.decode_inputs(slots, last_token, computed, pages, page_size))
    positions, tables = computed[slots], pages[slots]
    page = tables.gather(1, (positions // page_size)[:, None])[:, 0]
    kv_slots = page * page_size + positions % page_size
    return DecodeInputs(last_token[slots], positions, kv_slots, tables)


def advance(
    slots: Tensor,
    live: Tensor,
    tokens: Tensor,
    bad: Tensor,
    last_token: Tensor,
    computed: Tensor,
    generated: Tensor,
) -> Tensor:
    """Count one more token in each slot of a live row, and keep what was chosen as its last one.

    Args:
        slots: int64 `[S]`; those of live rows are distinct.
        live: int64 `[S]`, 1, or 0 for a row that changes nothing.
        tokens: int64 `[S]`, chosen.
        bad: bool `[S]`, whether a row's logits were unusable.
        last_token: int64 `[N]`, written in place, as are `computed` and `generated`.

    Returns:
        `tokens` and `bad` of all rows, int64 `[2, S]`.
    """
    if int_kernels(slots):
        from baton.ops.triton import step as kernels

        return kernels.advance(slots, live, tokens, bad, last_token, computed, generated)
    computed.index_add_(0, slots, live)
    generated.index_add_(0, slots, live)
    last_token[slots] = tokens.where(live > 0, last_token[slots])
    return torch.stack([tokens, bad.to(torch.int64)])
