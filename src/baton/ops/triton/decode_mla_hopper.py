"""`decode_mla` of up to 16 heads on Hopper, in Gluon, which lets a kernel say what lies where.

The Triton kernel, told only what to compute, reads the queries from shared memory again for every
tile, half of all it reads there, and spends instructions on copying latents. Here queries stay in
registers, one thread asks TMA for whole tiles, and the scores of the next tile are computed while
the values of this one are. What is left is the stream of latents: for 8 sequences of 64K the
kernel takes 152 us, without any product 144 (142 is the limit; the Triton kernel takes 178).

Shares, partials and results are those of `decode_mla`. Gluon has no interpreter: this is compiled
in CI, and compared on a card.
"""

from __future__ import annotations

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from baton.ops.triton.common import LN_2, LOG2_E, overlapping
from baton.ops.triton.gluon import thread_barrier
from baton.ops.triton.split import TaskMap, Workspace, padded_batch

#: Heads of a program; tokens of a tile, and of a product with values; tiles on their way.
ROWS, TILE, KEYS, STAGES = 16, 64, 16, 3
#: Columns of latents, multiplied a quarter at a time.
LATENT, QUARTER = 512, 128
WARPS = 8

_ROWS, _TILE, _KEYS, _STAGES = (gl.constexpr(n) for n in (ROWS, TILE, KEYS, STAGES))
_LATENT, _QUARTER, _WARPS = (gl.constexpr(n) for n in (LATENT, QUARTER, WARPS))
_MMA = gl.constexpr(gl.NVMMADistributedLayout([2, 0], [1, WARPS], [16, 8]))
_LEFT = gl.constexpr(gl.DotOperandLayout(0, _MMA.value, 2))
_RIGHT = gl.constexpr(gl.DotOperandLayout(1, _MMA.value, 2))
#: Queries come in 16 bytes a thread; straight into `_LEFT` they would come in 4.
_WIDE = gl.constexpr(gl.BlockedLayout([1, 8], [2, 16], [WARPS, 1], [1, 0]))


@gluon.jit
def _page(table, t, last, PAGE: gl.constexpr):
    """The page that holds tile `t`."""
    at = table + t * _TILE // PAGE
    return gl.load(at, mask=t < last, other=0, cache_modifier=".cg").to(gl.int32)


@gluon.jit
def _first_pages(table, t, last, PAGE: gl.constexpr):
    """Those of the tiles that are asked for before one has come, and of the one behind."""
    return (
        _page(table, t, last, PAGE),
        _page(table, t + 1, last, PAGE),
        _page(table, t + 2, last, PAGE),
        _page(table, t + 3, last, PAGE),
    )


@gluon.jit
def _fetch(latents, ropes, ready, ring, turns, page, t, last, slot, PAGE: gl.constexpr):
    """Ask for tile `t`, which `page` holds."""
    wanted, stage = t < last, slot % _STAGES
    row = page * PAGE + t * _TILE % PAGE
    bar = ready.index(stage)
    mbarrier.expect(bar, latents.block_type.nbytes + ropes.block_type.nbytes, pred=wanted)
    tma.async_copy_global_to_shared(latents, [row, 0], bar, ring.index(stage), pred=wanted)
    tma.async_copy_global_to_shared(ropes, [row, _LATENT], bar, turns.index(stage), pred=wanted)


