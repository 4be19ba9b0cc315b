"""RMSNorm, alone, of embedded tokens, or behind a residual addition, in one pass.

Bytes per element: 4 alone (read x, write out), 6 of an embedded token (write it, too), 8 with the
addition (read x and residual, write both), in 16-bit dtypes; the whole chain in PyTorch moves 20,
24 and 28. A row stays in registers between its sum of squares and its scaling; short rows share a
program.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from baton.ops.triton.common import follow, overlapping

_TILE = 2048  # elements that a program of short rows takes


@triton.jit
def normed(value, weight, eps, DIM: tl.constexpr):
    """RMSNorm of rows `value [ROWS, BLOCK]`, 0 behind column DIM; `weight [1, BLOCK]` float32."""
    wide = value.to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide, 1) / DIM + eps)
    # Rounded before the weight, like the reference.
    return ((wide * scale[:, None]).to(value.dtype).to(tl.float32) * weight).to(value.dtype)


@triton.jit
def _tile(weight, rows, DIM: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr):
    """A program's rows `[ROWS, 1]` and columns `[1, BLOCK]`, where both are real, and the weight of
    the columns, float32."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    col = tl.arange(0, BLOCK)[None, :]
    w = tl.load(weight + col, mask=col < DIM, other=0.0).to(tl.float32)
    return row, col, (row < rows) & (col < DIM), w


@triton.jit(do_not_specialize=["rows"])
def _rms_norm(
    x, residual, weight, out, total, rows, x_stride, residual_stride, eps,
    DIM: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, ADD: tl.constexpr,
):  # fmt: skip
    row, col, mask, w = _tile(weight, rows, DIM, BLOCK, ROWS)
    follow()
    value = tl.load(x + row * x_stride + col, mask=mask, other=0.0)
    if ADD:
        more = tl.load(residual + row * residual_stride + col, mask=mask, other=0.0)
        value = (value.to(tl.float32) + more.to(tl.float32)).to(value.dtype)
        tl.store(total + row * DIM + col, value, mask=mask)
    tl.store(out + row * DIM + col, normed(value, w, eps, DIM), mask=mask)


@triton.jit(do_not_specialize=["count"], do_not_specialize_on_alignment=["ids"])
def _embed_rms_norm(
    ids, table, weight, out, rows, count, stride, eps,
    DIM: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    row, col, mask, w = _tile(weight, count, DIM, BLOCK, ROWS)
    follow()
    at = tl.load(ids + row, mask=row < count, other=0)
    value = tl.load(table + at * stride + col, mask=mask, other=0.0)
    tl.store(rows + row * DIM + col, value, mask=mask)
    tl.store(out + row * DIM + col, normed(value, w, eps, DIM), mask=mask)


def program(count: int, dim: int) -> tuple[int, int, int]:
    """Rows of a program, columns (a power of two), and warps, for `count` rows of `dim`. Sums run
    in an order that depends on these."""
    block = triton.next_power_of_2(dim)
    rows = max(1, _TILE // block) if count > 256 else 1
    columns = 512 if count > 256 else 256  # of a warp: few rows want threads
    return rows, block, min(16, max(1, block * rows // columns))


def _launch(
    x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    dim = x.shape[-1]
    flat = x.reshape(-1, dim)
    flat = flat if flat.stride(1) == 1 else flat.contiguous()
    more = flat if residual is None else residual.reshape(-1, dim)
    more = more if more.stride(1) == 1 else more.contiguous()
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    total = out if residual is None else torch.empty_like(out)
    count = flat.shape[0]
    rows, block, warps = program(count, dim)
    if count:
        _rms_norm[(triton.cdiv(count, rows),)](
            flat, more, weight, out, total, count, flat.stride(0), more.stride(0), eps,
            DIM=dim, BLOCK=block, ROWS=rows, ADD=residual is not None,
            num_warps=warps, launch_pdl=overlapping(),
        )  # fmt: skip
    return out, total


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """See `ops.norm.rms_norm`; D up to 16384."""
    return _launch(x, None, weight, eps)[0]


def embed_rms_norm(
    ids: torch.Tensor, table: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `ops.norm.embed_rms_norm`; D up to 16384."""
    count, dim = len(ids), table.shape[1]
    out, rows = (torch.empty(count, dim, dtype=table.dtype, device=ids.device) for _ in range(2))
    many, block, warps = program(count, dim)
    if count:
        _embed_rms_norm[(triton.cdiv(count, many),)](
            ids, table, weight, out, rows, count, table.stride(0), eps,
            DIM=dim, BLOCK=block, ROWS=many, num_warps=warps, launch_pdl=overlapping(),
        )  # fmt: skip
    return out, rows


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `ops.norm.add_rms_norm`; D up to 16384."""
    return _launch(x, residual, weight, eps)
