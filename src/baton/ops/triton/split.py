"""How decode attention is shared out over programs, and how partial results become one.

The work of a step is a line of *units*: sequence by sequence, head block by head block, tile of
tokens by tile of tokens. `C` persistent programs own `ceil(units / C)` consecutive units each,
so one 64K sequence among fifteen of 4K costs what its bytes cost and no more (a fixed number of
splits per sequence leaves most programs waiting for the longest). Only `bounds` is stored: every
program finds its own segments, and the combiner finds who wrote what, by arithmetic:

- program p owns units [p * per, (p + 1) * per), per = max(ceil(units / C), least): with a
  `least` of more than one, a short line goes to fewer programs;
- it meets at most one segment that began in an earlier program (partial slot 2p) and at most one
  that goes on in the next (slot 2p + 1, or 2p when it is both); all others are complete and go
  straight to the output.

Everything is computed on the device from the positions, once per step, so a captured graph
replays with new lengths. Bytes: `4 (2 B + 1)`; a microsecond.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

LN2 = 0.6931471805599453


@triton.jit(
    do_not_specialize=["batch", "blocks", "picked"],
    do_not_specialize_on_alignment=["positions", "rows"],
)
def _map_kernel(positions, rows, lengths, bounds, batch, blocks, picked, TILE: tl.constexpr, B_PAD: tl.constexpr):  # fmt: skip # noqa: E501
    b = tl.arange(0, B_PAD)
    row = tl.where(picked != 0, tl.load(rows + b, (b < batch) & (picked != 0), 0), b)
    length = (tl.load(positions + row, b < batch, -1) + 1).to(tl.int32)
    units = tl.cdiv(length, TILE) * blocks
    tl.store(lengths + b, length, b < batch)
    tl.store(bounds + 1 + b, tl.cumsum(units, 0), b < batch)
    tl.store(bounds, 0)


@triton.jit
def share(units, programs, LEAST: tl.constexpr):
    """Consecutive units of one program."""
    return tl.maximum(tl.cdiv(units, programs), LEAST)


@triton.jit
def owned(bounds, batch, LEAST: tl.constexpr):
    """This program's units `[first, last)` of the line."""
    units = tl.load(bounds + batch)
    per = share(units, tl.num_programs(0), LEAST)
    first = tl.program_id(0) * per
    return first, tl.minimum(first + per, units)


@triton.jit
def sequence_of(unit, bounds, batch, B_PAD: tl.constexpr):
    """The sequence that holds `unit`: how many sequences end at or before it. One load of the
    whole (cached) table and one reduction; a binary search would be a chain of loads."""
    b = tl.arange(0, B_PAD)
    ends = tl.load(bounds + 1 + b, b < batch, 2147483647)
    return tl.sum((ends <= unit).to(tl.int32), 0)


@triton.jit
def _slot(start, i, STATIC: tl.constexpr):
    """Where piece `i` of a sequence lies: the first one begins it, the others continue it."""
    if STATIC > 0:
        return start + i
    else:
        return start + 2 * i - (i > 0).to(tl.int32)


