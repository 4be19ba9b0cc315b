"""Folds one more partial attention result into a running one.

Bytes: the running result (float32) read and written, the new one read: `T H D (8 + size)`;
eager PyTorch takes about ten passes for the same.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit(do_not_specialize=["rows", "l_row", "l_head"])
def _merge_kernel(
    acc, acc_lse, out, lse, rows, o_row, o_head, l_row, l_head,
    H: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    d = tl.arange(0, D_PAD)
    live = row < rows
    t, h = (row // H).to(tl.int64), row % H
    a = tl.load(acc_lse + row, live, float("-inf"))
    b = tl.load(lse + t * l_row + h * l_head, live, float("-inf"))
    top = tl.maximum(a, b)
    base = tl.where(top == float("-inf"), 0.0, top)
    wa, wb = tl.exp(a - base), tl.exp(b - base)
    total = wa + wb
    mask = live[:, None] & (d < D)[None, :]
    at = acc + row.to(tl.int64)[:, None] * D + d[None, :]
    x = tl.load(at, mask & (wa > 0)[:, None], 0.0)
    y = tl.load(
        out + (t * o_row + h * o_head)[:, None] + d[None, :], mask & (wb > 0)[:, None], 0.0
    ).to(tl.float32)
    scale = tl.where(total > 0, 1.0 / total, 0.0)
    tl.store(at, x * (wa * scale)[:, None] + y * (wb * scale)[:, None], mask)
    tl.store(acc_lse + row, base + tl.log(total), live)


def merge_into(
    acc: torch.Tensor, acc_lse: torch.Tensor, out: torch.Tensor, lse: torch.Tensor
) -> None:
    """See `ops.attention.merge_into`."""
    tokens, heads, dim = acc.shape
    rows = tokens * heads
    _merge_kernel[(triton.cdiv(rows, 16),)](
        acc, acc_lse, out, lse, rows,
        out.stride(0), out.stride(1), lse.stride(0), lse.stride(1),
        H=heads, D=dim, D_PAD=triton.next_power_of_2(dim), BLOCK=16, num_warps=4,
    )  # fmt: skip
