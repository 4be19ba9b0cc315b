"""What steps through CUDA graphs do outside their model: fetch what the device knows of their rows,
and keep what these have become.

Decodes are S rows, each of a slot of its own, but for rows that pad the batch: these may share a
slot. A prompt is one row, of T tokens with its padding.
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


class PromptInputs(NamedTuple):
    """Int64: places of the tokens in the KV cache (`kv_slots` `[T]`), the row's page table (`pages`
    `[1, P]`), and the index of the `last` token that is not padding `[1]`."""

    kv_slots: Tensor
    pages: Tensor
    last: Tensor


def prompt_inputs(
    head: Tensor, size: int, computed: Tensor, pages: Tensor, page_size: int
) -> PromptInputs:
    """What a prompt of which nothing is in the KV cache yet is stored by; counts its tokens.

    Args:
        head: int64 `[2 or more]`, contiguous: its slot, and its length, from 1 to `size`.
        size: T, tokens with padding, which is stored at the start of the scrap page.
        computed: int64 `[N]`, tokens in the cache of each slot: written in place.
        pages: int64 `[N, P]`, contiguous: each slot's page ids in order of position, that of the
            last slot being the scrap page. P pages hold T tokens.
        page_size: tokens of a page.
    """
    if int_kernels(head):
        from baton.ops.triton import step as kernels

        return PromptInputs(*kernels.prompt_inputs(head, size, computed, pages, page_size))
    slot, length = head[:1], head[1:2]
    positions = torch.arange(size, device=head.device)
    table = pages[slot]
    page = torch.where(positions < length, table[0, positions // page_size], pages[-1, 0])
    computed.index_add_(0, slot, length)
    return PromptInputs(page * page_size + positions % page_size, table, length - 1)


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
