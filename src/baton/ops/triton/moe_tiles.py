"""Tile shapes of the grouped GEMMs, from the mean number of tokens per expert.

Shared memory of a pipeline stage is `(m + weight tiles * n) * k` elements; a Hopper SM has 227 KB.
Decode wants bytes in flight (4.25 TB/s for about 1 us is 32 KB per SM) from two programs per SM,
so that one's start hides behind the other's stream; prefill wants the largest accumulator, 128 x
256 float32, whose operands arrive slower than the tensor core eats them only at small K. On Hopper
`moe_hopper` has that part.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Tiles:
    """Tokens `m`, output columns `n` and inner width `k` of a tile; `swap` puts tokens on the
    narrow side; `group` blocks of rows share weights in L2; `half`: tiles whose tokens fit in half
    of one are computed at half height."""

    m: int
    n: int
    k: int
    swap: bool
    warps: int
    stages: int
    group: int
    half: bool = False


_ANY = float("inf")
#: (most tokens per expert on average, tiles of the gate-up GEMM, tiles of the down GEMM)
TABLE = (
    (8.0, Tiles(16, 64, 128, True, 4, 3, 8), Tiles(16, 128, 128, True, 4, 3, 8)),
    (20.0, Tiles(32, 64, 64, True, 4, 5, 8), Tiles(32, 128, 64, True, 4, 5, 8)),
    (48.0, Tiles(64, 128, 64, True, 8, 4, 8), Tiles(64, 128, 64, True, 4, 4, 8)),
    (_ANY, Tiles(128, 128, 64, False, 8, 4, 8, True), Tiles(128, 256, 64, False, 8, 4, 8, True)),
)


def tiles_for(pairs: int, experts: int, gated: bool, itemsize: int) -> Tiles:
    """Tiles for `pairs` (token, expert) pairs over `experts` experts.

    float32 operands take twice the shared memory and no fast path: smaller tiles.
    """
    for most, first, second in TABLE:
        if pairs <= most * experts:
            tiles = first if gated else second
            break
    if itemsize == 4:
        return Tiles(min(tiles.m, 64), 32, 32, False, 4, 2, tiles.group)
    return tiles
