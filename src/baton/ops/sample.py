"""Choosing one token per row of logits: pure tensor functions, no state, no device-to-host copy.

The order is vLLM's: what changes the logits (`min_tokens`, bias, penalties) comes first and also
binds greedy rows; then temperature, min-p, top-k, top-p; then the draw. A row's result is a
function of that row alone, bit for bit: sums that decide what is kept are integer sums, and noise
is a hash of (seed, tokens generated before, vocabulary index), so neither the rows beside it, nor
the path taken (partial or full sort), nor the rank can change it.

Shapes: S rows, V vocabulary entries, P (row, token) pairs. In sampling functions `x` is float32
`[S, V]`, shifted so that each row's maximum is 0.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from baton.ops.dispatch import on_gpu

NEG_INF = float("-inf")
#: Weights of the nucleus are integers in units of 2**-42 of the likeliest token's probability:
#: 2**21 of them still add up exactly in int64.
_WEIGHT_SCALE = float(2**42)
#: No noise lifts a token this far below the likeliest above it (`gumbel` spans 25.0).
_NOISE_SPAN = 26.0
#: On CPU a nucleus is first sought among this many best tokens.
_NUCLEUS_GUESS = 256


# ---------------------------------------------------------------------------------------- noise


def _shift(x: Tensor, bits: int) -> Tensor:
    """Logical right shift (torch's `>>` carries the sign)."""
    width = 8 * x.element_size()
    return (x >> bits).bitwise_and_((1 << (width - bits)) - 1)


def _mix32(x: Tensor) -> Tensor:
    """Bijective mixing of int32 (C. Wellons, "lowbias32"); multiplication wraps."""
    x = (x ^ _shift(x, 16)).mul_(0x7FEB352D)
    x.bitwise_xor_(_shift(x, 15)).mul_(0x846CA68B - 2**32)
    return x.bitwise_xor_(_shift(x, 16))


def _mix64(x: Tensor) -> Tensor:
    """Bijective mixing of int64 (Steele, Lea, Flood 2014, SplitMix64); multiplication wraps."""
    x = (x ^ _shift(x, 30)).mul_(0xBF58476D1CE4E5B9 - 2**64)
    x.bitwise_xor_(_shift(x, 27)).mul_(0x94D049BB133111EB - 2**64)
    return x.bitwise_xor_(_shift(x, 31))


def row_keys(seed: Tensor, count: Tensor) -> Tensor:
    """Noise keys int32 `[S, 2]` of a row's `seed` and tokens generated before, both int64 `[S]`."""
    step = (count + 1) * (0x9E3779B97F4A7C15 - 2**64)
    return _mix64(_mix64(seed) + step).view(torch.int32).reshape(-1, 2)


def gumbel(keys: Tensor, index: Tensor) -> Tensor:
    """Standard Gumbel noise, float32 `[...]`, for `keys` int32 `[..., 2]` at int32 `index` `[...]`.

    `index` is the place in the vocabulary; leading shapes broadcast. The noise is `-log(E)` with
    `E = -log(1 - u)`: keeping the precision of small `u` keeps that of large noise, which is what
    decides. The scale keeps `u < 1`, so the noise is finite, in [-2.9, 22.3].
    """
    h = _mix32((_mix32(index) ^ keys[..., 0]) * (keys[..., 1] | 1)).bitwise_and_(0x7FFFFFFF)
    u = h.to(torch.float32).add_(0.5).mul_(-(2.0**-31) * (1 - 2.0**-24))
    return u.log1p_().neg_().log_().neg_()


# ------------------------------------------------------------------- what also binds greedy rows


def hold_back(x: Tensor, rows: Tensor, ids: Tensor, held: Tensor) -> None:
    """Forbid, in place, token `ids` of `rows` (int64 `[P]`) where `held` (bool `[P]`)."""
    x[rows, ids] = x[rows, ids].masked_fill(held, NEG_INF)


def add_bias(x: Tensor, rows: Tensor, ids: Tensor, bias: Tensor) -> None:
    """Add `bias` (float32 `[P]`) in place at distinct (`rows`, `ids`) (int64 `[P]`)."""
    x[rows, ids] += bias


def penalise(
    x: Tensor,
    counts: Tensor,
    in_prompt: Tensor,
    repetition: Tensor,
    presence: Tensor,
    frequency: Tensor,
) -> Tensor:
    """Return float32 `[S, V]` logits with vLLM's penalties.

    `counts` int32 `[S, V]` are occurrences in the output, `in_prompt` bool `[S, V]`; penalties
    `[S]`. Repetition (Keskar et al. 2019) divides positive and multiplies negative logits of any
    token of prompt or output; presence and frequency look at the output only.
    """
    used = counts > 0
    factor = repetition.float()[:, None]
    repeated = torch.where(x > 0, x / factor, x * factor)
    x = torch.where(used | in_prompt, repeated, x)
    x.sub_(frequency.float()[:, None] * counts)
    return x.sub_(presence.float()[:, None] * used)


# ------------------------------------------------------------------------------------- filtering


def temper(logits: Tensor, maximum: Tensor, temperature: Tensor) -> Tensor:
    """`(logits - maximum) / temperature`, float32 `[S, V]`; the others are `[S]`.

    Shifting first keeps the maximum finite at any temperature.
    """
    divisor = temperature.float().clamp(min=1e-30)  # 0 in float32 would make 0 / 0 of the maximum
    return (logits - maximum[:, None]).div_(divisor[:, None])


def filter_min_p(x: Tensor, log_min_p: Tensor) -> None:
    """Drop, in place, tokens with probability below `min_p` of the likeliest (Nguyen et al. 2024).

    `log_min_p` `[S]`, -inf for no filter. With the maximum at 0 no softmax is needed.
    """
    x.masked_fill_(x < log_min_p.float()[:, None], NEG_INF)


def filter_top(
    x: Tensor, top_k: Tensor, top_p: Tensor, widest: int, nucleus: bool, open_nucleus: bool
) -> None:
    """Apply top-k, then top-p on what is left, in place.

    `top_k` int64 `[S]` (V: off) keeps every token not below the k-th value (so ties at the
    boundary stay, as in vLLM and transformers). `top_p` float64 `[S]` (1: off) keeps the smallest
    set of best tokens with at least that share of the probability (Holtzman et al. 2019); among
    tokens tied at the boundary the lowest indices stay. The host knows, and says: the `widest`
    top-k in use (0: none), whether any row has a `nucleus`, and whether such a row has no top-k.
    """
    vocab = x.shape[1]
    width = widest
    if open_nucleus:
        width = max(widest, _NUCLEUS_GUESS) if x.device.type == "cpu" else vocab
    ranked = _ranked(x, min(width, vocab))
    kth = ranked.gather(1, (top_k - 1).clamp(max=ranked.shape[1] - 1)[:, None])
    kth.masked_fill_((top_k >= vocab)[:, None], NEG_INF)
    if widest:
        x.masked_fill_(x < kth, NEG_INF)
    if nucleus:
        _filter_nucleus(x, ranked.masked_fill(ranked < kth, NEG_INF), top_p, open_nucleus)


def _ranked(x: Tensor, width: int) -> Tensor:
    """The `width` best values of each row, best first."""
    if width * 32 < x.shape[1]:
        return x.topk(width).values
    if x.device.type == "cpu":  # numpy sorts values alone, several times faster than torch
        return -torch.from_numpy(np.sort(-x.numpy(), axis=1)[:, :width])
    return x.sort(descending=True).values[:, :width]


def _weight(x: Tensor) -> Tensor:
    """Fixed-point `exp(x)`, int64: sums of it do not depend on the order of addition."""
    # below -40 the weight is 0 anyway, and exp is slow on CPU where it underflows
    return x.clamp(min=-40.0).exp_().mul_(_WEIGHT_SCALE).to(torch.int64)


def _filter_nucleus(x: Tensor, ranked: Tensor, top_p: Tensor, may_widen: bool) -> None:
    total = _weight(x).sum(1)
    goal = (total.double() * top_p).ceil_().to(torch.int64).clamp_(min=1)
    cut, ties, found = _nucleus(ranked, goal)
    if may_widen and ranked.shape[1] < x.shape[1]:  # only on CPU, where looking costs nothing
        rows = (~found & (top_p < 1)).nonzero().flatten()
        if rows.numel():
            full = _ranked(x[rows], x.shape[1])
            cut[rows], ties[rows], _ = _nucleus(full, goal[rows])
    cut.masked_fill_(top_p >= 1, NEG_INF)
    x.masked_fill_(x < cut[:, None], NEG_INF)
    tied = x == cut[:, None]
    place = tied.cumsum(1, dtype=torch.int32)
    x.masked_fill_(tied & (place > ties.to(torch.int32)[:, None]), NEG_INF)


def _nucleus(ranked: Tensor, goal: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Where the best-first values `ranked` `[S, W]` reach weight `goal` `[S]`.

    Returns `[S]` each: the value `cut` of the last token kept, how many tokens equal to it are
    kept, and whether `ranked` was long enough. When it was not, `cut` is its last value, which is
    still right if all tokens beyond are equal to it (ties at the top-k boundary).
    """
    weight = _weight(ranked)
    last = (weight.cumsum(1) < goal[:, None]).sum(1)
    found = last < ranked.shape[1]
    cut = ranked.gather(1, last.clamp_(max=ranked.shape[1] - 1)[:, None])
    above = (weight * (ranked > cut)).sum(1)
    unit = _weight(cut[:, 0]).clamp_(min=1)
    ties = (goal - above + unit - 1).div(unit, rounding_mode="floor").clamp_(1, 2**30)
    return cut[:, 0], ties, found


# ---------------------------------------------------------------------------------------- choice


def argmax(x: Tensor) -> Tensor:
    """Index int64 `[S]` of each row's maximum, the lowest one among ties."""
    if x.device.type == "cpu":  # numpy's is vectorised, torch's is not
        return torch.from_numpy(np.argmax(x.numpy(), axis=1))
    return x.argmax(1)


def draw(x: Tensor, keys: Tensor) -> Tensor:
    """Draw from softmax(x) per row with the Gumbel-max trick; int64 `[S]`. `x` is overwritten.

    `keys` int32 `[S, 2]` from `row_keys`. On CPU, noise is made only for tokens that can win,
    where these are few; the result is the same.
    """
    vocab = x.shape[1]
    if x.device.type == "cpu":
        flat = torch.from_numpy(np.flatnonzero(x.numpy() > -_NOISE_SPAN))
        if 4 * flat.numel() < x.numel():
            row = flat.div(vocab, rounding_mode="floor")
            noise = gumbel(keys[row], (flat - row * vocab).to(torch.int32))
            return argmax(torch.full_like(x, NEG_INF).put_(flat, x.take(flat).add_(noise)))
    index = torch.arange(vocab, dtype=torch.int32, device=x.device)
    return argmax(x.add_(gumbel(keys[:, None, :], index)))


def choose(
    logits: Tensor,
    slots: Tensor,
    temperatures: Tensor,
    seeds: Tensor,
    counts: Tensor,
    random: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Tokens of rows that ask for nothing but a temperature: argmax at 0, else a draw.

    Args:
        logits: float32 `[S, V]`.
        slots: int64 `[S]`, each row's place in the tables: `temperatures` float64, `seeds` and
            `counts` (tokens generated before) int64.
        random: int64, rows whose temperature may be another than 0; None for none. Spares work
            here; a GPU looks at the temperatures.

    Returns:
        `(tokens int64 [S], bad bool [S])`. A row whose maximum is not finite is bad, its token 0.
        On a GPU one pass over the logits; the same token as here unless two tokens tie up to the
        last bits of a float32 logarithm.
    """
    if on_gpu(logits) and logits.stride(1) == 1:
        from baton.ops.triton import sample as kernels

        return kernels.choose(logits, slots, temperatures, seeds, counts)
    maximum = logits.amax(1)
    tokens = argmax(logits)
    if random is not None:
        slots = slots[random]
        chosen = temperatures[slots]
        x = temper(logits[random], maximum[random], chosen)
        drawn = draw(x, row_keys(seeds[slots], counts[slots]))
        tokens[random] = torch.where(chosen == 0, tokens[random], drawn)
    bad = maximum.isfinite().logical_not_()
    return tokens.masked_fill_(bad, 0), bad


class TokenLogprobs(NamedTuple):
    """Log-probabilities at N positions: of one token each, and of the k best.

    `chosen` float32 `[N]`, `rank` int64 `[N]` (1 + number of likelier tokens), `top` float32
    `[N, k]` best first and `top_ids` int64 `[N, k]`, lowest id first among ties.
    """

    chosen: Tensor
    rank: Tensor
    top: Tensor
    top_ids: Tensor


def token_logprobs(logits: Tensor, tokens: Tensor, k: int) -> TokenLogprobs:
    """Log-softmax of raw float32 `logits` `[N, V]` at `tokens` int64 `[N]` and at the `k` best."""
    logprobs = logits.log_softmax(1)
    chosen = logprobs.gather(1, tokens[:, None])
    rank = (logprobs > chosen).sum(1) + 1
    ids = _best(logits, min(k, logits.shape[1]))
    return TokenLogprobs(chosen[:, 0], rank, logprobs.gather(1, ids), ids)


def _best(x: Tensor, k: int) -> Tensor:
    """Indices int64 `[N, k]` of the `k` greatest, best first, lowest index first among ties.

    `topk` breaks ties as it likes, so it gets distinct keys: the value's bits, made monotone as an
    integer, above the reversed index.
    """
    if k == 0:
        return torch.empty(x.shape[0], 0, dtype=torch.int64, device=x.device)
    bits = (x + 0.0).view(torch.int32)  # + 0.0 makes -0.0 and 0.0 one value
    order = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(torch.int64) << 32
    last = x.shape[1] - 1
    reverse = torch.arange(last, -1, -1, dtype=torch.int64, device=x.device)
    return last - ((order | reverse).topk(k).values & 0xFFFFFFFF)
