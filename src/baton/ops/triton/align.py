"""Sorting (token, expert) pairs by expert on the device, each expert padded to whole tiles.

Few pairs: one program per expert counts all pairs (a histogram in shared memory), finds its own
start as the sum of the padded counts before it, and places its own pairs in order, in one launch.
That reads every id once per expert, which at 16K tokens takes longer than it should (405 us with
192 experts on an H200). Many pairs: one launch counts chunks of pairs, at most CHUNKS of them so
that their counts are few; in a second one every program sums those counts itself (`4 CHUNKS E`
bytes, from L2) and places its own chunk. No atomics in global memory either way, and the order is
always the same.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from baton.ops.triton.common import follow, overlapping

#: Pairs from which chunks are counted and placed one by one; the most chunks; pairs that are placed
#: at once, of which a chunk is a whole number; chunks whose counts are read at once.
MANY, CHUNKS, STEP, READ = 4096, 128, 64, 16


@dataclass(frozen=True)
class Alignment:
    """Where pairs went. `pairs` = T * K; position p of tile p // block_m.

    rows: int32 `[positions]`, the pair at each position; `pairs` where padding.
    place: int32 `[pairs]`, the inverse.
    experts: int32 `[blocks]`, each tile's expert; unset behind the last used tile.
    ends: int32 `[E]`, the position behind each expert's last tile.
    taken: int32 `[2, 1]`, zeros: tiles that programs of a GEMM have taken, and of a second one.
    """

    pairs: int
    blocks: int
    rows: torch.Tensor
    place: torch.Tensor
    experts: torch.Tensor
    ends: torch.Tensor
    taken: torch.Tensor


@triton.jit
def _end_expert(
    rows, experts, ends, taken, pairs, block_m, expert, start, count, size, LANES: tl.constexpr,
):  # fmt: skip
    """What is known of an expert once its `count` pairs lie from `start` on: the padding behind
    them, up to `size`, and whose tiles these are."""
    lane = tl.arange(0, LANES)
    tl.store(ends + expert, start + size)
    if expert == 0:
        tl.store(taken + tl.arange(0, 2), tl.zeros([2], tl.int32))
    for begin in range(count, size, LANES):
        rest = begin + lane
        tl.store(rows + start + rest, lane * 0 + pairs, mask=rest < size)
    tiles = size // block_m
    for begin in range(0, tiles, LANES):
        tile = begin + lane
        tl.store(experts + start // block_m + tile, lane * 0 + expert, mask=tile < tiles)


@triton.jit(do_not_specialize=["pairs", "block_m"])
def _align(
    ids, rows, place, experts, ends, taken, pairs, block_m,
    LANES: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    follow()
    expert = tl.program_id(0)
    lane, step = tl.arange(0, LANES), tl.arange(0, CHUNK)
    counts = tl.zeros([LANES], tl.int32)
    for begin in range(0, pairs, CHUNK):
        here = begin + step < pairs
        chosen = tl.load(ids + begin + step, mask=here, other=0).to(tl.int32)
        counts += tl.histogram(chosen, LANES, mask=here)
    padded = (counts + block_m - 1) // block_m * block_m
    start = tl.sum(tl.where(lane < expert, padded, 0))
    count = tl.sum(tl.where(lane == expert, counts, 0))
    size = tl.sum(tl.where(lane == expert, padded, 0))
    seen = start
    for begin in range(0, pairs, CHUNK):
        pair = begin + step
        chosen = tl.load(ids + pair, mask=pair < pairs, other=LANES).to(tl.int32)
        mine = chosen == expert
        one = mine.to(tl.int32)
        position = seen + tl.cumsum(one, 0) - 1
        tl.store(rows + position, pair, mask=mine)
        tl.store(place + pair, position, mask=mine)
        seen += tl.sum(one)
    _end_expert(rows, experts, ends, taken, pairs, block_m, expert, start, count, size, LANES)


@triton.jit(do_not_specialize=["pairs", "chunk_size"])
def _count(
    ids, counts, pairs, chunk_size, LANES: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    follow()
    chunk = tl.program_id(0)
    lane = tl.arange(0, LANES)
    found = tl.zeros([LANES], tl.int32)
    for begin in tl.range(chunk * chunk_size, (chunk + 1) * chunk_size, STEP, num_stages=3):
        pair = begin + tl.arange(0, STEP)
        here = pair < pairs
        chosen = tl.load(ids + pair, mask=here, other=0).to(tl.int32)
        found += tl.histogram(chosen, LANES, mask=here)
    tl.store(counts + chunk * LANES + lane, found)


@triton.jit(do_not_specialize=["pairs", "chunks", "chunk_size", "count", "block_m"])
def _place(
    ids, counts, rows, place, experts, ends, taken, pairs, chunks, chunk_size, count, block_m,
    LANES: tl.constexpr, STEP: tl.constexpr, READ: tl.constexpr,
):  # fmt: skip
    follow()
    chunk = tl.program_id(0)
    lane = tl.arange(0, LANES)
    every = tl.zeros([READ, LANES], tl.int32)
    earlier = tl.zeros([READ, LANES], tl.int32)
    for first in tl.range(0, chunks, READ, num_stages=3):
        other = first + tl.arange(0, READ)[:, None]
        found = tl.load(counts + other * LANES + lane[None, :], mask=other < chunks, other=0)
        every += found
        earlier += tl.where(other < chunk, found, 0)
    total = tl.sum(every, 0)
    padded = (total + block_m - 1) // block_m * block_m
    start = tl.cumsum(padded, 0) - padded
    step = tl.arange(0, STEP)
    upto = start + tl.sum(earlier, 0)
    stop = tl.minimum((chunk + 1) * chunk_size, pairs)
    for begin in tl.range(chunk * chunk_size, stop, STEP, num_stages=2):
        pair = begin + step
        here = pair < pairs
        chosen = tl.load(ids + pair, mask=here, other=0).to(tl.int32)
        same = (chosen[:, None] == chosen[None, :]) & (step[None, :] < step[:, None])
        position = tl.gather(upto, chosen, 0) + tl.sum(same.to(tl.int32), 1)
        tl.store(rows + position, pair, mask=here)
        tl.store(place + pair, position, mask=here)
        upto += tl.histogram(chosen, LANES, mask=here)
    if chunk < count:
        own = lane == chunk
        first = tl.sum(tl.where(own, start, 0))
        have = tl.sum(tl.where(own, total, 0))
        size = tl.sum(tl.where(own, padded, 0))
        _end_expert(rows, experts, ends, taken, pairs, block_m, chunk, first, have, size, LANES)


def align(experts: torch.Tensor, count: int, block_m: int, common: int = 0) -> Alignment:
    """Sort pairs of `experts [T, K]` (ids in `[0, count)`) into tiles of `block_m`. `common`: as in
    `ops.moe.expert_mlp`."""
    pairs, tokens = experts.numel(), experts.shape[0]
    routed = pairs - common * tokens
    # Each expert in use adds less than one tile of padding, and there are at most `routed` tiles;
    # how many the experts have that all tokens visit is known.
    blocks = min(routed, (routed + (count - common) * (block_m - 1)) // block_m)
    blocks += common * triton.cdiv(tokens, block_m)
    sizes = blocks * block_m, pairs, blocks, count, 2
    where = experts.device
    rows, place, tile_experts, ends, taken = (
        torch.empty(size, dtype=torch.int32, device=where) for size in sizes
    )
    lanes = triton.next_power_of_2(count)
    if pairs > MANY:
        size = STEP * triton.cdiv(pairs, STEP * CHUNKS)
        chunks = triton.cdiv(pairs, size)
        counts = torch.empty(chunks, lanes, dtype=torch.int32, device=where)
        _count[(chunks,)](
            experts, counts, pairs, size, LANES=lanes, STEP=STEP, launch_pdl=overlapping()
        )
        _place[(max(chunks, count),)](
            experts, counts, rows, place, tile_experts, ends, taken, pairs, chunks, size, count,
            block_m, LANES=lanes, STEP=STEP, READ=READ, num_warps=8, launch_pdl=overlapping(),
        )  # fmt: skip
    else:
        few = pairs <= 512
        _align[(count,)](
            experts, rows, place, tile_experts, ends, taken, pairs, block_m,
            LANES=lanes, CHUNK=512 if few else 2048, num_warps=4 if few else 8,
            launch_pdl=overlapping(),
        )  # fmt: skip
    return Alignment(pairs, blocks, rows, place, tile_experts, ends, taken.view(2, 1))
