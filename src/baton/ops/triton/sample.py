"""Greedy and temperature-only sampling over the whole vocabulary, rows mixed freely.

Bytes: `4 V` per row, read once, and one block of `4 B` again. Two launches: `_scan` goes over all
logits, `_pick` names one winner per row. The chain in PyTorch reads and writes the row about
fifteen times.

A noisy logit as it is defined costs some 113 instructions (two logarithms to the last bits, a
rounded division, hashes): from a few rows on, those take the time, not the bytes. So `_scan`
reckons with the hardware's logarithms, in 20, and keeps for each block what its winner reaches by
them. `_pick` reckons as defined, but only in blocks that come within a slack of the best: as a
rule that is one.

Same hash, same float32 operations in the same order as `ops.sample`, so the same token, unless
two tokens' noisy values are closer than the last bits of the two logarithms.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from baton.ops.triton.common import INTERPRETED, LN_2, follow, log, log1p, log2, overlapping

_BLOCK = 512  # one warp's: none waits for another
_PROGRAMS = 132 * 32  # of a warp each, that an H200 runs at a time
#: Registers of a thread of `_scan`: left alone, the compiler keeps what is cheap to make again.
REGISTERS = 64
#: Pointers that are aligned for some numbers of rows and not for others.
_SLICED = ["near", "slots"]
_UNIT = tl.constexpr(-(2.0**-31) * (1 - 2.0**-24))
#: `log2` is off by 2**-22 at most between 0.5 and 1, and the rounding of its argument adds a half.
_LOG_ERROR = tl.constexpr(2.0**-21)
#: What a winner may miss the best rough value by: the first for noise that `_rough` gets wrong by
#: up to 2**-9.97, the second, of the value, for roundings.
_SLACK, _SLACK_OF_VALUE = tl.constexpr(2.0**-9), tl.constexpr(2.0**-19)


@triton.jit
def _mix32(x):
    x = (x ^ (x >> 16)) * tl.full([], 0x7FEB352D, tl.uint32)
    x = (x ^ (x >> 15)) * tl.full([], 0x846CA68B, tl.uint32)
    return x ^ (x >> 16)


@triton.jit
def _mix64(x):
    x = (x ^ (x >> 30)) * tl.full([], 0xBF58476D1CE4E5B9, tl.uint64)
    x = (x ^ (x >> 27)) * tl.full([], 0x94D049BB133111EB, tl.uint64)
    return x ^ (x >> 31)


@triton.jit
def _row_key(seed, count):
    """`ops.sample.row_keys` of one row, uint64: its first key is the low half."""
    step = (count + 1).to(tl.uint64, bitcast=True) * tl.full([], 0x9E3779B97F4A7C15, tl.uint64)
    return _mix64(_mix64(seed.to(tl.uint64, bitcast=True)) + step)


@triton.jit
def _hash(key, mixed):
    """The hash of `ops.sample.gumbel`, as a float32 in [0, 2**31], at places whose `_mix32` is
    `mixed`."""
    low, high = key.to(tl.uint32), (key >> 32).to(tl.uint32)
    hashed = _mix32((mixed ^ low) * (high | 1))
    return (hashed & 0x7FFFFFFF).to(tl.int32).to(tl.float32)


@triton.jit
def _gumbel(hashed):
    """`ops.sample.gumbel`, to the bit but for the last ones of two logarithms."""
    return -log(-log1p((hashed + 0.5) * _UNIT))


@triton.jit
def _rough(hashed):
    """`-_gumbel(hashed) / log(2)`, too small by up to 2**-9.97.

    That is `log2(E)` of `E = -log(1 - u)`. The inner logarithm's error is absolute, so it says
    little where u is small; there `u`, which is less than E, takes over.
    """
    u = hashed * -_UNIT + -0.5 * _UNIT
    return log2(tl.maximum(u, log2(1.0 + hashed * _UNIT) * -LN_2 - _LOG_ERROR))


@triton.jit
def _greater(a, b):
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _maximum(x):
    """The greatest of x, NaN if any is (as torch's amax answers)."""
    if INTERPRETED:  # it would take the elements one by one
        return tl.where(tl.max((x != x).to(tl.int32), 0) > 0, float("nan"), tl.max(x, 0))
    return tl.reduce(x, 0, _greater)


@triton.jit
def _divisor(temperature):
    """As `ops.sample.temper` makes it, float32."""
    return tl.maximum(temperature.to(tl.float32), 1e-30)


@triton.jit(do_not_specialize=["rows", "share"], do_not_specialize_on_alignment=_SLICED)
def _scan(
    logits, best, where, near, slots, temperatures, seeds, counts,
    rows, share, stride, temperature_stride, seed_stride,
    V: tl.constexpr, BLOCKS: tl.constexpr, B: tl.constexpr,
):  # fmt: skip
    """Of one block in `share` rows: the greatest logit, and either where it is first (greedy
    rows), or the least of `log2(E) - x / (T log(2))`, roughly: the lowest wins."""
    block = tl.program_id(0)
    index = block * B + tl.arange(0, B)
    mixed = _mix32(index.to(tl.uint32))
    follow()
    first = tl.program_id(1).to(tl.int64) * share
    for row in range(first, tl.minimum(first + share, rows)):
        x = tl.load(logits + row * stride + index, mask=index < V, other=float("-inf"))
        slot = tl.load(slots + row)
        temperature = tl.load(temperatures + slot * temperature_stride)
        seed, count = tl.load(seeds + slot * seed_stride), tl.load(counts + slot)
        maximum = _maximum(x)
        at = row * BLOCKS + block
        tl.store(best + at, maximum)
        if temperature == 0.0:
            tl.store(where + at, tl.min(tl.where(x == maximum, index, V), 0))
        else:
            hashed = _hash(_row_key(seed, count), mixed)
            found = _rough(hashed) - x * (1.0 / (LN_2 * _divisor(temperature)))
            tl.store(near + at, tl.min(found, 0))


@triton.jit
def _draw(
    row_of_logits, maximum, near, key, divisor,
    V: tl.constexpr, BLOCKS: tl.constexpr, LANES: tl.constexpr, B: tl.constexpr,
):  # fmt: skip
    """The token whose noisy logit is the greatest, the first of several; `near` float32 `[LANES]`
    is what `_scan` found in each block."""
    lane = tl.arange(0, LANES)
    least = tl.min(near, 0)
    # "Not greater": where values overflow, the limit may be NaN, and every block counts.
    limit = least + (_SLACK + _SLACK_OF_VALUE * tl.abs(least))
    left = (lane < BLOCKS) & ~(near > limit)
    token, value = 0, float("-inf")
    block = tl.min(tl.where(left, lane, BLOCKS), 0)
    while block < BLOCKS:
        index = block * B + tl.arange(0, B)
        x = tl.load(row_of_logits + index, mask=index < V, other=float("-inf"))
        x = tl.div_rn(x - maximum, tl.full([B], 0.0, tl.float32) + divisor)
        x += _gumbel(_hash(key, _mix32(index.to(tl.uint32))))
        most, at = tl.max(x, 0, return_indices=True, return_indices_tie_break_left=True)
        token = tl.where(most > value, block * B + at, token)
        value = tl.maximum(most, value)
        left &= lane != block
        block = tl.min(tl.where(left, lane, BLOCKS), 0)
    return token


@triton.jit(do_not_specialize_on_alignment=_SLICED)
def _pick(
    logits, best, where, near, slots, temperatures, seeds, counts, tokens, bad,
    stride, temperature_stride, seed_stride,
    V: tl.constexpr, BLOCKS: tl.constexpr, LANES: tl.constexpr, B: tl.constexpr,
):  # fmt: skip
    row, lane = tl.program_id(0).to(tl.int64), tl.arange(0, LANES)
    at = row * BLOCKS + lane
    # None of these comes from the kernel ahead: read while it runs, past L1.
    slot = tl.load(slots + row, cache_modifier=".cg")
    temperature = tl.load(temperatures + slot * temperature_stride, cache_modifier=".cg")
    seed = tl.load(seeds + slot * seed_stride, cache_modifier=".cg")
    key = _row_key(seed, tl.load(counts + slot, cache_modifier=".cg"))
    follow()
    values = tl.load(best + at, mask=lane < BLOCKS, other=float("-inf"))
    rough = tl.load(near + at, mask=lane < BLOCKS, other=float("inf"))  # of greedy rows: anything
    maximum = _maximum(values)
    unusable = (maximum != maximum) | (tl.abs(maximum) == float("inf"))
    token = 0
    if not unusable:
        if temperature == 0.0:
            block = tl.min(tl.where(values == maximum, lane, BLOCKS), 0)
            token = tl.load(where + row * BLOCKS + block)
        else:
            divisor = _divisor(temperature)
            token = _draw(logits + row * stride, maximum, rough, key, divisor, V, BLOCKS, LANES, B)
    tl.store(tokens + row, token)
    tl.store(bad + row, unusable)


def choose(
    logits: torch.Tensor,
    slots: torch.Tensor,
    temperatures: torch.Tensor,
    seeds: torch.Tensor,
    counts: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """One token per row: the argmax at temperature 0, else a draw from softmax(x / temperature).

    Args:
        logits: float32 `[S, V]`, rows contiguous.
        slots: int64 `[S]`, each row's place in the tables that follow.
        temperatures: float64, any stride.
        seeds: int64, any stride.
        counts: int64, tokens generated before, contiguous.

    Returns:
        `(tokens int64 [S], bad bool [S])`; a row whose maximum is not finite is bad and gets 0.
    """
    count, vocab = logits.shape
    blocks, device = triton.cdiv(vocab, _BLOCK), logits.device
    best, near = torch.empty(2, count, blocks, dtype=torch.float32, device=device)
    where = torch.empty(count, blocks, dtype=torch.int32, device=device)
    tokens = torch.empty(count, dtype=torch.int64, device=device)
    bad = torch.empty(count, dtype=torch.bool, device=device)
    if count == 0:
        return tokens, bad
    share = triton.cdiv(count * blocks, _PROGRAMS)
    state = best, where, near, slots, temperatures, seeds, counts
    strides = logits.stride(0), temperatures.stride(0), seeds.stride(0)
    _scan[(blocks, triton.cdiv(count, share))](
        logits, *state, count, share, *strides, V=vocab, BLOCKS=blocks, B=_BLOCK,
        num_warps=1, maxnreg=REGISTERS, launch_pdl=overlapping(),
    )  # fmt: skip
    _pick[(count,)](
        logits, *state, tokens, bad, *strides,
        V=vocab, BLOCKS=blocks, LANES=triton.next_power_of_2(blocks), B=_BLOCK,
        num_warps=4, launch_pdl=overlapping(),
    )  # fmt: skip
    return tokens, bad
