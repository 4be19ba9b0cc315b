"""The grouped GEMMs of few tokens an expert on Hopper, in Gluon, which lets a kernel say what it
asks of memory when.

They do nothing but read weights: `3 H I` elements an expert that is touched. A program that makes
one tile fills its pipeline anew for each, and the last tiles of all leave most of the card idle.
Here as many programs run as fit the card, each goes over its tiles one after another, and one
thread asks TMA for weights `STAGES - 1` steps ahead of the products, across tiles. The second
GEMM's programs ask for their first weights before they wait for the first GEMM's results: which
experts they multiply with was known before.

Weights are the 64-wide side of wgmma, tokens the narrow one. Sums run over k in ascending order in
float32, 16 elements an instruction, as in `moe._grouped_gemm`: the same bits. Gluon has no
interpreter, so this kernel is compiled in CI and compared on a card.
"""

from __future__ import annotations

from dataclasses import dataclass
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
from baton.ops.triton.moe_tiles import Tiles

_TYPES = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16}


@dataclass(frozen=True)
class Ring:
    """Output columns `n` and inner width `k` of a tile, `stages` of the ring in shared memory,
    `warps` of a program and `residents`, the programs that fit a multiprocessor."""

    n: int
    k: int
    stages: int
    warps: int = 4
    residents: int = 2


#: By tokens `m` of a tile and whether it is of the gate-up GEMM. A stage is
#: `(m + weight tiles * n) * k` elements; a multiprocessor has 228 KB, of which a program takes one
#: beside its own.
RINGS = {
    (16, True): Ring(64, 128, 3),
    (16, False): Ring(128, 128, 3),
    (32, True): Ring(64, 64, 5),
    (32, False): Ring(128, 64, 5),
    (64, True): Ring(128, 64, 5, warps=8, residents=1),
    (64, False): Ring(128, 64, 4),
}


@gluon.jit
def _place(tile, used, COLUMNS: gl.constexpr, GROUP: gl.constexpr):
    """A tile's blocks of rows and of columns: GROUP blocks of rows share weights in L2."""
    start = tile // (GROUP * COLUMNS) * GROUP
    within = tile % (GROUP * COLUMNS)
    height = gl.minimum(used - start, GROUP)
    return start + within % height, within // height


@gluon.jit
def _leader(block, pairs, top_k, routed):
    """A block's first pair and how many it has, where blocks are not aligned."""
    tokens = pairs // top_k
    common = block - tokens * routed
    leader = block // routed * top_k + block % routed
    if common >= 0:
        leader = routed + common
    return leader, gl.where(common < 0, 1, tokens)


@gluon.jit
def _expert(experts, block, pairs, top_k, routed, DIRECT: gl.constexpr):
    at = block
    if DIRECT:
        at, _ = _leader(block, pairs, top_k, routed)
    return gl.load(experts + at, cache_modifier=".cg").to(gl.int32)


@gluon.jit
def _pairs(
    rows, block, lane, pairs, top_k, routed, BM: gl.constexpr, DIRECT: gl.constexpr
):  # fmt: skip
    """The pairs at a block's positions; `pairs` or more where there is none."""
    if DIRECT:
        leader, height = _leader(block, pairs, top_k, routed)
        return gl.where(lane < height, leader + lane * top_k, pairs)
    else:
        return gl.load(rows + block * BM + lane, cache_modifier=".cg")


