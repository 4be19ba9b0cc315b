"""A linear layer for a decode step's few tokens, which waits for nothing but its input.

Bytes: the weight once, `N K` elements, some microseconds; a library's GEMM of this size takes as
long again to get under way. Here each program has all its rows of the weight in shared memory
before it waits for the kernel ahead, so they come while that one runs. What is left to do then is
to read the tokens (from L2, all columns for every program), multiply, and add up.

The inner dimension is cut into a slice for each warp, a product of its own, and these are added up
in order: one product would be a chain of K / 16 tensor core instructions, each waiting for the one
before.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from baton.ops.triton.common import INTERPRETED, follow, overlapping

TOKENS = 16  # at most
_WARPS = 8  # and slices
_SMS = 132
_WEIGHTS = 65536  # elements of a program's rows: 128 KB, beside 32 to 64 KB of tokens


@triton.jit(do_not_specialize=["tokens"])
def _few(
    x, w, out, tokens, x_row,
    N: tl.constexpr, K: tl.constexpr, BT: tl.constexpr, BN: tl.constexpr,
    SLICES: tl.constexpr, SLICE: tl.constexpr,
):  # fmt: skip
    """`out[t, n] = sum_k x[t, k] w[n, k]`."""
    row, token = tl.program_id(0) * BN + tl.arange(0, BN), tl.arange(0, BT)
    k = tl.arange(0, SLICES)[:, None, None] * SLICE + tl.arange(0, SLICE)[None, None, :]
    inside = k < K
    live_row, live = row < N, token < tokens
    weight = tl.load(w + row[None, :, None] * K + k, live_row[None, :, None] & inside, 0.0)
    follow()
    tile = tl.load(x + token[None, :, None] * x_row + k, live[None, :, None] & inside, 0.0)
    tile = tl.permute(tile, (0, 2, 1))
    if INTERPRETED:  # its dot reads the raw bits of bfloat16
        parts = tl.dot(weight.to(tl.float32), tile.to(tl.float32), input_precision="ieee")
    else:
        parts = tl.dot(weight, tile)
    at = out + token[None, :] * N + row[:, None]
    tl.store(at, tl.sum(parts, 0).to(out.dtype.element_ty), live_row[:, None] & live[None, :])


def _rows(width: int, inner: int) -> int | None:
    """Rows of a program, so that all programs run at once; None if that cannot be."""
    columns = max(_WARPS * 16, triton.next_power_of_2(inner))
    fitting = (n for n in (16, 32, 64) if n * columns <= _WEIGHTS and n * _SMS >= width)
    return next(fitting, None)


def supported(x: torch.Tensor, weight: torch.Tensor) -> bool:
    """Few tokens, and a 16-bit weight that the multiprocessors hold among them."""
    return (
        x.dim() == 2
        and x.shape[0] <= TOKENS
        and x.dtype.itemsize == 2
        and x.stride(1) == 1
        and weight.is_contiguous()
        and _rows(*weight.shape) is not None
    )


def linear(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """See `ops.linear.linear`, without a bias, for what is `supported`."""
    (tokens, inner), width = x.shape, weight.shape[0]
    out = torch.empty(tokens, width, dtype=x.dtype, device=x.device)
    rows = _rows(width, inner)
    assert rows is not None
    if tokens:
        _few[(triton.cdiv(width, rows),)](
            x, weight, out, tokens, x.stride(0),
            N=width, K=inner, BT=TOKENS, BN=rows, SLICES=_WARPS,
            SLICE=max(16, triton.next_power_of_2(inner) // _WARPS),
            num_warps=_WARPS, launch_pdl=overlapping(),
        )  # fmt: skip
    return out
