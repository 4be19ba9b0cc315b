"""Grouped-query decode attention over pages: split-KV with a task map shared by all layers.

Bytes: every key and value once, `2 * len * Hk * D * size`; FLOPs: `4 * len * H * D`, 8 FLOPs a
byte in BF16 with 8 query heads per KV head, so memory is the bound (4.25 TB/s) and the tensor
cores only have to keep out of the way. A program loads a tile of one KV head (two contiguous
runs of a page) for the whole group of query heads, padded to 16 rows for `tl.dot`; loads of the
next tiles are in flight through `num_stages`. See `split` for who computes what.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from baton.ops.triton.common import LN_2, LOG2_E, follow, overlapping
from baton.ops.triton.split import (
    Launch,
    TaskMap,
    Workspace,
    combine,
    line,
    padded_batch,
    sequence_of,
)


@triton.jit
def pages_of(table, t, n, length, TILE: tl.constexpr, PAGE: tl.constexpr):
    """Pages of tile `t`: a scalar when it lies on one page, else one per token."""
    if PAGE % TILE == 0:
        page = tl.load(table + t * TILE // PAGE)
    else:
        token = t * TILE + n
        page = tl.load(table + token // PAGE, token < length, 0)
    return page


@triton.jit
def _attend_tiles(
    q, k_pages, v_pages, table, length, first, last, scale_log2,
    k_page, k_token, v_page, v_token,
    G_PAD: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr, TILE: tl.constexpr,
    PAGE: tl.constexpr, STAGES: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Softmax over tiles `[first, last)` of one sequence and KV head: `(acc, max, sum)`, base 2.
    `q` is scaled by nothing; `k_pages`, `v_pages` point at the head."""
    n = tl.arange(0, TILE)
    d = tl.arange(0, D_PAD)
    top = tl.full([G_PAD], float("-inf"), tl.float32)
    total = tl.zeros([G_PAD], tl.float32)
    acc = tl.zeros([G_PAD, D_PAD], tl.float32)
    # A tile's page ids are read one tile ahead and carried: were they read where they are used,
    # the loads of keys and values would wait for them, and fewer would be in flight.
    page = pages_of(table, first, n, length, TILE, PAGE)
    for t in tl.range(first, last, num_stages=STAGES):
        token = t * TILE + n
        live = token < length
        inside = token % PAGE
        later = pages_of(table, tl.minimum(t + 1, last - 1), n, length, TILE, PAGE)
        # What lies past the end may be NaN: it is never loaded, and zero takes its place.
        mask = live[:, None] & (d < D)[None, :]
        k = tl.load(
            k_pages + (page * k_page + inside * k_token)[:, None] + d[None, :], mask, 0.0
        ).to(q.dtype)
        v = tl.load(
            v_pages + (page * v_page + inside * v_token)[:, None] + d[None, :], mask, 0.0
        ).to(q.dtype)
        s = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale_log2
        s = tl.where(live[None, :], s, float("-inf"))
        new_top = tl.maximum(top, tl.max(s, 1))
        p = tl.exp2(s - new_top[:, None])
        old = tl.exp2(top - new_top)
        total = total * old + tl.sum(p, 1)
        acc = tl.dot(p.to(q.dtype), v, acc * old[:, None], input_precision=PRECISION)
        top, page = new_top, later
    return acc, top, total


