"""How decode attention is shared out over programs, and how partial results become one.

The work of a step is a line of *units*: sequence by sequence, head block by head block, tile of
tokens by tile of tokens. Each of `C` persistent programs owns `per` consecutive units, so one 64K
sequence among fifteen of 4K costs what its bytes cost and no more (a fixed number of splits per
sequence leaves most programs waiting for the longest). `per` is the fewest units with which C
programs reach the end, or `least`.

Where a program's share crosses into another sequence its pipeline of loads runs empty and starts
again, which costs as much as some tiles. So sequences may start where a program's share does:
each is lengthened to whole shares, with the smallest `per` for which C shares are enough. That is
done when the longest share grows by `slack` units at most; it always does for sequences of one
length, and never for one long one among as many short ones as there are programs.

Only the line is stored: every program finds its own segments, and the combiner finds who wrote
what, by arithmetic:

- program p owns units [p * per, (p + 1) * per);
- it meets at most one segment that began in an earlier program (partial slot 2p) and at most one
  that goes on in the next (slot 2p + 1, or 2p when it is both); all others are complete and go
  straight to the output.

Everything is computed on the device from the positions, once per step, so a captured graph
replays with new lengths. Bytes: `4 (2 B + 2)`; a few microseconds. Whoever reads the line does not
wait for the kernel ahead (see `common.follow`): at least one must lie between, as the projections
of a layer do.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from baton.ops.triton.common import LN_2, follow, overlapping

#: Programs of `combine` that are enough.
COMBINERS = 128


@triton.jit(
    do_not_specialize=["batch", "blocks", "picked", "programs", "least", "slack"],
    do_not_specialize_on_alignment=["positions", "rows"],
)
def _map_kernel(
    positions, rows, lengths, bounds, batch, blocks, picked, programs, least, slack,
    TILE: tl.constexpr, B_PAD: tl.constexpr,
):  # fmt: skip
    b = tl.arange(0, B_PAD)
    row = tl.where(picked != 0, tl.load(rows + b, (b < batch) & (picked != 0), 0), b)
    length = (tl.load(positions + row, b < batch, -1) + 1).to(tl.int32)
    units = tl.cdiv(length, TILE) * blocks
    per = tl.maximum(tl.cdiv(tl.sum(units, 0), programs), least)
    if slack >= 0:
        # The smallest share up to `high` with which whole shares are enough, or `high`.
        low, high = per, per + slack
        while low < high:
            middle = (low + high) // 2
            enough = tl.sum(tl.cdiv(units, middle), 0) <= programs
            low = tl.where(enough, low, middle + 1)
            high = tl.where(enough, middle, high)
        if tl.sum(tl.cdiv(units, low), 0) <= programs:
            per = low
            units = tl.cdiv(units, per) * per
    tl.store(lengths + b, length, b < batch)
    tl.store(bounds + 1 + b, tl.cumsum(units, 0), b < batch)
    tl.store(bounds, 0)
    tl.store(bounds + 1 + batch, per)


@triton.jit
def line(lengths, bounds, batch, B_PAD: tl.constexpr):
    """What a program needs of the line: its own units `[first, stop)`, and of all sequences the
    ends and lengths `[B_PAD]`. All loads at once: where a program starts, nothing else hides
    them."""
    b = tl.arange(0, B_PAD)
    ends = tl.load(bounds + 1 + b, b < batch, 2147483647, cache_modifier=".cg")
    length = tl.load(lengths + b, b < batch, 0, cache_modifier=".cg")
    units = tl.load(bounds + batch, cache_modifier=".cg")
    per = tl.load(bounds + batch + 1, cache_modifier=".cg")
    first = tl.program_id(0) * per
    return first, tl.minimum(first + per, units), ends, length


@triton.jit
def sequence_of(unit, ends, lengths, B_PAD: tl.constexpr):
    """The sequence that holds `unit`, its first unit, the next one's, and its length. Reductions
    over the whole table; a binary search would be a chain of loads."""
    before = ends <= unit
    b = tl.sum(before.to(tl.int32), 0)
    start = tl.max(tl.where(before, ends, 0), 0)
    end = tl.min(tl.where(before, 2147483647, ends), 0)
    length = tl.sum(tl.where(tl.arange(0, B_PAD) == b, lengths, 0), 0)
    return b, start, end, length


@triton.jit
def _slot(start, i):
    """Where piece `i` of a sequence lies: the first one begins it, the others continue it."""
    return start + 2 * i - (i > 0).to(tl.int32)


@triton.jit
def _partials(part, part_lse, start, i, count, here, r, d, R: tl.constexpr, D: tl.constexpr):
    """Pieces `i` of a sequence, `[pieces, heads, columns]` and their log-sum-exps."""
    slot = _slot(start, i)[:, None] * R + r[None, :]
    live = (i < count)[:, None] & here[None, :]
    at = part + slot.to(tl.int64)[:, :, None] * D + d[None, None, :]
    value = tl.load(at, live[:, :, None] & (d < D)[None, None, :], 0.0)
    return value, tl.load(part_lse + slot, live, float("-inf"))


@triton.jit(do_not_specialize=["batch"])
def _combine_kernel(
    part, part_lse, lengths, bounds, out, lse, batch,
    heads: tl.constexpr, BLOCK_HEADS: tl.constexpr, R: tl.constexpr, D: tl.constexpr,
    HEADS: tl.constexpr, COLUMNS: tl.constexpr, PIECES: tl.constexpr, STAGES: tl.constexpr,
    TILE: tl.constexpr, MOST: tl.constexpr,
):  # fmt: skip
    """One program per (sequence, HEADS query heads of one block, block of columns): the
    log-sum-exp weighted mean of the partials (`part [slots, R, D]`, base-2 `part_lse [slots, R]`).
    Leaves what is complete alone. `PIECES` partials are loaded at once and `STAGES` times as many
    are on their way (as asynchronous copies; plain loads would be put one behind the other to save
    registers)."""
    b, head = tl.program_id(0), tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    block = tl.program_id(1) * HEADS // BLOCK_HEADS
    r = head - block * BLOCK_HEADS
    tiles = tl.cdiv(tl.load(lengths + b, cache_modifier=".cg"), TILE)
    per = tl.load(bounds + batch + 1, cache_modifier=".cg")
    first = tl.load(bounds + b, cache_modifier=".cg") + block * tiles
    p0 = first // per
    count = (first + tiles - 1) // per - p0 + 1
    start = 2 * p0 + 1
    follow()
    d = tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)
    row = (b * heads + head).to(tl.int64)
    inside = (head < heads)[:, None] & (d < D)[None, :]
    at_out = out + row[:, None] * D + d[None, :]
    if tiles == 0:
        tl.store(at_out, tl.zeros([HEADS, COLUMNS], out.dtype.element_ty), inside)
        tl.store(lse + row, tl.full([HEADS], float("-inf"), tl.float32), head < heads)
    elif count > 1:
        # The first partials are asked for before anything waits; those behind are only added up.
        i = tl.arange(0, PIECES)
        value, piece = _partials(part, part_lse, start, i, count, head < heads, r, d, R, D)
        n = tl.arange(0, MOST)
        known = (n < count)[:, None] & (head < heads)[None, :]
        at_lse = part_lse + _slot(start, n)[:, None] * R + r[None, :]
        each = tl.load(at_lse, known, float("-inf"))
        top = tl.max(each, 0)
        base = tl.where(top == float("-inf"), 0.0, top)[None, :]
        total = tl.sum(tl.exp2(each - base), 0)
        acc = value * tl.exp2(piece - base)[:, :, None]
        for begin in tl.range(PIECES, count, PIECES, num_stages=STAGES):
            value, piece = _partials(
                part, part_lse, start, begin + i, count, head < heads, r, d, R, D
            )
            acc += value * tl.exp2(piece - base)[:, :, None]
        mean = tl.sum(acc, 0) / total[:, None]
        tl.store(at_out, mean.to(out.dtype.element_ty), inside)
        if tl.program_id(2) == 0:
            tl.store(lse + row, (top + tl.log2(total)) * LN_2, head < heads)


def padded_batch(batch: int) -> int:
    """The table size that kernels are compiled for: few sizes, so few compilations."""
    return max(64, int(triton.next_power_of_2(batch)))


@dataclass(frozen=True)
class Launch:
    """Launch shape of a decode kernel.

    rows: heads of a block, padded as products want them.
    tile: tokens of a tile.
    warps: of a program.
    stages: tiles on their way.
    residents: programs of a multiprocessor, by registers and shared memory.
    least: tiles that are worth a program, at the fewest.
    slack: see `task_map`.
    """

    rows: int
    tile: int
    warps: int
    stages: int
    residents: int
    least: int = 1
    slack: int = -1


@dataclass(frozen=True)
class TaskMap:
    """One step's shares, good for every layer.

    lengths: int32 [B], tokens of each sequence, its newest included.
    bounds: int32 [B + 2], first unit of each sequence; then the number of units, and how many a
        program has.
    tile: tokens of a unit. programs: how many share the units.
    """

    lengths: torch.Tensor
    bounds: torch.Tensor
    tile: int
    programs: int


def task_map(
    positions: torch.Tensor,
    tile: int,
    blocks: int,
    programs: int,
    rows: torch.Tensor | None = None,
    least: int = 1,
    slack: int = -1,
) -> TaskMap:
    """Shares for decode rows whose newest tokens are at `positions` (int64 `[T]`; -1: no tokens).
    One launch, no host sync. Other kernels must come between this and the attention that uses them.

    Args:
        positions: see above.
        tile: tokens of a unit.
        blocks: head blocks of a sequence, each with units of its own.
        programs: how many share the units.
        rows: int64 `[B]`, picks the decode rows; None takes all.
        least: units of a program.
        slack: units that a share may grow by so that each is of one sequence; -1: sequences
            follow one another without a gap.
    """
    batch = positions.shape[0] if rows is None else rows.shape[0]
    lengths = torch.empty(batch, dtype=torch.int32, device=positions.device)
    bounds = torch.empty(batch + 2, dtype=torch.int32, device=positions.device)
    _map_kernel[(1,)](
        positions, positions if rows is None else rows, lengths, bounds, batch, blocks,
        int(rows is not None), programs, least, slack,
        TILE=tile, B_PAD=padded_batch(batch), num_warps=4,
    )  # fmt: skip
    return TaskMap(lengths, bounds, tile, programs)


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
    block_heads: int,
) -> None:
    """Finish `out [B, H, D]` and `lse [B, H]` (natural) where a sequence was split.

    Bytes: the partials once; rows that were not split cost a launch and three loads.
    """
    batch, heads, dim = out.shape
    columns, together, pieces, stages = combine_shape(batch * heads, dim, block_heads)
    _combine_kernel[(batch, triton.cdiv(heads, together), triton.cdiv(dim, columns))](
        space.out, space.lse, shares.lengths, shares.bounds, out, lse, batch,
        heads=heads, BLOCK_HEADS=block_heads, R=space.out.shape[1], D=dim, HEADS=together,
        COLUMNS=columns, PIECES=pieces, STAGES=stages, TILE=shares.tile,
        MOST=triton.next_power_of_2(shares.programs),
        num_warps=4, launch_pdl=overlapping(),
    )  # fmt: skip


def combine_shape(rows: int, dim: int, block_heads: int) -> tuple[int, int, int, int]:
    """Columns and heads of a program of `combine`, partials that it loads at once (32 KB of them,
    so that most sequences need one pass) and pipeline stages. Few rows are cut up until there are
    some programs per multiprocessor; of many, a program takes several heads of a block, up to 8."""
    columns, together = int(triton.next_power_of_2(dim)), 1
    while columns > 64 and rows * triton.cdiv(dim, columns) <= COMBINERS:
        columns //= 2
    while together < 8 and block_heads % (2 * together) == 0 and rows > together * COMBINERS:
        together *= 2
    return columns, together, max(2, 8192 // (columns * together)), 3
