"""A small product per head, as absorbed MLA has before and after its attention.

Bytes at decode: the weights once, `H K N` elements; a few microseconds of bandwidth, so what counts
is how soon they are there. A program takes all inner columns at once and has its weights (16 KB) in
shared memory before it waits for the kernel ahead. Results lie token by token, where the next
operator reads them.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from baton.ops.triton.common import dot, follow, overlapping

_WEIGHTS = 8192  # elements of a program's weights


@triton.jit(do_not_specialize=["tokens"])
def _head_products(
    x, w, out, tokens, x_token, x_head, w_head, w_row, w_column,
    H: tl.constexpr, K: tl.constexpr, N: tl.constexpr, BK: tl.constexpr, BN: tl.constexpr,
    BT: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """`out[t, h] = x[t, h] w[h]`. EARLY: x was there before the kernel ahead began."""
    pid, columns = tl.program_id(0), tl.cdiv(N, BN)
    n = pid % columns * BN + tl.arange(0, BN)
    h = (pid // columns % H).to(tl.int64)
    t = pid // (columns * H) * BT + tl.arange(0, BT)
    k = tl.arange(0, BK)
    at = w + h * w_head + k[:, None] * w_row + n[None, :] * w_column
    weight = tl.load(at, mask=(k < K)[:, None] & (n < N)[None, :], other=0.0)
    live = (t < tokens)[:, None]
    t = t.to(tl.int64)[:, None]
    source = x + t * x_token + h * x_head + k[None, :]
    if EARLY:
        tile = tl.load(source, mask=live & (k < K), other=0.0, cache_modifier=".cg")
    else:
        follow()
        tile = tl.load(source, mask=live & (k < K), other=0.0)
    acc = dot(tile, weight, tl.zeros([BT, BN], tl.float32))
    if EARLY:
        follow()
    tl.store(out + (t * H + h) * N + n[None, :], acc.to(out.dtype.element_ty), live & (n < N))


def head_products(x: torch.Tensor, weight: torch.Tensor, early: bool) -> torch.Tensor:
    """See `ops.mla.head_products`."""
    (tokens, heads, inner), width = x.shape, weight.shape[2]
    out = torch.empty(tokens, heads, width, dtype=x.dtype, device=x.device)
    if tokens == 0:
        return out
    block_k = max(16, triton.next_power_of_2(inner))
    block_n = max(16, min(_WEIGHTS // block_k, triton.next_power_of_2(width)))
    block_t = 16 if tokens <= 16 else 64
    _head_products[(heads * triton.cdiv(width, block_n) * triton.cdiv(tokens, block_t),)](
        x, weight, out, tokens, x.stride(0), x.stride(1), *weight.stride(),
        H=heads, K=inner, N=width, BK=block_k, BN=block_n, BT=block_t, EARLY=early,
        num_warps=4, launch_pdl=overlapping(),
    )  # fmt: skip
    return out