@triton.jit(do_not_specialize=["batch", "table_row"])
def _decode_gqa_kernel(
    q, k_pages, v_pages, pages, lengths, bounds, out, lse, part, part_lse, batch, scale_log2,
    q_row, q_head, k_page, k_head, k_token, v_page, v_head, v_token, table_row,
    HK: tl.constexpr, G: tl.constexpr, G_PAD: tl.constexpr, D: tl.constexpr,
    D_PAD: tl.constexpr, TILE: tl.constexpr, PAGE: tl.constexpr, B_PAD: tl.constexpr,
    STAGES: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    g = tl.arange(0, G_PAD)
    d = tl.arange(0, D_PAD)
    mask = (g < G)[:, None] & (d < D)[None, :]
    unit, stop, ends, all_lengths = line(lengths, bounds, batch, B_PAD)
    follow()
    while unit < stop:
        b, start, end, length = sequence_of(unit, ends, all_lengths, B_PAD)
        tiles = tl.cdiv(length, TILE)
        inside = unit - start
        head = inside // tiles
        first = inside % tiles
        last = tl.minimum(tiles, first + stop - unit)
        if first < last:
            query = tl.load(
                q + b.to(tl.int64) * q_row + (head * G + g)[:, None] * q_head + d[None, :],
                mask,
                0.0,
            )
            acc, top, total = _attend_tiles(
                query, k_pages + head.to(tl.int64) * k_head, v_pages + head.to(tl.int64) * v_head,
                pages + b.to(tl.int64) * table_row, length, first, last, scale_log2,
                k_page, k_token, v_page, v_token,
                G_PAD, D, D_PAD, TILE, PAGE, STAGES, PRECISION,
            )  # fmt: skip
            acc = acc / total[:, None]
            top += tl.log2(total)
            if first == 0 and last == tiles:
                row = b.to(tl.int64) * HK * G + head * G + g
                tl.store(out + row[:, None] * D + d[None, :], acc.to(out.dtype.element_ty), mask)
                tl.store(lse + row, top * LN_2, g < G)
            else:
                slot = (2 * tl.program_id(0) + (first == 0).to(tl.int32)).to(tl.int64)
                row = slot * G_PAD + g
                tl.store(part + row[:, None] * D + d[None, :], acc, mask)
                tl.store(part_lse + row, top, g < G)
        unit += last - first
        if unit - start >= tiles * HK:
            unit = end


def gqa_launch(group: int, dim: int, itemsize: int = 2) -> Launch:
    """The shape for `group` query heads per KV head. At 16 x 128 in BF16: 147 registers, 72 KB of
    shared memory, so three programs per multiprocessor with 190 KB in flight."""
    rows = max(16, triton.next_power_of_2(group))
    if itemsize > 2 or dim > 128 or rows > 32:
        return Launch(rows, 32 if itemsize > 2 else 64, 4, 2, 1)
    return Launch(rows, 64, 4, 3, 3 if rows == 16 else 2)


def decode_gqa(
    q: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    pages: torch.Tensor,
    shares: TaskMap,
    space: Workspace,
    scale: float,
    launch: Launch,
) -> tuple[torch.Tensor, torch.Tensor]:
    """One query token per sequence against its pages.

    Args:
        q: `[B, H, D]`, last dim contiguous.
        key, value: pages `[num_pages, page_size, Hk, D]`, any strides but the last.
        pages: int64 `[B, P]`, last dim contiguous. Entries past a length are not read.
        shares: `task_map(..., tile=launch.tile, blocks=Hk)`.
        space: `>= 2 * shares.programs` slots of `launch.rows` rows and D columns.
        scale: on the scores.

    Returns:
        `(out [B, H, D] in q's dtype, lse float32 [B, H])`.
    """
    batch, heads, dim = q.shape
    page_size, kv_heads = key.shape[1], key.shape[2]
    group = heads // kv_heads
    out = torch.empty(batch, heads, dim, dtype=q.dtype, device=q.device)
    lse = torch.empty(batch, heads, dtype=torch.float32, device=q.device)
    wide = q.dtype == torch.float32
    _decode_gqa_kernel[(shares.programs,)](
        q, key, value, pages, shares.lengths, shares.bounds, out, lse, space.out, space.lse,
        batch, scale * LOG2_E,
        q.stride(0), q.stride(1), key.stride(0), key.stride(2), key.stride(1),
        value.stride(0), value.stride(2), value.stride(1), pages.stride(0),
        HK=kv_heads, G=group, G_PAD=launch.rows, D=dim,
        D_PAD=triton.next_power_of_2(dim), TILE=shares.tile, PAGE=page_size,
        B_PAD=padded_batch(batch), STAGES=launch.stages,
        PRECISION="ieee" if wide else "tf32", num_warps=launch.warps,
        launch_pdl=overlapping(),
    )  # fmt: skip
    combine(space, shares, out, lse, group)
    return out, lse
