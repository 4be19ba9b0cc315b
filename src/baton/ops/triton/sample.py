"""Greedy and temperature-only sampling over the whole vocabulary, rows mixed freely.

Bytes: `4 V` per greedy row; a random row is read a second time, from L2 (a step's logits fit). Up
to three launches: maxima of vocabulary blocks; noisy maxima of the random rows, which need the
row's maximum first because the reference subtracts it before dividing; one winner per row. The
chain in PyTorch reads and writes the row about fifteen times.

Same hash, same float32 operations in the same order as `ops.sample`, so the same token, unless
two tokens' noisy values are closer than the last bits of the two logarithms.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from baton.ops.triton.common import follow, log, log1p, overlapping

_BLOCK = 2048
#: Pointers that are aligned for some numbers of rows and not for others.
_SLICED = ["noisy", "where", "noisy_at", "slots"]
_UNIT = tl.constexpr(-(2.0**-31) * (1 - 2.0**-24))


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
def _gumbel(seed, count, index):
    """`ops.sample.gumbel` of `row_keys(seed, count)` at `index`."""
    step = (count + 1).to(tl.uint64, bitcast=True) * tl.full([], 0x9E3779B97F4A7C15, tl.uint64)
    key = _mix64(_mix64(seed.to(tl.uint64, bitcast=True)) + step)
    low, high = key.to(tl.uint32), (key >> 32).to(tl.uint32)
    hashed = _mix32((_mix32(index.to(tl.uint32)) ^ low) * (high | 1))
    u = ((hashed & 0x7FFFFFFF).to(tl.int32).to(tl.float32) + 0.5) * _UNIT
    return -log(-log1p(u))


@triton.jit
def _maxima(logits, best, where, stride, V: tl.constexpr, BLOCKS: tl.constexpr, B: tl.constexpr):
    row, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    index = block * B + tl.arange(0, B)
    follow()
    x = tl.load(logits + row * stride + index, mask=index < V, other=float("-inf"))
    value, at = tl.max(x, 0, return_indices=True, return_indices_tie_break_left=True)
    unreal = tl.max((x != x).to(tl.int32), 0)
    value = tl.where(unreal > 0, float("nan"), value)  # as torch's amax answers
    tl.store(best + row * BLOCKS + block, value)
    tl.store(where + row * BLOCKS + block, block * B + at)


@triton.jit
def _row_maximum(best, row, BLOCKS: tl.constexpr, LANES: tl.constexpr):
    """The maximum over a row's blocks, NaN if any is, and its block."""
    lane = tl.arange(0, LANES)
    values = tl.load(best + row * BLOCKS + lane, mask=lane < BLOCKS, other=float("-inf"))
    value, at = tl.max(values, 0, return_indices=True, return_indices_tie_break_left=True)
    unreal = tl.max((values != values).to(tl.int32), 0)
    return tl.where(unreal > 0, float("nan"), value), at


@triton.jit(do_not_specialize_on_alignment=_SLICED)
def _noisy(
    logits, best, noisy, where, slots, temperatures, seeds, counts,
    stride, temperature_stride, seed_stride,
    V: tl.constexpr, BLOCKS: tl.constexpr, LANES: tl.constexpr, B: tl.constexpr,
):  # fmt: skip
    row, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    follow()
    slot = tl.load(slots + row)
    temperature = tl.load(temperatures + slot * temperature_stride).to(tl.float32)
    if temperature == 0.0:
        return
    maximum, _ = _row_maximum(best, row, BLOCKS, LANES)
    index = block * B + tl.arange(0, B)
    x = tl.load(logits + row * stride + index, mask=index < V, other=float("-inf"))
    x = tl.div_rn(x - maximum, tl.full([B], 0.0, tl.float32) + tl.maximum(temperature, 1e-30))
    x += _gumbel(tl.load(seeds + slot * seed_stride), tl.load(counts + slot), index)
    value, at = tl.max(x, 0, return_indices=True, return_indices_tie_break_left=True)
    tl.store(noisy + row * BLOCKS + block, value)
    tl.store(where + row * BLOCKS + block, block * B + at)


@triton.jit(do_not_specialize_on_alignment=_SLICED)
def _pick(
    best, best_at, noisy, noisy_at, slots, temperatures, temperature_stride, tokens, bad,
    BLOCKS: tl.constexpr, LANES: tl.constexpr, RANDOM: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    follow()
    maximum, block = _row_maximum(best, row, BLOCKS, LANES)
    token = tl.load(best_at + row * BLOCKS + block)
    if RANDOM:
        slot = tl.load(slots + row)
        if tl.load(temperatures + slot * temperature_stride) != 0.0:
            _, block = _row_maximum(noisy, row, BLOCKS, LANES)
            token = tl.load(noisy_at + row * BLOCKS + block)
    unusable = (maximum != maximum) | (tl.abs(maximum) == float("inf"))
    tl.store(tokens + row, tl.where(unusable, 0, token).to(tl.int64))
    tl.store(bad + row, unusable)


def choose(
    logits: torch.Tensor,
    slots: torch.Tensor,
    temperatures: torch.Tensor,
    seeds: torch.Tensor,
    counts: torch.Tensor,
    any_random: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """One token per row: the argmax at temperature 0, else a draw from softmax(x / temperature).

    Args:
        logits: float32 `[S, V]`, rows contiguous.
        slots: int64 `[S]`, each row's place in the tables that follow.
        temperatures: float64, any stride.
        seeds: int64, any stride.
        counts: int64, tokens generated before, contiguous.
        any_random: whether any row's temperature is not 0.

    Returns:
        `(tokens int64 [S], bad bool [S])`; a row whose maximum is not finite is bad and gets 0.
    """
    count, vocab = logits.shape
    blocks = triton.cdiv(vocab, _BLOCK)
    lanes = triton.next_power_of_2(blocks)
    device = logits.device
    best, noisy = torch.empty(2, count, blocks, dtype=torch.float32, device=device)
    best_at, noisy_at = torch.empty(2, count, blocks, dtype=torch.int32, device=device)
    tokens = torch.empty(count, dtype=torch.int64, device=device)
    bad = torch.empty(count, dtype=torch.bool, device=device)
    if count == 0:
        return tokens, bad
    grid = count, blocks
    _maxima[grid](
        logits, best, best_at, logits.stride(0), V=vocab, BLOCKS=blocks, B=_BLOCK, num_warps=4,
        launch_pdl=overlapping(),
    )  # fmt: skip
    if any_random:
        _noisy[grid](
            logits, best, noisy, noisy_at, slots, temperatures, seeds, counts,
            logits.stride(0), temperatures.stride(0), seeds.stride(0),
            V=vocab, BLOCKS=blocks, LANES=lanes, B=_BLOCK, num_warps=4, launch_pdl=overlapping(),
        )  # fmt: skip
    _pick[(count,)](
        best, best_at, noisy, noisy_at, slots, temperatures, temperatures.stride(0), tokens, bad,
        BLOCKS=blocks, LANES=lanes, RANDOM=any_random, num_warps=1,
        launch_pdl=overlapping(),
    )  # fmt: skip
    return tokens, bad
