"""Routed experts: align, gate-up GEMM with SiLU, down GEMM; what they make, `combine` adds up.

FLOPs: `6 T K H I`. Bytes at decode: the weights of the experts touched, `3 H I` elements each,
and little beside. Tokens are sorted by expert on the device and each expert's share is padded to
whole tiles, so a tile has one expert. The first GEMM reads tokens by index (no gathered copy) and
computes gate and up tiles in one program, so that SiLU(gate) * up happens in registers. The
second writes one row per (token, expert), and the sum over a token's experts runs in the order
that the router gave, in float32, without atomics: a token's result does not depend on how
the others were routed.

With few tokens per expert the weights are the 64-wide side of the tensor core instruction and
tokens the narrow side (operands swapped), so tiles of 16 tokens waste nothing but registers.
Weights come through TMA, several tiles ahead.

Experts that every token visits (`common`) are further tiles of the same launches: alone they
would fill few SMs with a decode step's tokens, and wait for one another.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from baton.ops.triton import moe_hopper
from baton.ops.triton.align import Alignment, align
from baton.ops.triton.combine import Products
from baton.ops.triton.common import dot, follow, overlapping
from baton.ops.triton.moe_tiles import Tiles, tiles_for

#: Up to this many (token, routed expert) pairs each gets a tile of its own: no alignment launch,
#: and the weights of an expert chosen twice come from L2 the second time.
DIRECT_PAIRS = 32


@triton.jit
def _tile(
    x, a, w, out, pair, pairs, top_k, first, weight_row, column, x_stride,
    M: tl.constexpr, N: tl.constexpr, K: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    GATED: tl.constexpr, SWAP: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """`M` rows from position `first` on, of the pairs `pair [M]`. WHOLE: as many as `a`'s block
    has; fewer are read by address."""
    lane, kk = tl.arange(0, M), tl.arange(0, BK)
    valid = pair < pairs
    position = (first + lane).to(tl.int64)
    if SWAP:
        acc = tl.zeros([BN, M], tl.float32)
        acc_up = tl.zeros([BN, M], tl.float32)
    else:
        acc = tl.zeros([M, BN], tl.float32)
        acc_up = tl.zeros([M, BN], tl.float32)
    row = tl.where(valid, pair // top_k, 0).to(tl.int64) if GATED else position
    source = x + row[:, None] * x_stride + kk[None, :]
    for k in range(0, K, BK):
        if WHOLE and not GATED:
            tile = a.load([first, k])
        elif K % BK == 0:
            tile = tl.load(source + k, mask=valid[:, None], other=0.0)
        else:
            tile = tl.load(source + k, mask=valid[:, None] & (kk + k < K)[None, :], other=0.0)
        weight = w.load([weight_row, k])
        if SWAP:
            acc = dot(weight, tile.T, acc)
        else:
            acc = dot(tile, weight.T, acc)
        if GATED:
            weight_up = w.load([weight_row + N, k])
            if SWAP:
                acc_up = dot(weight_up, tile.T, acc_up)
            else:
                acc_up = dot(tile, weight_up.T, acc_up)
    if GATED:
        acc = acc * tl.sigmoid(acc) * acc_up
    result = acc.to(out.dtype.element_ty)
    if SWAP:
        result = result.T
    col = column + tl.arange(0, BN)
    target = out + position[:, None] * N + col[None, :]
    tl.store(target, result, mask=valid[:, None] & (col < N)[None, :])


@triton.jit(do_not_specialize=["pairs", "blocks", "count", "top_k", "routed"])
def _grouped_gemm(
    x, a, w, out, rows, experts, ends, pairs, blocks, count, top_k, routed, x_stride,
    N: tl.constexpr, K: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr,
    GATED: tl.constexpr, SWAP: tl.constexpr, DIRECT: tl.constexpr, HALF: tl.constexpr,
):  # fmt: skip
    """`out[p] = f(W[expert of p] in[p])` for positions p of BM-row tiles, one expert a tile.

    GATED: `in` is x read by token index, W is `[E, 2N, K]`, f is SiLU times. Otherwise `in` is x
    read by position, by `a`, a descriptor of it with blocks `[BM, BK]`, and W is `[E, N, K]`. `w`
    is a descriptor with blocks `[BN, BK]`. DIRECT: a tile for each of a token's first `routed`
    pairs, then one with all tokens for each of the experts behind those. HALF: an expert's last
    tile is computed at half height where that holds its pairs.
    """
    pid = tl.program_id(0)
    # Tiles of GROUP consecutive blocks of rows run together: they share weights in L2.
    per_group = GROUP * tl.cdiv(N, BN)
    start = pid // per_group * GROUP
    height = tl.minimum(blocks - start, GROUP)
    block = start + pid % per_group % height
    column = pid % per_group // height * BN
    lane, first = tl.arange(0, BM), block * BM
    if GATED:
        follow()  # else who is where was known when the kernel ahead, the first GEMM, began
    if DIRECT:
        tokens = pairs // top_k
        common = block - tokens * routed
        leader = block // routed * top_k + block % routed
        leader = tl.where(common < 0, leader, routed + common)
        expert = tl.load(experts + leader, cache_modifier=".cg").to(tl.int32)
        pair = tl.where(lane < tl.where(common < 0, 1, tokens), leader + lane * top_k, pairs)
    else:
        if first >= tl.load(ends + count - 1, cache_modifier=".cg"):
            return
        expert = tl.load(experts + block, cache_modifier=".cg")
        pair = tl.load(rows + first + lane, cache_modifier=".cg")
    weight_row = expert * ((2 if GATED else 1) * N) + column
    if not GATED:
        follow()
    if HALF and tl.load(rows + first + BM // 2) >= pairs:
        some = tl.load(rows + first + tl.arange(0, BM // 2))
        _tile(x, a, w, out, some, pairs, top_k, first, weight_row, column, x_stride,
              BM // 2, N, K, BN, BK, GATED, SWAP, False)  # fmt: skip
    else:
        _tile(x, a, w, out, pair, pairs, top_k, first, weight_row, column, x_stride,
              BM, N, K, BN, BK, GATED, SWAP, True)  # fmt: skip


def _gemm(
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
    experts, rows, inner = weight.shape
    width = rows // 2 if gated else rows
    w = TensorDescriptor.from_tensor(weight.view(-1, inner), [tiles.n, tiles.k])
    # GATED never reads the second, but every argument needs a value of its type.
    a = w if gated else TensorDescriptor.from_tensor(x, [tiles.m, tiles.k])
    _grouped_gemm[(plan.blocks * triton.cdiv(width, tiles.n),)](
        x, a, w, out, plan.rows, plan.experts, plan.ends, plan.pairs, plan.blocks,
        experts, top_k, top_k - common, x.stride(0),
        N=width, K=inner, BM=tiles.m, BN=tiles.n, BK=tiles.k, GROUP=tiles.group,
        GATED=gated, SWAP=tiles.swap, DIRECT=direct, HALF=tiles.half,
        num_warps=tiles.warps, num_stages=tiles.stages, launch_pdl=overlapping(),
    )  # fmt: skip


def supported(x: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor) -> bool:
    """TMA wants rows of whole 16-byte pieces, contiguous."""
    size = x.dtype.itemsize
    return (
        gate_up.is_contiguous()
        and down.is_contiguous()
        and (x.shape[1] * size) % 16 == 0
        and (down.shape[2] * size) % 16 == 0
    )


def products(
    x: torch.Tensor,
    experts: torch.Tensor,
    weights: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    shared: torch.Tensor | None = None,
    common: int = 0,
) -> Products:
    """See `ops.moe.expert_mlp`, whose sum is left; one dtype for x and the weights."""
    tokens, top_k = experts.shape
    count, hidden, inner = down.shape
    if tokens == 0:
        return Products(x.new_empty(0, hidden), weights, experts, shared)
    x = x if x.stride(1) == 1 else x.contiguous()
    experts, weights = experts.contiguous(), weights.contiguous()
    routed = tokens * (top_k - common)
    first, second = (
        tiles_for(routed, count - common, gated, x.dtype.itemsize) for gated in (True, False)
    )
    direct = routed <= DIRECT_PAIRS and tokens <= first.m
    tall = not direct and moe_hopper.supports(x, count - common, top_k - common)
    block = moe_hopper.TILE if tall else first.m
    if direct:
        flat = experts.view(-1)
        plan = Alignment(tokens * top_k, routed + common, flat, flat, flat, flat, flat)
    else:
        plan = align(experts, count, block, common)
    middle = torch.empty(plan.blocks * block, inner, dtype=x.dtype, device=x.device)
    y = torch.empty(plan.blocks * block, hidden, dtype=x.dtype, device=x.device)
    if tall:
        moe_hopper.gemm(x, gate_up, middle, plan, top_k, gated=True)
        moe_hopper.gemm(middle, down, y, plan, top_k, gated=False)
    else:
        _gemm(x, gate_up, middle, plan, first, top_k, common, gated=True, direct=direct)
        _gemm(middle, down, y, plan, second, top_k, common, gated=False, direct=direct)
    return Products(y, weights, plan.place, shared, block if direct else 0, common)
