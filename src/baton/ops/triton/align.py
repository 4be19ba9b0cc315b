"""Sorting (token, expert) pairs by expert on the device, each expert padded to whole tiles.

One program per expert counts all pairs (a histogram in shared memory), finds its own start as the
sum of the padded counts before it, and places its own pairs in order: no atomics in global memory,
no second launch, and the order is always the same. Reads `E * T * K` ids from L2: 0.1 ms at
16K tokens, hidden in nothing but under 1% of the GEMMs there; microseconds at decode.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl


@dataclass(frozen=True)
class Alignment:
    """Where pairs went. `pairs` = T * K; position p of tile p // block_m.

    rows: int32 `[positions]`, the pair at each position; `pairs` where padding.
    place: int32 `[pairs]`, the inverse.
    experts: int32 `[blocks]`, each tile's expert; unset behind the last used tile.
    ends: int32 `[E]`, the position behind each expert's last tile.
    """

    pairs: int
    blocks: int
    rows: torch.Tensor
    place: torch.Tensor
    experts: torch.Tensor
    ends: torch.Tensor


@triton.jit
def _align(
    ids, rows, place, experts, ends, pairs,
    E: tl.constexpr, LANES: tl.constexpr, CHUNK: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    expert = tl.program_id(0)
    lane, step = tl.arange(0, LANES), tl.arange(0, CHUNK)
    counts = tl.zeros([LANES], tl.int32)
    for begin in range(0, pairs, CHUNK):
        here = begin + step < pairs
        chosen = tl.load(ids + begin + step, mask=here, other=0).to(tl.int32)
        counts += tl.histogram(chosen, LANES, mask=here)
    padded = (counts + BLOCK_M - 1) // BLOCK_M * BLOCK_M
    start = tl.sum(tl.where(lane < expert, padded, 0))
    count = tl.sum(tl.where(lane == expert, counts, 0))
    size = tl.sum(tl.where(lane == expert, padded, 0))
    tl.store(ends + expert, start + size)
    seen = start
    for begin in range(0, pairs, CHUNK):
        pair = begin + step
        chosen = tl.load(ids + pair, mask=pair < pairs, other=E).to(tl.int32)
        mine = chosen == expert
        one = mine.to(tl.int32)
        position = seen + tl.cumsum(one, 0) - 1
        tl.store(rows + position, pair, mask=mine)
        tl.store(place + pair, position, mask=mine)
        seen += tl.sum(one)
    if BLOCK_M > 1:
        rest = tl.arange(0, BLOCK_M)
        tl.store(rows + start + count + rest, rest * 0 + pairs, mask=rest < size - count)
        tiles = size // BLOCK_M
        for begin in range(0, tiles, LANES):
            mask = begin + lane < tiles
            tl.store(experts + start // BLOCK_M + begin + lane, lane * 0 + expert, mask=mask)


def align(experts: torch.Tensor, count: int, block_m: int, common: int = 0) -> Alignment:
    """Sort pairs of `experts [T, K]` (ids in `[0, count)`) into tiles of `block_m`. `common`: as in
    `ops.moe.expert_mlp`."""
    pairs, tokens = experts.numel(), experts.shape[0]
    routed = pairs - common * tokens
    # Each expert in use adds less than one tile of padding, and there are at most `routed` tiles;
    # how many the experts have that all tokens visit is known.
    blocks = min(routed, (routed + (count - common) * (block_m - 1)) // block_m)
    blocks += common * triton.cdiv(tokens, block_m)
    sizes = blocks * block_m, pairs, blocks, count
    where = experts.device
    rows, place, tile_experts, ends = (
        torch.empty(size, dtype=torch.int32, device=where) for size in sizes
    )
    chunk = min(2048, triton.next_power_of_2(pairs))
    _align[(count,)](
        experts, rows, place, tile_experts, ends, pairs,
        E=count, LANES=triton.next_power_of_2(count), CHUNK=max(chunk, 32), BLOCK_M=block_m,
        num_warps=8 if chunk > 1024 else 4,
    )  # fmt: skip
    return Alignment(pairs, blocks, rows, place, tile_experts, ends)
