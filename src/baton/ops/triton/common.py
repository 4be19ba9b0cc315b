"""What the kernels share."""

from __future__ import annotations

import math
from functools import cache

import torch
import triton
import triton.language as tl
from triton.language.extra import libdevice
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
from triton.language.target_info import cuda_capability_geq

#: Kernels run in Triton's interpreter, on a CPU (TRITON_INTERPRET=1).
INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)

#: Attention reckons in base 2, which the hardware has: scores come in times `LOG2_E`, log-sum-exps
#: go out times `LN_2`.
LOG2_E, LN_2 = math.log2(math.e), tl.constexpr(math.log(2))


@cache
def overlapping() -> bool:
    """Whether kernels are launched with `launch_pdl`: a kernel's programs take their places while
    those of the one ahead still run (CUDA's programmatic dependent launch, from Hopper on)."""
    return torch.cuda.is_available() and torch.cuda.get_device_capability() >= (9, 0)


@triton.jit
def follow():
    """Behind this, all results of the kernel ahead are there, and the kernel behind may come up.

    A kernel launched with `launch_pdl` calls it before it reads or writes what other kernels
    write or read. What only ever is read, weights, may be read before. So may the results of
    kernels before the one ahead, past L1 (`.cg`), which may hold what lay there in the step before:
    that one has waited for them before it let this one come up.
    """
    if not INTERPRETED and cuda_capability_geq(9, 0):
        gdc_wait()
        gdc_launch_dependents()


@triton.jit
def dot(a, b, acc):
    """`acc + a b`, float32; float32 operands are not rounded to TF32."""
    if INTERPRETED:  # its dot reads the raw bits of bfloat16
        return acc + tl.dot(a.to(tl.float32), b.to(tl.float32), input_precision="ieee")
    return tl.dot(a, b, acc, input_precision="ieee")


@triton.jit
def log(x):
    """`log(x)` as PyTorch's kernels compute it (tl.log is the fast approximation)."""
    if INTERPRETED:
        return tl.log(x)
    return libdevice.log(x)


@triton.jit
def log2(x):
    """`log2(x)` by the hardware's approximation, for x that are not subnormal: off by 2**-22, of
    1 between 0.5 and 2 and of the result elsewhere (PTX manual, `lg2.approx.ftz.f32`)."""
    if INTERPRETED:
        return tl.log2(x)
    return tl.inline_asm_elementwise(
        "lg2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
    )


@triton.jit
def cos(x):
    """`cos(x)` as PyTorch's kernels compute it, for any x (tl.cos is that of small ones)."""
    if INTERPRETED:
        return tl.cos(x)
    return libdevice.cos(x)


@triton.jit
def sin(x):
    """`sin(x)`, likewise."""
    if INTERPRETED:
        return tl.sin(x)
    return libdevice.sin(x)


@triton.jit
def log1p(x):
    """`log(1 + x)`, right for small x."""
    if INTERPRETED:
        return _log1p_plain(x)
    return libdevice.log1p(x)


@triton.jit
def _log1p_plain(x):
    """The correction of the HP-15C: the rounding of 1 + x cancels in the quotient."""
    y = 1.0 + x
    ratio = tl.where(y == 1.0, 1.0, x / tl.where(y == 1.0, 1.0, y - 1.0))
    return tl.where(y == 1.0, x, tl.log(y) * ratio)
