"""The grouped GEMMs of many tokens an expert on Hopper, in Gluon, where warps have roles.

Routing is skewed: at 4K tokens a random hy3 layer gives half of its 192 experts fewer than 90
tokens and one of them 1,800. So tiles differ in what they cost, in bytes and in products, and what
counts is that all of them together keep L2, HBM and the tensor cores busy. As many programs run as
there are multiprocessors, and each takes the next tile when it is through with one.

A tile has up to 192 tokens, 64 for each of three warpgroups, whose accumulators fill the
registers: of 128 x 256, the largest that Triton can make, operands are 12 bytes per 1,000 FLOPs, of
192 x 256 9, and L2 gives 6 to 7 TB/s, reckoned from bytes and time. An expert with fewer tokens has
its weights read once. A fourth warpgroup does nothing but ask for operands, up to STAGES steps
ahead and across tiles: weights and the first GEMM's results by TMA, the first GEMM's tokens by
index. A warpgroup whose 64 positions are padding multiplies nothing, and nothing is read for it.

Sums run over k in ascending order in float32, 16 elements an instruction, as in
`moe._grouped_gemm`: the same bits. Gluon has no interpreter, so this kernel is compiled in CI and
compared on a card.
"""

from __future__ import annotations

from functools import cache

import torch
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from baton.ops.triton.align import Alignment
from baton.ops.triton.common import overlapping
from baton.ops.triton.gluon import thread_barrier

#: Tokens of a warpgroup, how many warpgroups multiply, and so the most tokens of a tile.
ROWS, PARTS = 64, 3
TILE = ROWS * PARTS
#: From so many tokens an expert on this kernel takes 0.92 to 1.01 of the other's time (measured).
FROM = 20
#: Columns of a half of the weights and inner width of a step; steps on their way.
COLUMNS, INNER, STAGES = 128, 64, 4
#: Registers of a thread that multiplies, 128 of them accumulators, and of one that fetches; all
#: 512 threads begin with 128. With 152, the next lower number, the assembler spills accumulators.
REGISTERS, FETCHING = 160, 32

_ROWS, _PARTS, _COLUMNS, _INNER, _STAGES = (
    gl.constexpr(n) for n in (ROWS, PARTS, COLUMNS, INNER, STAGES)
)
_REGISTERS, _FETCHING = gl.constexpr(REGISTERS), gl.constexpr(FETCHING)
_TYPES = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16}
#: Tokens come in 16 bytes a thread. Results go out in 8, so that four threads write a whole sector
#: of 32: a product leaves a thread with 4, and pairs of threads exchange half of them.
_IN = gl.constexpr(gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0]))
_ONE = gl.constexpr(gl.BlockedLayout([1], [32], [4], [0]))
_OUT = gl.constexpr(
    gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [8, 0], [0, 16], [0, 32], [0, 64]],
        [[0, 8], [0, 4], [1, 0], [2, 0], [4, 0]],
        [[16, 0], [32, 0]],
        [],
        [ROWS, COLUMNS],
    )
)