@gluon.jit
def _scores(q0, q1, q2, q3, turn, ready, ring, turns, slot):
    """`[ROWS, TILE]` of the tile in `slot`, in two chains: every product waits for its last."""
    stage = slot % _STAGES
    mbarrier.wait(ready.index(stage), slot // _STAGES & 1)
    k, kr = ring.index(stage).permute((1, 0)), turns.index(stage).permute((1, 0))
    one = gl.zeros([_ROWS, _TILE], gl.float32, layout=_MMA)
    two = gl.zeros([_ROWS, _TILE], gl.float32, layout=_MMA)
    one = mma_v2(q0, k.slice(0, _QUARTER).load(_RIGHT), one)
    two = mma_v2(q1, k.slice(_QUARTER, _QUARTER).load(_RIGHT), two)
    one = mma_v2(q2, k.slice(2 * _QUARTER, _QUARTER).load(_RIGHT), one)
    two = mma_v2(q3, k.slice(3 * _QUARTER, _QUARTER).load(_RIGHT), two)
    one = mma_v2(turn, kr.load(_RIGHT), one)
    return one + two


@gluon.jit
def _weighted(weights, values, live, acc, WHOLE: gl.constexpr):
    """`acc` and the tile's values, of which `live` count: what lies behind them may be anything,
    also no number, and 0 times that is none."""
    for j in gl.static_range(0, _TILE, _KEYS):
        v = values.slice(j, _KEYS).load(_RIGHT)
        if not WHOLE:
            token = j + gl.arange(0, _KEYS, layout=gl.SliceLayout(1, _RIGHT))
            v = gl.where((token < live)[:, None], v, gl.zeros_like(v))
        acc = mma_v2(weights.slice(j, _KEYS, 1).load(_LEFT), v, acc)
    return acc


@gluon.jit
def _segment(unit, stop, i, ends, lengths):
    """Tiles `[first, last)` of the sequence `b` that holds `unit`, how long it is in tokens and
    tiles, and the unit to go on with. See `split.sequence_of`."""
    before = ends <= unit
    b = gl.sum(before.to(gl.int32), 0)
    start = gl.max(gl.where(before, ends, 0), 0)
    end = gl.min(gl.where(before, 2147483647, ends), 0)
    length = gl.sum(gl.where(i == b, lengths, 0), 0)
    tiles = gl.cdiv(length, _TILE)
    first = unit - start
    last = gl.minimum(tiles, first + stop - unit)
    after = gl.where(last >= tiles, end, unit + last - first)
    return b.to(gl.int64), length, tiles, first, last, after


@gluon.jit(do_not_specialize=["batch", "table_row"])
def _decode_mla_kernel(
    q, q_rope, latents, ropes, pages, lengths, bounds, out, lse, part, part_lse, batch, scale_log2,
    q_row, q_head, rope_row, rope_head, table_row,
    H: gl.constexpr, ROPE: gl.constexpr, PAGE: gl.constexpr, B_PAD: gl.constexpr,
):  # fmt: skip
    dtype: gl.constexpr = latents.dtype
    ring = gl.allocate_shared_memory(dtype, [_STAGES, _TILE, _LATENT], latents.layout)
    turns = gl.allocate_shared_memory(dtype, [_STAGES, _TILE, ROPE], ropes.layout)
    weights = gl.allocate_shared_memory(
        dtype, [_ROWS, _TILE], gl.NVMMASharedLayout.get_default_for([_ROWS, _TILE], dtype)
    )
    ready = gl.allocate_shared_memory(gl.int64, [_STAGES, 1], mbarrier.MBarrierLayout())
    for n in gl.static_range(_STAGES):
        mbarrier.init(ready.index(n), count=1)
    fence_async_shared()
    # See `split.line`.
    i = gl.arange(0, B_PAD, layout=gl.BlockedLayout([B_PAD // 32], [32], [_WARPS], [0]))
    ends = gl.load(bounds + 1 + i, i < batch, 2147483647, cache_modifier=".cg")
    all_lengths = gl.load(lengths + i, i < batch, 0, cache_modifier=".cg")
    units = gl.load(bounds + batch, cache_modifier=".cg")
    per = gl.load(bounds + batch + 1, cache_modifier=".cg")
    unit = gl.program_id(0) * per
    stop = gl.minimum(unit + per, units)
    b, length, tiles, first, last, after = _segment(unit, stop, i, ends, all_lengths)
    head = gl.arange(0, _ROWS, layout=gl.SliceLayout(1, _MMA))
    column = gl.arange(0, _LATENT, layout=gl.SliceLayout(0, _MMA))
    token = gl.arange(0, _TILE, layout=gl.SliceLayout(0, _MMA))
    row = gl.arange(0, _ROWS, layout=gl.SliceLayout(1, _WIDE))[:, None]
    quarter = gl.arange(0, _QUARTER, layout=gl.SliceLayout(0, _WIDE))[None, :]
    e = gl.arange(0, ROPE, layout=gl.SliceLayout(0, _WIDE))[None, :]
    slot = 0  # of the tile at hand: how many came before it, over all sequences
    table = pages + b * table_row
    page0, page1, page2, page = _first_pages(table, first, last, PAGE)
    # Latents were stored before the kernel ahead, which makes the queries, began.
    if unit < stop:
        _fetch(latents, ropes, ready, ring, turns, page0, first, last, slot, PAGE)
        _fetch(latents, ropes, ready, ring, turns, page1, first + 1, last, slot + 1, PAGE)
        _fetch(latents, ropes, ready, ring, turns, page2, first + 2, last, slot + 2, PAGE)
    gdc_wait()
    gdc_launch_dependents()
    while unit < stop:
        at = q + b * q_row + row * q_head + quarter
        q0, q1 = gl.load(at, row < H, 0.0), gl.load(at + _QUARTER, row < H, 0.0)
        q2, q3 = gl.load(at + 2 * _QUARTER, row < H, 0.0), gl.load(at + 3 * _QUARTER, row < H, 0.0)
        turn = gl.load(q_rope + b * rope_row + row * rope_head + e, row < H, 0.0)
        q0, q1 = gl.convert_layout(q0, _LEFT), gl.convert_layout(q1, _LEFT)
        q2, q3 = gl.convert_layout(q2, _LEFT), gl.convert_layout(q3, _LEFT)
        turn = gl.convert_layout(turn, _LEFT)
        top = gl.full([_ROWS], float("-inf"), gl.float32, layout=gl.SliceLayout(1, _MMA))
        sums = gl.zeros([_ROWS, _TILE], gl.float32, layout=_MMA)  # added up over tiles, then over
        acc = gl.zeros([_ROWS, _LATENT], gl.float32, layout=_MMA)
        scores = _scores(q0, q1, q2, q3, turn, ready, ring, turns, slot)
        for t in range(first, last):
            live = length - t * _TILE
            s = gl.where((token < live)[None, :], scores * scale_log2, float("-inf"))
            new_top = gl.maximum(top, gl.max(s, 1))
            p = gl.exp2(s - new_top[:, None])
            old = gl.exp2(top - new_top)[:, None]
            top = new_top
            sums = sums * old + p
            acc = acc * old
            weights.store(p.to(dtype))
            if t + 1 < last:
                scores = _scores(q0, q1, q2, q3, turn, ready, ring, turns, slot + 1)
            values = ring.index(slot % _STAGES)
            if live < _TILE:
                acc = _weighted(weights, values, live, acc, False)
            else:
                acc = _weighted(weights, values, live, acc, True)
            thread_barrier()  # all have read the tile
            _fetch(latents, ropes, ready, ring, turns, page, t + 3, last, slot, PAGE)
            page = _page(table, t + 4, last, PAGE)
            slot += 1
        # The next sequence's tiles come while this one's results go.
        done_b, done_first, done = b, first, last == tiles
        unit = after
        b, length, tiles, first, last, after = _segment(unit, stop, i, ends, all_lengths)
        table = pages + b * table_row
        page0, page1, page2, page = _first_pages(table, first, last, PAGE)
        if unit < stop:
            _fetch(latents, ropes, ready, ring, turns, page0, first, last, slot, PAGE)
            _fetch(latents, ropes, ready, ring, turns, page1, first + 1, last, slot + 1, PAGE)
            _fetch(latents, ropes, ready, ring, turns, page2, first + 2, last, slot + 2, PAGE)
        total = gl.sum(sums, 1)
        top += gl.log2(total)
        acc = acc / total[:, None]
        here = head < H
        mask = here[:, None] & (column < _LATENT)[None, :]
        if done_first == 0 and done:
            to = done_b * H + head
            at_out = out + to[:, None] * _LATENT + column[None, :]
            gl.store(at_out, acc.to(out.dtype.element_ty), mask)
            gl.store(lse + to, top * LN_2, here)
        else:
            place = 2 * gl.program_id(0) + (done_first == 0).to(gl.int32)
            to = place.to(gl.int64) * _ROWS + head
            gl.store(part + to[:, None] * _LATENT + column[None, :], acc, mask)
            gl.store(part_lse + to, top, here)


def supports(q: torch.Tensor, q_rope: torch.Tensor, pages_kv: torch.Tensor, tile: int) -> bool:
    """Whether these queries and pages (see `decode_mla`) and shares of `tile` tokens are what the
    kernel was written for: pages of whole tiles, one behind the other, and 16-byte rows of both."""
    pages, page, heads, width = pages_kv.shape
    size, rope = q.element_size(), q_rope.shape[-1]
    aligned = all(s * size % 16 == 0 for s in (*q.stride()[:2], *q_rope.stride()[:2], width))
    return (
        overlapping()
        and q.is_cuda
        and size == 2
        and q.dtype == q_rope.dtype == pages_kv.dtype
        and q.shape[1] <= ROWS
        and q.shape[2] == LATENT
        and rope == width - LATENT
        and rope in (32, 64)
        and heads == 1
        and page % TILE == 0
        and tile == TILE
        and (pages_kv.stride(0), pages_kv.stride(1)) == (page * width, width)
        and aligned
        and all(t.data_ptr() % 16 == 0 for t in (q, q_rope, pages_kv))
        and pages * page < 2**31
    )


def _descriptor(rows: torch.Tensor, width: int) -> TensorDescriptor:
    """Tiles of `width` columns of `rows`."""
    block = [TILE, width]
    kind = gl.bfloat16 if rows.dtype == torch.bfloat16 else gl.float16
    layout = gl.NVMMASharedLayout.get_default_for(block, kind)
    return TensorDescriptor.from_tensor(rows, block, layout)


def launch(
    q: torch.Tensor,
    q_rope: torch.Tensor,
    pages_kv: torch.Tensor,
    pages: torch.Tensor,
    shares: TaskMap,
    space: Workspace,
    scale: float,
    out: torch.Tensor,
    lse: torch.Tensor,
) -> None:
    """`decode_mla` up to its `combine`, into `out` and `lse`; what `supports` accepts."""
    rope, rows = q_rope.shape[-1], pages_kv.flatten(0, 2)
    _decode_mla_kernel[(shares.programs,)](
        q, q_rope, _descriptor(rows, LATENT), _descriptor(rows, rope), pages,
        shares.lengths, shares.bounds, out, lse, space.out, space.lse,
        q.shape[0], scale * LOG2_E,
        q.stride(0), q.stride(1), q_rope.stride(0), q_rope.stride(1), pages.stride(0),
        H=q.shape[1], ROPE=rope, PAGE=pages_kv.shape[1], B_PAD=padded_batch(q.shape[0]),
        num_warps=WARPS, launch_pdl=overlapping(),
    )  # fmt: skip