@triton.jit(do_not_specialize=["batch", "programs"])
def _combine_kernel(
    part, part_lse, lengths, bounds, out, lse, batch, programs,
    heads: tl.constexpr, BLOCK_HEADS: tl.constexpr, R: tl.constexpr, D: tl.constexpr,
    COLUMNS: tl.constexpr, PIECES: tl.constexpr, STAGES: tl.constexpr, TILE: tl.constexpr,
    LEAST: tl.constexpr, STATIC: tl.constexpr,
):  # fmt: skip
    """One program per (sequence, query head, block of columns): the log-sum-exp weighted mean of
    the partials (`part [slots, R, D]`, base-2 `part_lse [slots, R]`). Leaves what is complete
    alone. `PIECES` partials are loaded at once and `STAGES` times as many are on their way (as
    asynchronous copies; plain loads would be put one behind the other to save registers)."""
    b, head = tl.program_id(0), tl.program_id(1)
    block, r = head // BLOCK_HEADS, head % BLOCK_HEADS
    tiles = tl.cdiv(tl.load(lengths + b), TILE)
    d = tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)
    row = (b * heads + head).to(tl.int64)
    if tiles == 0:
        tl.store(out + row * D + d, tl.zeros([COLUMNS], out.dtype.element_ty), d < D)
        tl.store(lse + row, float("-inf"))
    else:
        if STATIC > 0:
            count = tl.cdiv(tiles, tl.cdiv(tiles, STATIC))
            start = (b * (heads // BLOCK_HEADS) + block) * STATIC
        else:
            per = share(tl.load(bounds + batch), programs, LEAST)
            first = tl.load(bounds + b) + block * tiles
            p0 = first // per
            count = (first + tiles - 1) // per - p0 + 1
            start = 2 * p0 + 1
        if count > 1 or STATIC > 0:
            top = float("-inf")
            total = 0.0
            acc = tl.zeros([COLUMNS], tl.float32)
            for base in tl.range(0, count, PIECES, num_stages=STAGES):
                i = base + tl.arange(0, PIECES)
                slot = _slot(start, i, STATIC) * R + r
                at = part + slot.to(tl.int64)[:, None] * D + d[None, :]
                value = tl.load(at, (i < count)[:, None] & (d < D)[None, :], 0.0)
                piece = tl.load(part_lse + slot, i < count, float("-inf"))
                new_top = tl.maximum(top, tl.max(piece, 0))
                weight = tl.exp2(piece - new_top)
                old = tl.exp2(top - new_top)
                acc = acc * old + tl.sum(value * weight[:, None], 0)
                total = total * old + tl.sum(weight, 0)
                top = new_top
            tl.store(out + row * D + d, (acc / total).to(out.dtype.element_ty), d < D)
            if tl.program_id(2) == 0:
                tl.store(lse + row, (top + tl.log2(total)) * 0.6931471805599453)


def padded_batch(batch: int) -> int:
    """The table size that kernels are compiled for: few sizes, so few compilations."""
    return max(64, int(triton.next_power_of_2(batch)))


@dataclass(frozen=True)
class TaskMap:
    """One step's shares, good for every layer.

    lengths: int32 [B], tokens of each sequence, its newest included.
    bounds: int32 [B + 1], first unit of each sequence; the last is the number of units.
    tile: tokens of a unit. blocks: head blocks of a sequence.
    least: units of a program, at least.
    """

    lengths: torch.Tensor
    bounds: torch.Tensor
    tile: int
    blocks: int
    least: int


def task_map(
    positions: torch.Tensor,
    tile: int,
    blocks: int,
    rows: torch.Tensor | None = None,
    least: int = 1,
) -> TaskMap:
    """Shares for decode rows whose newest tokens are at `positions` (int64 `[T]`; -1: no tokens).

    `rows` (int64 `[B]`) picks the decode rows, None takes all. One launch, no host sync.
    """
    batch = positions.shape[0] if rows is None else rows.shape[0]
    lengths = torch.empty(batch, dtype=torch.int32, device=positions.device)
    bounds = torch.empty(batch + 1, dtype=torch.int32, device=positions.device)
    _map_kernel[(1,)](
        positions, positions if rows is None else rows, lengths, bounds, batch, blocks,
        int(rows is not None), TILE=tile, B_PAD=padded_batch(batch), num_warps=4,
    )  # fmt: skip
    return TaskMap(lengths, bounds, tile, blocks, least)


@dataclass(frozen=True)
class Workspace:
    """Partial results: `out` float32 `[slots, R, D]`, `lse` float32 `[slots, R]` in base 2."""

    out: torch.Tensor
    lse: torch.Tensor

    @classmethod
    def make(cls, slots: int, rows: int, dim: int, device: torch.device) -> Workspace:
        """Uninitialised memory for `slots` partials of `rows` heads."""
        out = torch.empty(slots, rows, dim, dtype=torch.float32, device=device)
        return cls(out, torch.empty(slots, rows, dtype=torch.float32, device=device))


def combine(
    space: Workspace,
    shares: TaskMap,
    out: torch.Tensor,
    lse: torch.Tensor,
    programs: int,
    block_heads: int,
    static: int,
) -> None:
    """Finish `out [B, H, D]` and `lse [B, H]` (natural) where a sequence was split.

    Bytes: the partials once; rows that were not split cost a launch and three loads.
    """
    batch, heads, dim = out.shape
    columns, pieces, stages = combine_shape(batch * heads, dim)
    _combine_kernel[(batch, heads, triton.cdiv(dim, columns))](
        space.out, space.lse, shares.lengths, shares.bounds, out, lse, batch, programs,
        heads=heads, BLOCK_HEADS=block_heads, R=space.out.shape[1], D=dim,
        COLUMNS=columns, PIECES=pieces, STAGES=stages, TILE=shares.tile, LEAST=shares.least,
        STATIC=static, num_warps=4,
    )  # fmt: skip


def combine_shape(rows: int, dim: int) -> tuple[int, int, int]:
    """Columns of a program of `combine`, partials that it loads at once (8 KB of them) and
    pipeline stages. Few rows are cut up until there are some programs per multiprocessor."""
    columns = int(triton.next_power_of_2(dim))
    while columns > 64 and rows * triton.cdiv(dim, columns) <= 512:
        columns //= 2
    return columns, 2048 // columns, 3