@gluon.jit
def _place(tile, experts, ends, columns):
    """A tile's expert, block of rows and block of columns. An expert's tiles follow one another,
    those that share weights first."""
    expert = gl.load(experts + tile // columns)
    start = gl.load(ends + expert - 1, mask=expert > 0, other=0) // (_PARTS * _ROWS)
    height = gl.load(ends + expert) // (_PARTS * _ROWS) - start
    within = tile - start * columns
    return expert, start + within % height, within // height


@gluon.jit
def _fetch_tokens(x, source, here, to, kk, k, K: gl.constexpr):
    """Ask for the tokens of 64 positions by address; where there is none, or K is over, it is 0."""
    inside = (kk + k < K) if K % _INNER else (kk >= 0)
    async_copy.async_copy_global_to_shared(to, x + (source + k), here[:, None] & inside)


@gluon.jit
def _fetch_part(a, first, k, bar, to, live):
    """Ask for 64 rows, and say so by `bar`; if they are padding, say only that."""
    mbarrier.expect(bar, _ROWS * _INNER * 2, pred=live)
    tma.async_copy_global_to_shared(a, [first, k], bar, to, pred=live)
    mbarrier.arrive(bar, count=1, pred=live == 0)


@gluon.jit
def _tell(turns, told, heard, turn, word):
    """Leave what comes next in the `turn`th place for the warpgroups that multiply."""
    at = turn % 2
    mbarrier.wait(heard.index(at), (turn // 2 & 1) ^ 1)
    turns.index(at).store(gl.full([1], word, gl.int32, layout=_ONE))
    thread_barrier()
    mbarrier.arrive(told.index(at), count=1)


@gluon.jit
def _hear(turns, told, heard, turn):
    """What `_tell` left."""
    at = turn % 2
    mbarrier.wait(told.index(at), turn // 2 & 1)
    word = gl.max(turns.index(at).load(_ONE), 0)
    thread_barrier()
    mbarrier.arrive(heard.index(at), count=1)
    return word


@gluon.jit
def _fetch(
    x, a, w, inputs, ring, ready, free, turns, told, heard, rows, experts, ends, taken, used,
    pairs, top_k, x_stride, N: gl.constexpr, K: gl.constexpr, GATED: gl.constexpr,
):  # fmt: skip
    """Take tiles, and ask for their operands a step at a time."""
    WIDTH: gl.constexpr = _COLUMNS if GATED else 2 * _COLUMNS
    HALF: gl.constexpr = N if GATED else _COLUMNS
    lane = gl.arange(0, _ROWS, layout=gl.SliceLayout(1, _IN))
    kk = gl.arange(0, _INNER, layout=gl.SliceLayout(0, _IN))[None, :]
    columns: gl.constexpr = (N + WIDTH - 1) // WIDTH
    step, turn = 0, 0
    tile = gl.program_id(0)
    while tile < used * columns:
        expert, block, column = _place(tile, experts, ends, columns)
        weight_row = expert * (2 * N if GATED else N) + column * WIDTH
        first = block * (_PARTS * _ROWS)
        live1 = gl.load(rows + first + _ROWS) < pairs
        live2 = gl.load(rows + first + 2 * _ROWS) < pairs
        if GATED:
            pair0 = gl.load(rows + first + lane)
            pair1 = gl.load(rows + first + _ROWS + lane)
            pair2 = gl.load(rows + first + 2 * _ROWS + lane)
            here0, here1, here2 = pair0 < pairs, pair1 < pairs, pair2 < pairs
            from0 = (pair0 // top_k)[:, None] * (x_stride * 8) + kk
            from1 = (pair1 // top_k)[:, None] * (x_stride * 8) + kk
            from2 = (pair2 // top_k)[:, None] * (x_stride * 8) + kk
        parts = 1 + live1.to(gl.int32) + live2.to(gl.int32)
        _tell(turns, told, heard, turn, (block * columns + column) * 4 + parts)
        turn += 1
        tile = gl.num_programs(0) + gl.atomic_add(taken, 1)
        for k in range(0, K, _INNER):
            stage = step % _STAGES
            bar, to = ready.index(stage), stage * _PARTS
            mbarrier.wait(free.index(stage), (step // _STAGES & 1) ^ 1)
            thread_barrier()
            if GATED:
                mbarrier.expect(bar, 2 * _COLUMNS * _INNER * 2)
            else:
                mbarrier.expect(bar, (2 * _COLUMNS + _ROWS) * _INNER * 2)
            one, two = ring.index(stage * 2), ring.index(stage * 2 + 1)
            tma.async_copy_global_to_shared(w, [weight_row, k], bar, one)
            tma.async_copy_global_to_shared(w, [weight_row + HALF, k], bar, two)
            if GATED:
                _fetch_tokens(x, from0, here0, inputs.index(to), kk, k, K)
                _fetch_tokens(x, from1, here1, inputs.index(to + 1), kk, k, K)
                _fetch_tokens(x, from2, here2, inputs.index(to + 2), kk, k, K)
                async_copy.mbarrier_arrive(bar, increment_count=False)
            else:
                tma.async_copy_global_to_shared(a, [first, k], bar, inputs.index(to))
                _fetch_part(a, first + _ROWS, k, bar, inputs.index(to + 1), live1)
                _fetch_part(a, first + 2 * _ROWS, k, bar, inputs.index(to + 2), live2)
            step += 1
    _tell(turns, told, heard, turn, -1)


@gluon.jit
def _multiply(
    out, inputs, ring, ready, free, turns, told, heard, rows, pairs, PART: gl.constexpr,
    N: gl.constexpr, K: gl.constexpr, GATED: gl.constexpr,
):  # fmt: skip
    """The products of part PART of all of this program's tiles."""
    mma: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, _COLUMNS, 16])
    WIDTH: gl.constexpr = _COLUMNS if GATED else 2 * _COLUMNS
    columns: gl.constexpr = (N + WIDTH - 1) // WIDTH
    lane = gl.arange(0, _ROWS, layout=gl.SliceLayout(1, _OUT))
    step, turn = 0, 0
    word = _hear(turns, told, heard, turn)
    while word >= 0:
        if word % 4 > PART:
            column = word // 4 % columns * WIDTH
            first = (word // 4 // columns * _PARTS + PART) * _ROWS
            here = gl.load(rows + first + lane) < pairs
            acc = gl.zeros([_ROWS, _COLUMNS], gl.float32, layout=mma)
            more = gl.zeros([_ROWS, _COLUMNS], gl.float32, layout=mma)
            for k in range(0, K, _INNER):
                stage = step % _STAGES
                mbarrier.wait(ready.index(stage), step // _STAGES & 1)
                if GATED:
                    fence_async_shared()  # tokens came by ordinary copies
                tokens = inputs.index(stage * _PARTS + PART)
                one, two = ring.index(stage * 2), ring.index(stage * 2 + 1)
                acc = warpgroup_mma(tokens, one.permute((1, 0)), acc, is_async=True)
                more = warpgroup_mma(tokens, two.permute((1, 0)), more, is_async=True)
                # The step before is done with its operands; this one is on its way.
                acc, more = warpgroup_mma_wait(2, [acc, more])
                thread_barrier()
                mbarrier.arrive(free.index((step + _STAGES - 1) % _STAGES), count=1, pred=k > 0)
                step += 1
            acc, more = warpgroup_mma_wait(0, [acc, more])
            thread_barrier()
            mbarrier.arrive(free.index((step + _STAGES - 1) % _STAGES), count=1)
            target = out + (first + lane).to(gl.int64)[:, None] * N
            if GATED:
                acc = acc * (1 / (1 + gl.exp(-acc))) * more
            else:
                _write(target, more, here, column + _COLUMNS, N)
            _write(target, acc, here, column, N)
        else:
            for _ in range(0, K, _INNER):
                stage = step % _STAGES
                mbarrier.wait(ready.index(stage), step // _STAGES & 1)
                thread_barrier()
                mbarrier.arrive(free.index(stage), count=1)
                step += 1
        turn += 1
        word = _hear(turns, told, heard, turn)


@gluon.jit
def _write(target, acc, here, column, N: gl.constexpr):
    """Results `[ROWS, COLUMNS]` to the rows `target` that are `here`, from `column` on."""
    col = column + gl.arange(0, _COLUMNS, layout=gl.SliceLayout(0, _OUT))[None, :]
    result = gl.convert_layout(acc.to(target.dtype.element_ty), _OUT)
    gl.store(target + col, result, mask=here[:, None] & (col < N))


@gluon.jit(do_not_specialize=["pairs", "count", "top_k", "x_stride"])
def _grouped_gemm_hopper(
    x, a, w, out, rows, experts, ends, taken, pairs, count, top_k, x_stride,
    N: gl.constexpr, K: gl.constexpr, GATED: gl.constexpr,
):  # fmt: skip
    """As `moe._grouped_gemm`. `x_stride`: in units of 8 elements. `taken`: how many tiles
    were taken beside each program's first, 0 as yet."""
    dtype: gl.constexpr = w.dtype
    inputs = gl.allocate_shared_memory(dtype, [_STAGES * _PARTS, _ROWS, _INNER], a.layout)
    ring = gl.allocate_shared_memory(dtype, [_STAGES * 2, _COLUMNS, _INNER], w.layout)
    # ready: a step's operands are there; free: all have multiplied with them. told, heard: likewise
    # of what tile comes next, which lies in `turns`.
    ready = gl.allocate_shared_memory(gl.int64, [_STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [_STAGES, 1], mbarrier.MBarrierLayout())
    turns = gl.allocate_shared_memory(gl.int32, [2, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    told = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    heard = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for s in gl.static_range(_STAGES):
        # One arrival tells how many bytes are on their way; each fetching thread makes one more
        # when its own copies are there.
        mbarrier.init(ready.index(s), count=129 if GATED else _PARTS)
        mbarrier.init(free.index(s), count=_PARTS)
    for s in gl.static_range(2):
        mbarrier.init(told.index(s), count=1)
        mbarrier.init(heard.index(s), count=_PARTS)
    fence_async_shared()
    gdc_wait()
    gdc_launch_dependents()
    used = gl.load(ends + count - 1, cache_modifier=".cg") // (_PARTS * _ROWS)
    gl.warp_specialize(
        [
            (_multiply, (out, inputs, ring, ready, free, turns, told, heard, rows, pairs,
                         gl.constexpr(0), N, K, GATED)),
            (_multiply, (out, inputs, ring, ready, free, turns, told, heard, rows, pairs,
                         gl.constexpr(1), N, K, GATED)),
            (_multiply, (out, inputs, ring, ready, free, turns, told, heard, rows, pairs,
                         gl.constexpr(2), N, K, GATED)),
            (_fetch, (x, a, w, inputs, ring, ready, free, turns, told, heard, rows, experts,
                      ends, taken, used, pairs, top_k, x_stride, N, K, GATED)),
        ],
        [4, 4, 4],
        [_REGISTERS, _REGISTERS, _FETCHING],
    )  # fmt: skip


@cache
def _is_hopper() -> bool:
    """Whether there are the instructions of warpgroups, which later cards do not have either."""
    return torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9


@cache
def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


def _descriptor(matrix: torch.Tensor, rows: int) -> TensorDescriptor:
    block = [rows, INNER]
    layout = gl.NVMMASharedLayout.get_default_for(block, _TYPES[matrix.dtype])
    return TensorDescriptor.from_tensor(matrix, block, layout)


def supports(x: torch.Tensor, experts: int, top_k: int) -> bool:
    """Whether the experts' mean share of tokens `x` `[T, H]`, each of which visits `top_k` of them,
    is large enough, and this kernel can read them."""
    return (
        _is_hopper()
        and x.shape[0] * top_k > FROM * experts
        and x.is_cuda
        and x.dtype in _TYPES
        and x.stride(1) == 1
        and x.stride(0) % 8 == 0
        and x.data_ptr() % 16 == 0
        and x.shape[0] * x.stride(0) < 2**31
    )


def gemm(
    x: torch.Tensor,
    weight: torch.Tensor,
    out: torch.Tensor,
    plan: Alignment,
    top_k: int,
    gated: bool,
) -> None:
    """`moe._grouped_gemm` with `plan`'s tiles of TILE positions; one dtype, of 16 bits.

    Args:
        x: `[T, K]`, what `supports` accepts; not `gated`: `[positions, K]`, contiguous.
        weight: `[E, 2N, K]`, gate rows first; not `gated`: `[E, N, K]`. Contiguous.
        out: `[positions, N]`, written where a position has a pair.
        plan: serves one `gated` GEMM and one other: each counts its tiles in `plan.taken`.
        top_k: pairs of a token.
    """
    experts, rows, inner = weight.shape
    width = rows // 2 if gated else rows
    w = _descriptor(weight.view(-1, inner), COLUMNS)
    # Gated tokens are read by index, but a descriptor's blocks say how they lie in shared memory.
    a = _descriptor(x, ROWS)
    tiles = plan.blocks * triton.cdiv(width, COLUMNS if gated else 2 * COLUMNS)
    _grouped_gemm_hopper[(min(_multiprocessors(x.device), tiles),)](
        x, a, w, out, plan.rows, plan.experts, plan.ends, plan.taken[0 if gated else 1],
        plan.pairs, experts, top_k, x.stride(0) // 8, N=width, K=inner, GATED=gated,
        num_warps=4, launch_pdl=overlapping(),
    )  # fmt: skip