@gluon.jit
def _turn(
    rows, experts, tile, used, lane, pairs, top_k, routed,
    N: gl.constexpr, BM: gl.constexpr, BN: gl.constexpr, GROUP: gl.constexpr,
    GATED: gl.constexpr, DIRECT: gl.constexpr,
):  # fmt: skip
    """What a tile reads: its first row of weights, its first position, and at its positions the
    rows of x, or -1."""
    block, column = _place(tile, used, (N + BN - 1) // BN, GROUP)
    expert = _expert(experts, block, pairs, top_k, routed, DIRECT)
    weight_row = expert * ((2 if GATED else 1) * N) + column * BN
    row = lane
    if GATED:
        pair = _pairs(rows, block, lane, pairs, top_k, routed, BM, DIRECT).to(gl.int32)
        row = gl.where(pair < pairs, pair // top_k, -1)
    return weight_row, block * BM, row


@gluon.jit
def _ask_weights(
    w, ring, ready, step, weight_row,
    N: gl.constexpr, K: gl.constexpr, BM: gl.constexpr, GATED: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Ask for a step's weights; in the down GEMM its input will come by the same barrier."""
    SIDES: gl.constexpr = 2 if GATED else 1
    BK: gl.constexpr = w.block_shape[1]
    stage, k = step % STAGES, step % gl.cdiv(K, BK) * BK
    bar = ready.index(stage)
    mbarrier.expect(bar, SIDES * w.block_type.nbytes + (0 if GATED else BM * BK * 2))
    for side in gl.static_range(SIDES):
        tma.async_copy_global_to_shared(
            w, [weight_row + side * N, k], bar, ring.index(stage * SIDES + side)
        )


@gluon.jit
def _ask_input(
    x, a, inputs, ready, step, first, row, kk, x_stride,
    K: gl.constexpr, BK: gl.constexpr, GATED: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Ask for a step's input: rows of x by index, or those from position `first` on."""
    stage, k = step % STAGES, step % gl.cdiv(K, BK) * BK
    if GATED:
        source = x + row.to(gl.int64)[:, None] * (x_stride * 8) + (kk + k)[None, :]
        mask = (row >= 0)[:, None] & (kk + k < K)[None, :]
        async_copy.async_copy_global_to_shared(inputs.index(stage), source, mask)
    else:
        tma.async_copy_global_to_shared(a, [first, k], ready.index(stage), inputs.index(stage))


@gluon.jit(do_not_specialize=["pairs", "blocks", "count", "top_k", "routed", "x_stride"])
def _grouped_gemm_hopper(
    x, a, w, out, rows, experts, ends, pairs, blocks, count, top_k, routed, x_stride,
    N: gl.constexpr, K: gl.constexpr,
    BM: gl.constexpr, BN: gl.constexpr, BK: gl.constexpr, GROUP: gl.constexpr,
    GATED: gl.constexpr, DIRECT: gl.constexpr, STAGES: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    """As `moe._grouped_gemm` with SWAP. `x_stride`: in units of 8 elements."""
    dtype: gl.constexpr = w.dtype
    STEPS: gl.constexpr = (K + BK - 1) // BK
    SIDES: gl.constexpr = 2 if GATED else 1
    mma: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, BM, 16])
    flat: gl.constexpr = gl.BlockedLayout([1, 8], [256 // BK, BK // 8], [WARPS, 1], [1, 0])
    lane = gl.arange(0, BM, layout=gl.SliceLayout(1, flat))
    kk = gl.arange(0, BK, layout=gl.SliceLayout(0, flat))
    ring = gl.allocate_shared_memory(dtype, [STAGES * SIDES, BN, BK], w.layout)
    inputs = gl.allocate_shared_memory(
        dtype, [STAGES, BM, BK], gl.NVMMASharedLayout.get_default_for([BM, BK], dtype)
    )
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for s in gl.static_range(STAGES):
        mbarrier.init(ready.index(s), count=1)
    fence_async_shared()
    if GATED:
        gdc_wait()
        gdc_launch_dependents()
    program, programs = gl.program_id(0), gl.num_programs(0)
    used = blocks
    if not DIRECT:
        used = gl.load(ends + count - 1, cache_modifier=".cg") // BM
    tiles = used * gl.cdiv(N, BN)
    steps = gl.cdiv(gl.maximum(tiles - program, 0), programs) * STEPS
    weight_row, first = 0, 0
    row = gl.full([BM], -1, gl.int32, layout=gl.SliceLayout(1, flat))
    for step in range(STAGES - 1):
        if step < steps:
            if step % STEPS == 0:
                weight_row, first, row = _turn(
                    rows, experts, program + step // STEPS * programs, used, lane,
                    pairs, top_k, routed, N, BM, BN, GROUP, GATED, DIRECT,
                )  # fmt: skip
            _ask_weights(w, ring, ready, step, weight_row, N, K, BM, GATED, STAGES)
            if GATED:
                _ask_input(
                    x, a, inputs, ready, step, first, row, kk, x_stride, K, BK, GATED, STAGES
                )
        if GATED:
            async_copy.commit_group()
    if not GATED:
        gdc_wait()
        gdc_launch_dependents()
        for step in range(gl.minimum(steps, STAGES - 1)):
            block, _ = _place(program + step // STEPS * programs, used, gl.cdiv(N, BN), GROUP)
            _ask_input(x, a, inputs, ready, step, block * BM, row, kk, x_stride,
                       K, BK, GATED, STAGES)  # fmt: skip
    step = 0
    for tile in range(program, tiles, programs):
        acc = gl.zeros([BN, BM], gl.float32, layout=mma)
        acc_up = gl.zeros([BN, BM], gl.float32, layout=mma)
        for _ in range(STEPS):
            stage = step % STAGES
            if GATED:
                async_copy.wait_group(STAGES - 2)
                fence_async_shared()
            mbarrier.wait(ready.index(stage), step // STAGES & 1)
            gl.thread_barrier()  # all have their input here, and have read the stage before
            ahead = step + STAGES - 1
            if ahead < steps:
                if ahead % STEPS == 0:
                    weight_row, first, row = _turn(
                        rows, experts, program + ahead // STEPS * programs, used, lane,
                        pairs, top_k, routed, N, BM, BN, GROUP, GATED, DIRECT,
                    )  # fmt: skip
                _ask_weights(w, ring, ready, ahead, weight_row, N, K, BM, GATED, STAGES)
                _ask_input(x, a, inputs, ready, ahead, first, row, kk, x_stride,
                           K, BK, GATED, STAGES)  # fmt: skip
            if GATED:
                async_copy.commit_group()
            tokens = inputs.index(stage).permute((1, 0))
            acc = warpgroup_mma(ring.index(stage * SIDES), tokens, acc, is_async=True)
            if GATED:
                acc_up = warpgroup_mma(ring.index(stage * 2 + 1), tokens, acc_up, is_async=True)
                acc, acc_up = warpgroup_mma_wait(0, [acc, acc_up])
            else:
                acc = warpgroup_mma_wait(0, [acc])
            step += 1
        if GATED:
            acc = acc * (1 / (1 + gl.exp(-acc))) * acc_up
        block, column = _place(tile, used, gl.cdiv(N, BN), GROUP)
        _write(out, acc, rows, block, column * BN, pairs, top_k, routed, N, BM, BN, DIRECT, WARPS)


@gluon.jit
def _write(
    out, acc, rows, block, column, pairs, top_k, routed,
    N: gl.constexpr, BM: gl.constexpr, BN: gl.constexpr, DIRECT: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    """Results `acc [BN, BM]` to a block's positions that have a token, 16 bytes a thread."""
    wide: gl.constexpr = gl.BlockedLayout([8, 1], [BN // 8, 256 // BN], [1, WARPS], [0, 1])
    lane = gl.arange(0, BM, layout=gl.SliceLayout(0, wide))
    col = column + gl.arange(0, BN, layout=gl.SliceLayout(1, wide))
    pair = _pairs(rows, block, lane, pairs, top_k, routed, BM, DIRECT)
    position = (block * BM + lane).to(gl.int64)
    result = gl.convert_layout(acc.to(out.dtype.element_ty), wide)
    target = out + position[None, :] * N + col[:, None]
    gl.store(target, result, mask=(pair < pairs)[None, :] & (col < N)[:, None])


@cache
def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


def _descriptor(matrix: torch.Tensor, rows: int, columns: int) -> TensorDescriptor:
    layout = gl.NVMMASharedLayout.get_default_for([rows, columns], _TYPES[matrix.dtype])
    return TensorDescriptor.from_tensor(matrix, [rows, columns], layout)


def gemm(
    x: torch.Tensor,
    weight: torch.Tensor,
    out: torch.Tensor,
    plan: Alignment,
    tiles: Tiles,
    top_k: int,
    common: int,
    gated: bool,
    direct: bool,
) -> None:
    """Launch the kernel in place of `moe._grouped_gemm` with these tiles, whose `m` counts."""
    experts, rows, inner = weight.shape
    width = rows // 2 if gated else rows
    ring = RINGS[tiles.m, gated]
    w = _descriptor(weight.view(-1, inner), ring.n, ring.k)
    # GATED never reads the second, but every argument needs a value of its type.
    a = w if gated else _descriptor(x, tiles.m, ring.k)
    places = _multiprocessors(x.device) * ring.residents
    _grouped_gemm_hopper[(min(places, plan.blocks * triton.cdiv(width, ring.n)),)](
        x, a, w, out, plan.rows, plan.experts, plan.ends, plan.pairs, plan.blocks,
        experts, top_k, top_k - common, x.stride(0) // 8,
        N=width, K=inner, BM=tiles.m, BN=ring.n, BK=ring.k, GROUP=tiles.group,
        GATED=gated, DIRECT=direct, STAGES=ring.stages, WARPS=ring.warps,
        num_warps=ring.warps, launch_pdl=overlapping(),
    )  # fmt: skip


def takes(x: torch.Tensor, tiles: Tiles) -> bool:
    """Tokens are the narrow side, and rows of x lie in whole 16-byte pieces."""
    return tiles.swap and x.dtype in _TYPES and x.stride(0) % 8 == 0 and x.data_ptr() % 16 == 0
