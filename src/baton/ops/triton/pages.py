"""Copies between token rows and pages.

Bytes: each element read once and written once; no arithmetic. A program moves a block of
(token, head) rows in 16-byte accesses; both kernels run at copy speed for blocks of a few
thousand tokens, and cost one launch for a decode step.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit
def _store_rows(slots, pages, x, row, live, x_row, x_head, page, token, head,
                H: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr, PAGE: tl.constexpr):  # fmt: skip # noqa: E501
    d = tl.arange(0, D_PAD)
    t, h = row // H, row % H
    slot = tl.load(slots + t, live, 0)
    mask = live[:, None] & (d < D)[None, :]
    value = tl.load(x + (t.to(tl.int64) * x_row + h * x_head)[:, None] + d[None, :], mask)
    to = slot // PAGE * page + slot % PAGE * token + h * head
    tl.store(pages + to[:, None] + d[None, :], value.to(pages.dtype.element_ty), mask)


@triton.jit(do_not_specialize=["rows"], do_not_specialize_on_alignment=["slots"])
def _store_kernel(
    slots, key_pages, key, value_pages, value, rows,
    k_row, k_head, kp_page, kp_token, kp_head, v_row, v_head, vp_page, vp_token, vp_head,
    H: tl.constexpr, DK: tl.constexpr, DK_PAD: tl.constexpr, DV: tl.constexpr,
    DV_PAD: tl.constexpr, PAGE: tl.constexpr, BLOCK: tl.constexpr, HAS_VALUE: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    live = row < rows
    _store_rows(slots, key_pages, key, row, live, k_row, k_head, kp_page, kp_token, kp_head,
                H, DK, DK_PAD, PAGE)  # fmt: skip
    if HAS_VALUE:
        _store_rows(slots, value_pages, value, row, live, v_row, v_head, vp_page, vp_token,
                    vp_head, H, DV, DV_PAD, PAGE)  # fmt: skip


def store(
    slots: torch.Tensor,
    key_pages: torch.Tensor,
    key: torch.Tensor,
    value_pages: torch.Tensor | None,
    value: torch.Tensor | None,
) -> None:
    """See `ops.kv_pages.store_tokens`. The last dims of `key` and `value` are made contiguous."""
    tokens, heads, dim = key.shape
    key = key if key.stride(-1) == 1 else key.contiguous()
    has_value = value is not None and value_pages is not None
    if value is None or value_pages is None:
        value, value_pages = key, key_pages
    value = value if value.stride(-1) == 1 else value.contiguous()
    rows, wide = tokens * heads, value.shape[-1]
    block = 1 if rows <= 1024 else 8  # a small step needs programs, a large one long ones
    _store_kernel[(triton.cdiv(rows, block),)](
        slots, key_pages, key, value_pages, value, rows,
        key.stride(0), key.stride(1),
        key_pages.stride(0), key_pages.stride(1), key_pages.stride(2),
        value.stride(0), value.stride(1),
        value_pages.stride(0), value_pages.stride(1), value_pages.stride(2),
        H=heads, DK=dim, DK_PAD=triton.next_power_of_2(dim), DV=wide,
        DV_PAD=triton.next_power_of_2(wide), PAGE=key_pages.shape[1], BLOCK=block,
        HAS_VALUE=has_value, num_warps=1 if block == 1 else 4,
    )  # fmt: skip


@triton.jit(do_not_specialize=["table_row"], do_not_specialize_on_alignment=["pages"])
def _gather_kernel(
    source, pages, bounds, out, table_row, s_page, s_token, s_head,
    H: tl.constexpr, D: tl.constexpr, D_BLOCK: tl.constexpr, PAGE: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    n, head = tl.program_id(1), tl.program_id(2)
    start = tl.load(bounds + n)
    length = tl.load(bounds + n + 1) - start
    token = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    live = token < length
    page = tl.load(pages + n.to(tl.int64) * table_row + token // PAGE, live, 0)
    at = source + page * s_page + token % PAGE * s_token + head.to(tl.int64) * s_head
    to = out + ((start + token).to(tl.int64) * H + head) * D
    for d0 in tl.static_range(0, D, D_BLOCK):
        d = d0 + tl.arange(0, D_BLOCK)
        x = tl.load(at[:, None] + d[None, :], live[:, None])
        tl.store(to[:, None] + d[None, :], x.to(out.dtype.element_ty), live[:, None])


def gather(
    source: torch.Tensor,
    pages: torch.Tensor,
    longest: int,
    bounds: torch.Tensor,
    out: torch.Tensor,
) -> None:
    """See `ops.kv_pages.gather_tokens`."""
    _, size, heads, dim = source.shape
    width = min(dim & -dim, 128)  # the widest power of 2 that divides a row
    block = max(16, 8192 // width // 2)
    _gather_kernel[(triton.cdiv(longest, block), pages.shape[0], heads)](
        source, pages, bounds, out, pages.stride(0),
        source.stride(0), source.stride(1), source.stride(2),
        H=heads, D=dim, D_BLOCK=width, PAGE=size, BLOCK=block, num_warps=4,
    )  # fmt: skip
