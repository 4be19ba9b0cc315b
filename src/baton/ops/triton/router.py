"""The router: gate GEMM with float32 weights, then scores, choice and weights in one kernel.

GEMM: a bfloat16 activation is exact, and a float32 weight is the sum of three bfloat16 numbers
(8 + 8 + 8 bits), so three tensor core products give what a float32 GEMM gives, without a float32
copy of the activations; the split happens in registers, between the load and the product. With
few tokens the inner dimension is shared out over programs (`4 E H` bytes of weights, 3.1 MB for
192 x 4096, want more than the 3 SMs that its tiles would fill) and the second kernel adds the
parts, in order; a program with one block of weights has it before it waits for the tokens. With
many tokens the three numbers come from memory, as three times as many rows of one bfloat16 weight:
a plain GEMM, which the library runs at three times the split's speed.

Choice: a row of scores lives in one warp's registers; the top k are k reductions, and ties go to
the lower expert. Experts that every token visits are columns behind the chosen ones. Bytes: the
logits, once.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from baton.config.model import MoEConfig
from baton.ops.triton.common import dot, follow, overlapping

_LOW = tl.constexpr(-1e30)  # below any choice, above the padding: NaN and -inf become this
_SMS = 132
_INNER = 128
_MOST_PARTS = 16
#: Products of a gate from which the library's GEMM on split weights pays.
SPLIT_FROM = 2**28


@triton.jit
def _exact(weight, tile, acc):
    """`acc + weight tile`, of a float32 and a bfloat16 tile. Smallest first, as sums of unequal
    terms like it."""
    high = weight.to(tl.bfloat16)
    left = weight - high.to(tl.float32)
    middle = left.to(tl.bfloat16)
    low = (left - middle.to(tl.float32)).to(tl.bfloat16)
    acc = dot(low, tile, acc)
    acc = dot(middle, tile, acc)
    return dot(high, tile, acc)


@triton.jit(do_not_specialize=["tokens"])
def _gate(
    x, w, out, tokens, share, x_stride,
    E: tl.constexpr, H: tl.constexpr, BE: tl.constexpr, BT: tl.constexpr, BK: tl.constexpr,
    ONCE: tl.constexpr,
):  # fmt: skip
    """`out[part, t, e]`: of inner columns `[part * share, (part + 1) * share)`."""
    expert = tl.program_id(0) * BE + tl.arange(0, BE)
    token = tl.program_id(1).to(tl.int64) * BT + tl.arange(0, BT)
    part = tl.program_id(2)
    kk = tl.arange(0, BK)
    live_e, live_t = expert < E, token < tokens
    source_w = w + expert[:, None] * H + kk[None, :]
    source_x = x + token[:, None] * x_stride + kk[None, :]
    acc = tl.zeros([BE, BT], tl.float32)
    if ONCE:
        inside = (kk + part * share < H)[None, :]
        weight = tl.load(source_w + part * share, mask=live_e[:, None] & inside, other=0.0)
        follow()
        tile = tl.load(source_x + part * share, mask=live_t[:, None] & inside, other=0.0)
        acc = _exact(weight, tile.T, acc)
    else:
        follow()
        for k in range(part * share, part * share + share, BK):
            inside = (kk + k < H)[None, :]
            weight = tl.load(source_w + k, mask=live_e[:, None] & inside, other=0.0)
            tile = tl.load(source_x + k, mask=live_t[:, None] & inside, other=0.0)
            acc = _exact(weight, tile.T, acc)
    target = out + (part * tokens + token[:, None]) * E + expert[None, :]
    tl.store(target, acc.T, mask=live_t[:, None] & live_e[None, :])


def gate_logits(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """`x [T, H]` bfloat16 times float32 `weight [E, H]`: float32 `[parts, T, E]`, to be summed
    over parts. `parts` depends on T alone."""
    (tokens, hidden), experts = x.shape, weight.shape[0]
    x = x if x.stride(1) == 1 else x.contiguous()
    block_t = 16 if tokens <= 64 else 64
    tiles = triton.cdiv(experts, 64) * triton.cdiv(tokens, block_t)
    steps = triton.cdiv(hidden, _INNER)
    share = _INNER * triton.cdiv(steps, min(steps, _MOST_PARTS, max(1, _SMS // tiles)))
    parts = triton.cdiv(hidden, share)
    out = torch.empty(parts, tokens, experts, dtype=torch.float32, device=x.device)
    if tokens:
        grid = triton.cdiv(experts, 64), triton.cdiv(tokens, block_t), parts
        inner = _INNER if block_t == 16 else 64
        _gate[grid](
            x, weight, out, tokens, share, x.stride(0), E=experts, H=hidden,
            BE=64, BT=block_t, BK=inner, ONCE=share == inner, num_warps=4, num_stages=3,
            launch_pdl=overlapping(),
        )  # fmt: skip
    return out


def split_weight(weight: torch.Tensor) -> torch.Tensor:
    """Float32 `weight [E, H]` as the sum of three bfloat16 ones, smallest first: `[3 E, H]`."""
    high = weight.bfloat16()
    left = weight - high.float()
    middle = left.bfloat16()
    return torch.cat(((left - middle.float()).bfloat16(), middle, high))


def split_pays(tokens: int, experts: int, hidden: int) -> bool:
    """Whether `split_logits` is faster than `gate_logits`: it needs work for the whole card."""
    return tokens * experts * hidden >= SPLIT_FROM


def split_logits(x: torch.Tensor, parts: torch.Tensor) -> torch.Tensor:
    """As `gate_logits`, of a weight that `split_weight` made."""
    out = torch.mm(x, parts.t(), out_dtype=torch.float32)
    return out.view(x.shape[0], 3, -1).transpose(0, 1)


@triton.jit(do_not_specialize=["parts", "part_stride"])
def _choose(
    logits, bias, experts, weights, parts, part_stride, stride, scale,
    PARTS: tl.constexpr, E: tl.constexpr, LANES: tl.constexpr, TOP_K: tl.constexpr,
    SHARED: tl.constexpr, SIGMOID: tl.constexpr, BIAS: tl.constexpr, NORMALISE: tl.constexpr,
    GROUPS: tl.constexpr, TOP_GROUPS: tl.constexpr, PAIR: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, LANES)
    real = lane < E
    x = tl.zeros([LANES], tl.float32)
    follow()
    for part in tl.static_range(PARTS):
        row = logits + part * part_stride.to(tl.int64) + token * stride
        x += tl.load(row + lane, mask=real & (part < parts), other=0.0)
    if SIGMOID:
        scores = tl.sigmoid(x)
    else:
        shifted = tl.where(real, tl.exp(x - tl.max(tl.where(real, x, float("-inf")), 0)), 0.0)
        scores = shifted / tl.sum(shifted, 0)
    choice = scores
    if BIAS:
        choice += tl.load(bias + lane, mask=real, other=0.0)
    # Whatever the logits are, the experts chosen are distinct and exist: comparisons with NaN
    # are false.
    choice = tl.where(real, tl.where(choice > _LOW, choice, _LOW), float("-inf"))
    if GROUPS > 1:
        choice = _keep_best_groups(choice, LANES, GROUPS, TOP_GROUPS, PAIR)
    slot = tl.arange(0, triton.next_power_of_2(TOP_K + SHARED))
    chosen = slot + (E - TOP_K)  # what the shared experts keep
    picked = tl.zeros([triton.next_power_of_2(TOP_K + SHARED)], tl.float32)
    for k in tl.static_range(TOP_K):
        best = tl.argmax(choice, 0, tie_break_left=True)
        score = tl.sum(tl.where(lane == best, scores, 0.0), 0)
        chosen = tl.where(slot == k, best, chosen)
        picked = tl.where(slot == k, score, picked)
        choice = tl.where(lane == best, float("-inf"), choice)
    if NORMALISE:
        picked = picked / (tl.sum(picked, 0) + 1e-20)
    target = token * (TOP_K + SHARED) + slot
    weight = tl.where(slot < TOP_K, picked * scale, 1.0)
    tl.store(experts + target, chosen.to(tl.int64), mask=slot < TOP_K + SHARED)
    tl.store(weights + target, weight, mask=slot < TOP_K + SHARED)


@triton.jit
def _keep_best_groups(
    choice,
    LANES: tl.constexpr,
    GROUPS: tl.constexpr,
    TOP_GROUPS: tl.constexpr,
    PAIR: tl.constexpr,
):
    """-inf for experts outside each row's best groups; a group counts by its best one or two."""
    grouped = tl.reshape(choice, [GROUPS, LANES // GROUPS])
    score = tl.max(grouped, 1)
    if PAIR:
        best = tl.argmax(grouped, 1, tie_break_left=True)
        member = tl.arange(0, LANES // GROUPS)[None, :]
        score += tl.max(tl.where(member == best[:, None], float("-inf"), grouped), 1)
    group = tl.arange(0, GROUPS)
    keep = group < 0
    for _ in tl.static_range(TOP_GROUPS):
        winner = tl.argmax(tl.where(keep, float("-inf"), score), 0, tie_break_left=True)
        keep = keep | (group == winner)
    return tl.reshape(tl.where(keep[:, None], grouped, float("-inf")), [LANES])


def supported(experts: int, moe: MoEConfig) -> bool:
    """Groups need power-of-two shapes; a row of scores must fit in a warp."""
    power = experts == triton.next_power_of_2(experts)
    groups = moe.groups == triton.next_power_of_2(moe.groups)
    return experts <= 1024 and (moe.groups == 1 or (power and groups and moe.groups < experts))


def choose(
    logits: torch.Tensor, bias: torch.Tensor | None, moe: MoEConfig
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `ops.router.route`, of float32 `logits [parts, T, E]` summed over parts. Best first;
    among equal choices the lower expert."""
    parts, tokens, count = logits.shape
    logits = logits if logits.stride(2) == 1 else logits.contiguous()
    size = tokens, moe.top_k + moe.shared_experts
    experts = torch.empty(size, dtype=torch.int64, device=logits.device)
    weights = torch.empty(size, dtype=torch.float32, device=logits.device)
    if tokens:
        _choose[(tokens,)](
            logits, logits if bias is None else bias, experts, weights,
            parts, logits.stride(0), logits.stride(1), moe.scale,
            PARTS=4 if parts <= 4 else _MOST_PARTS, E=count,
            LANES=triton.next_power_of_2(count), TOP_K=moe.top_k, SHARED=moe.shared_experts,
            SIGMOID=moe.score == "sigmoid", BIAS=bias is not None,
            NORMALISE=moe.normalise, GROUPS=moe.groups, TOP_GROUPS=moe.top_groups,
            PAIR=moe.group_score == "top2",
            num_warps=1, launch_pdl=overlapping(),
        )  # fmt: skip
    return experts, weights
