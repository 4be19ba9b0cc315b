"""The weighted sum of what a token's experts made of it, alone or with what follows: the residual
addition and the RMSNorm of the next layer.

Bytes per token, in 16-bit dtypes: `2 K H` read and `2 H` written alone, and `8 H` more by addition
and norm as a kernel of their own; `2 K H + 6 H` as one, and a launch less to wait for. A row then
belongs to one program, as its sum of squares does. Values are rounded wherever separate kernels
would write them and sums run in the same order, so that the bits are the same.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from baton.ops.triton.common import follow, overlapping
from baton.ops.triton.norm import add_rms_norm, normed, program

#: Registers of a thread: enough for all of a token's rows to be on their way at once. Left alone,
#: the assembler makes do with fewer, and loads a row or two at a time.
REGISTERS = 128


@triton.jit
def _pairs(
    weights, place, token, TOP_K: tl.constexpr, ROUTED: tl.constexpr, DIRECT_M: tl.constexpr
):
    """The rows of a token's pairs, and their weights. Known before the kernel ahead began."""
    rows, scales = (), ()
    for k in tl.static_range(TOP_K):
        pair = token * TOP_K + k
        if DIRECT_M > 0:
            if k < ROUTED:
                row = (token * ROUTED + k) * DIRECT_M
            else:
                row = (tl.num_programs(0) * ROUTED + (k - ROUTED)) * DIRECT_M + token
        else:
            row = tl.load(place + pair, cache_modifier=".cg").to(tl.int64)
        rows += (row,)  # type: ignore[assignment]
        scales += (tl.load(weights + pair, cache_modifier=".cg").to(tl.float32),)  # type: ignore[assignment]
    return rows, scales


@triton.jit
def _total(y, rows, scales, more, col, mask, WIDTH: tl.constexpr, TOP_K: tl.constexpr):
    """`sum_k scales[k] y[rows[k]]`, and `more` unless None, at columns `col`: float32."""
    total = tl.zeros(col.shape, tl.float32)
    for k in tl.static_range(TOP_K):
        part = tl.load(y + rows[k] * WIDTH + col, mask=mask, other=0.0)
        total += part.to(tl.float32) * scales[k]
    if more is not None:
        total += more
    return total


@triton.jit
def _combine(
    y, weights, place, shared, out, shared_stride,
    WIDTH: tl.constexpr, TOP_K: tl.constexpr, ROUTED: tl.constexpr, BLOCK: tl.constexpr,
    DIRECT_M: tl.constexpr, SHARED: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    col = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = col < WIDTH
    rows, scales = _pairs(weights, place, token, TOP_K, ROUTED, DIRECT_M)
    more = None
    if SHARED:
        more = tl.load(shared + token * shared_stride + col, mask=mask, other=0.0,
                       cache_modifier=".cg").to(tl.float32)  # fmt: skip
    follow()
    total = _total(y, rows, scales, more, col, mask, WIDTH, TOP_K)
    tl.store(out + token * WIDTH + col, total.to(out.dtype.element_ty), mask=mask)


@triton.jit
def _combine_norm(
    y, weights, place, shared, residual, norm, out, total, shared_stride, residual_stride, eps,
    WIDTH: tl.constexpr, TOP_K: tl.constexpr, ROUTED: tl.constexpr, BLOCK: tl.constexpr,
    DIRECT_M: tl.constexpr, SHARED: tl.constexpr,
):  # fmt: skip
    """As `_combine`, then `total[t] = sum + residual[t]` and `out[t]` its RMSNorm."""
    token = tl.program_id(0).to(tl.int64)
    col = tl.arange(0, BLOCK)[None, :]
    mask = col < WIDTH
    rows, scales = _pairs(weights, place, token, TOP_K, ROUTED, DIRECT_M)
    scale = tl.load(norm + col, mask=mask, other=0.0).to(tl.float32)
    before = tl.load(residual + token * residual_stride + col, mask=mask, other=0.0,
                     cache_modifier=".cg")  # fmt: skip
    more = None
    if SHARED:
        more = tl.load(shared + token * shared_stride + col, mask=mask, other=0.0,
                       cache_modifier=".cg").to(tl.float32)  # fmt: skip
    follow()
    value = _total(y, rows, scales, more, col, mask, WIDTH, TOP_K).to(before.dtype)
    value = (value.to(tl.float32) + before.to(tl.float32)).to(before.dtype)
    tl.store(total + token * WIDTH + col, value, mask=mask)
    tl.store(out + token * WIDTH + col, normed(value, scale, eps, WIDTH), mask=mask)


@dataclass(frozen=True)
class Products:
    """What experts made of T tokens, not summed yet. The kernel that wrote y is the last one
    launched, and all else was there before it began: sums read that while y is still made.

    y: `[P, H]`, a row for each (token, expert) pair, and padding.
    weights: float32 `[T, K]`, contiguous: each pair's.
    place: int32 `[T * K]`, each pair's row of y. Not read where rows lie in tiles.
    shared: `[T, H]`, what else belongs to the sum.
    tile: rows of a tile, where they lie as `_grouped_gemm` puts them without alignment; else 0.
    common: how many of the K experts all tokens visit.
    """

    y: torch.Tensor
    weights: torch.Tensor
    place: torch.Tensor
    shared: torch.Tensor | None = None
    tile: int = 0
    common: int = 0

    def sum(self) -> torch.Tensor:
        """Each token's rows, weighted and added up in float32: `[T, H]` in y's dtype."""
        tokens, top_k = self.weights.shape
        width = self.y.shape[1]
        out = self.y.new_empty(tokens, width)
        block = min(1024, triton.next_power_of_2(width))
        extra = out if self.shared is None else self.shared
        if tokens:
            _combine[(tokens, triton.cdiv(width, block))](
                self.y, self.weights, self.place, extra, out, extra.stride(0),
                WIDTH=width, TOP_K=top_k, ROUTED=top_k - self.common, BLOCK=block,
                DIRECT_M=self.tile, SHARED=self.shared is not None, num_warps=4,
                maxnreg=REGISTERS, launch_pdl=overlapping(),
            )  # fmt: skip
        return out

    def add_rms_norm(
        self, residual: torch.Tensor, norm: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """`(rms_norm(s, norm, eps), s)` of `s = sum() + residual`, `[T, H]` in y's dtype. The
        residual was there before y, too."""
        tokens, top_k = self.weights.shape
        width = self.y.shape[1]
        rows, block, warps = program(tokens, width)
        # Nor may the kernel ahead of the sum be a copy of the residual, which it reads early.
        if rows > 1 or not tokens or residual.stride(1) != 1:
            return add_rms_norm(self.sum(), residual, norm, eps)
        out, total = (self.y.new_empty(tokens, width) for _ in range(2))
        extra = out if self.shared is None else self.shared
        _combine_norm[(tokens,)](
            self.y, self.weights, self.place, extra, residual, norm, out, total,
            extra.stride(0), residual.stride(0), eps,
            WIDTH=width, TOP_K=top_k, ROUTED=top_k - self.common, BLOCK=block,
            DIRECT_M=self.tile, SHARED=self.shared is not None, num_warps=warps,
            maxnreg=REGISTERS, launch_pdl=overlapping(),
        )  # fmt: skip
        return out, total
