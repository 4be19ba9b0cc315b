"""Latent (absorbed MLA) decode attention over pages: every head against one shared latent.

Bytes: each token's latent and rope once, `len * 576 * size`; FLOPs: `2 * len * H * (576 + 512)`,
30 FLOPs a byte in BF16 for 16 heads (memory-bound), 242 for 128 (near the card's balance). A tile
of latents is loaded once and used twice, as keys and as values (its first 512 columns).

Up to 64 heads form one block (16 or 32 rows: mma.sync; 64 rows: wgmma); more heads are more
blocks. The accumulator, `heads x 512` in float32, is what fills the registers: see `mla_launch`.
On Hopper up to 16 heads go to `decode_mla_hopper`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from baton.ops.triton import decode_mla_hopper
from baton.ops.triton.common import LN_2, LOG2_E, follow, overlapping
from baton.ops.triton.decode_gqa import pages_of
from baton.ops.triton.split import (
    Launch,
    TaskMap,
    Workspace,
    combine,
    line,
    padded_batch,
    sequence_of,
)


@triton.jit(do_not_specialize=["batch", "table_row"])
def _decode_mla_kernel(
    q, q_rope, k_pages, pages, lengths, bounds, out, lse, part, part_lse, batch, scale_log2,
    q_row, q_head, rope_row, rope_head, k_page, k_token, table_row,
    H: tl.constexpr, R: tl.constexpr, L: tl.constexpr, L_PAD: tl.constexpr,
    ROPE: tl.constexpr, ROPE_PAD: tl.constexpr, TILE: tl.constexpr, PAGE: tl.constexpr,
    B_PAD: tl.constexpr, STAGES: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    r = tl.arange(0, R)
    n = tl.arange(0, TILE)
    c = tl.arange(0, L_PAD)
    e = tl.arange(0, ROPE_PAD)
    unit, stop, ends, all_lengths = line(lengths, bounds, batch, B_PAD)
    follow()
    while unit < stop:
        b, start, end, length = sequence_of(unit, ends, all_lengths, B_PAD)
        tiles = tl.cdiv(length, TILE)
        inside = unit - start
        head = inside // tiles * R + r
        first = inside % tiles
        last = tl.minimum(tiles, first + stop - unit)
        b = b.to(tl.int64)
        here = head < H
        query = tl.load(
            q + b * q_row + head[:, None] * q_head + c[None, :],
            here[:, None] & (c < L)[None, :],
            0.0,
        )
        turn = tl.load(
            q_rope + b * rope_row + head[:, None] * rope_head + e[None, :],
            here[:, None] & (e < ROPE)[None, :],
            0.0,
        )
        top = tl.full([R], float("-inf"), tl.float32)
        total = tl.zeros([R], tl.float32)
        acc = tl.zeros([R, L_PAD], tl.float32)
        table = pages + b * table_row
        page = pages_of(table, first, n, length, TILE, PAGE)
        for t in tl.range(first, last, num_stages=STAGES):
            token = t * TILE + n
            live = token < length
            at = k_pages + (page * k_page + token % PAGE * k_token)[:, None]
            later = pages_of(table, tl.minimum(t + 1, last - 1), n, length, TILE, PAGE)
            k = tl.load(at + c[None, :], live[:, None] & (c < L)[None, :], 0.0).to(query.dtype)
            kr = tl.load(at + L + e[None, :], live[:, None] & (e < ROPE)[None, :], 0.0).to(
                query.dtype
            )
            s = tl.dot(query, tl.trans(k), input_precision=PRECISION)
            s = tl.dot(turn, tl.trans(kr), s, input_precision=PRECISION) * scale_log2
            s = tl.where(live[None, :], s, float("-inf"))
            new_top = tl.maximum(top, tl.max(s, 1))
            p = tl.exp2(s - new_top[:, None])
            old = tl.exp2(top - new_top)
            total = total * old + tl.sum(p, 1)
            acc = acc * old[:, None]
            acc = tl.dot(p.to(query.dtype), k, acc, input_precision=PRECISION)
            top, page = new_top, later
        top += tl.log2(total)
        acc = acc / total[:, None]
        mask = here[:, None] & (c < L)[None, :]
        if first == 0 and last == tiles:
            at_out = out + (b * H + head)[:, None] * L + c[None, :]
            tl.store(at_out, acc.to(out.dtype.element_ty), mask)
            tl.store(lse + b * H + head, top * LN_2, here)
        else:
            slot = (2 * tl.program_id(0) + (first == 0).to(tl.int32)).to(tl.int64)
            tl.store(part + (slot * R + r)[:, None] * L + c[None, :], acc, mask)
            tl.store(part_lse + slot * R + r, top, here)
        unit += last - first
        if unit - start >= tiles * tl.cdiv(H, R):
            unit = end


def mla_launch(heads: int, itemsize: int = 2) -> Launch:
    """The shape for `heads` heads, chosen so that nothing spills (see the compile test) and so
    that one program per multiprocessor keeps 150 to 220 KB of latents in flight: with 16 heads
    faster at every mix of lengths than two programs with tiles of 32."""
    rows = min(64, max(16, triton.next_power_of_2(heads)))
    if itemsize > 2:
        return Launch(rows, 16, 8, 2, 1)
    return Launch(rows, 64, 8, 3 if rows <= 32 else 2, 1, slack=2)


def decode_mla(
    q: torch.Tensor,
    q_rope: torch.Tensor,
    pages_kv: torch.Tensor,
    pages: torch.Tensor,
    shares: TaskMap,
    space: Workspace,
    scale: float,
    launch: Launch,
) -> tuple[torch.Tensor, torch.Tensor]:
    """One query token per sequence against its latents.

    Args:
        q: `[B, H, L]`, queries moved into the latent space, any strides but the last.
        q_rope: `[B, H, rope]`, rotated, any strides but the last.
        pages_kv: pages `[num_pages, page_size, 1, L + rope]`. Not written by what was launched last
            (that makes q): they may be read while it runs.
        pages: int64 `[B, P]`, last dim contiguous. Entries past a length are not read.
        shares: `task_map(..., tile=launch.tile, blocks=ceil(H / launch.rows))`.
        space: `>= 2 * shares.programs` slots of `launch.rows` rows and L columns.
        scale: on the scores.

    Returns:
        `(out [B, H, L] in q's dtype, lse float32 [B, H])`, still in the latent space.
    """
    batch, heads, latent = q.shape
    rope, page_size = q_rope.shape[-1], pages_kv.shape[1]
    out = torch.empty(batch, heads, latent, dtype=q.dtype, device=q.device)
    lse = torch.empty(batch, heads, dtype=torch.float32, device=q.device)
    if decode_mla_hopper.supports(q, q_rope, pages_kv, shares.tile):
        decode_mla_hopper.launch(q, q_rope, pages_kv, pages, shares, space, scale, out, lse)
    else:
        _decode_mla_kernel[(shares.programs,)](
            q, q_rope, pages_kv, pages, shares.lengths, shares.bounds, out, lse,
            space.out, space.lse, batch, scale * LOG2_E,
            q.stride(0), q.stride(1), q_rope.stride(0), q_rope.stride(1),
            pages_kv.stride(0), pages_kv.stride(1), pages.stride(0),
            H=heads, R=launch.rows, L=latent, L_PAD=triton.next_power_of_2(latent), ROPE=rope,
            ROPE_PAD=triton.next_power_of_2(rope), TILE=shares.tile, PAGE=page_size,
            B_PAD=padded_batch(batch), STAGES=launch.stages,
            PRECISION="ieee" if q.dtype == torch.float32 else "tf32",
            num_warps=launch.warps, launch_pdl=overlapping(),
        )  # fmt: skip
    combine(space, shares, out, lse, launch.rows)
    return out, lse
