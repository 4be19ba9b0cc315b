"""Where a step of decodes begins and ends, and where a prompt does: one kernel each, for a dozen
small ones in PyTorch.

Bytes: `16 S P` for S page tables of P pages, some 100 a row of a decode and 16 a token of a prompt.
No kernel does more than wait for memory: what counts is how often, three times in a row for the
first one (the slot; its length and its table; the page of the new token).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from baton.ops.triton.common import follow, overlapping

_CHUNK = 1024  # pages that a program copies
_ROWS = 128  # rows that a program ends
_TOKENS = 256  # of a prompt, and as many pages, that a program looks up


@triton.jit(do_not_specialize_on_alignment=["slots"])
def _decode_inputs(
    slots, last_token, computed, pages, ids, positions, kv_slots, tables,
    PAGE: tl.constexpr, P: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    follow()
    slot = tl.load(slots + row)
    table = pages + slot * P
    if chunk == 0:
        position = tl.load(computed + slot)
        tl.store(ids + row, tl.load(last_token + slot))
        tl.store(positions + row, position)
        page = tl.load(table + position // PAGE)
        tl.store(kv_slots + row, page * PAGE + position % PAGE)
    at = chunk * CHUNK + tl.arange(0, CHUNK)
    tl.store(tables + row * P + at, tl.load(table + at, mask=at < P), mask=at < P)


def decode_inputs(
    slots: torch.Tensor,
    last_token: torch.Tensor,
    computed: torch.Tensor,
    pages: torch.Tensor,
    page_size: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """See `ops.step.decode_inputs`."""
    count, width = len(slots), pages.shape[1]
    ids, positions, kv_slots = (torch.empty_like(slots) for _ in range(3))
    tables = torch.empty(count, width, dtype=torch.int64, device=slots.device)
    chunk = min(_CHUNK, triton.next_power_of_2(width))
    if count:
        _decode_inputs[(count, triton.cdiv(width, chunk))](
            slots, last_token, computed, pages, ids, positions, kv_slots, tables,
            PAGE=page_size, P=width, CHUNK=chunk, num_warps=max(1, chunk // 256),
            launch_pdl=overlapping(),
        )  # fmt: skip
    return ids, positions, kv_slots, tables


@triton.jit(do_not_specialize=["size", "scrap"])
def _prompt_inputs(
    head, computed, pages, kv_slots, tables, last, size, scrap,
    PAGE: tl.constexpr, P: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    follow()
    slot, length = tl.load(head), tl.load(head + 1)
    table = pages + slot * P
    page = tl.load(table + at // PAGE, mask=at < length, other=0)
    page = tl.where(at < length, page, tl.load(pages + scrap.to(tl.int64) * P))
    tl.store(kv_slots + at, page * PAGE + at % PAGE, mask=at < size)
    tl.store(tables + at, tl.load(table + at, mask=at < P), mask=at < P)
    if tl.program_id(0) == 0:
        tl.store(computed + slot, tl.load(computed + slot) + length)
        tl.store(last, length - 1)


def prompt_inputs(
    head: torch.Tensor,
    size: int,
    computed: torch.Tensor,
    pages: torch.Tensor,
    page_size: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """See `ops.step.prompt_inputs`."""
    slots, width = pages.shape
    kv_slots, tables, last = (
        torch.empty(shape, dtype=torch.int64, device=head.device) for shape in (size, (1, width), 1)
    )
    _prompt_inputs[(triton.cdiv(max(size, width), _TOKENS),)](
        head, computed, pages, kv_slots, tables, last, size, slots - 1,
        PAGE=page_size, P=width, BLOCK=_TOKENS, num_warps=2, launch_pdl=overlapping(),
    )  # fmt: skip
    return kv_slots, tables, last


@triton.jit(
    do_not_specialize=["rows"], do_not_specialize_on_alignment=["slots", "live", "tokens", "bad"]
)
def _advance(
    slots, live, tokens, bad, last_token, computed, generated, chosen, rows, BLOCK: tl.constexpr
):
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = row < rows
    follow()
    slot = tl.load(slots + row, mask=mask, other=0)
    token = tl.load(tokens + row, mask=mask, other=0)
    tl.store(chosen + row, token, mask=mask)
    tl.store(chosen + rows + row, tl.load(bad + row, mask=mask, other=0).to(tl.int64), mask=mask)
    # Rows that are not live share a slot: none of them writes there.
    mask &= tl.load(live + row, mask=mask, other=0) > 0
    tl.store(last_token + slot, token, mask=mask)
    tl.store(computed + slot, tl.load(computed + slot, mask=mask) + 1, mask=mask)
    tl.store(generated + slot, tl.load(generated + slot, mask=mask) + 1, mask=mask)


def advance(
    slots: torch.Tensor,
    live: torch.Tensor,
    tokens: torch.Tensor,
    bad: torch.Tensor,
    last_token: torch.Tensor,
    computed: torch.Tensor,
    generated: torch.Tensor,
) -> torch.Tensor:
    """See `ops.step.advance`."""
    count = len(slots)
    chosen = torch.empty(2, count, dtype=torch.int64, device=slots.device)
    if count:
        _advance[(triton.cdiv(count, _ROWS),)](
            slots, live, tokens, bad, last_token, computed, generated, chosen, count,
            BLOCK=_ROWS, num_warps=4, launch_pdl=overlapping(),
        )  # fmt: skip
    return chosen
