"""How far the noise that the sampling kernel reckons with is from what it is defined as."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from baton.ops.triton import sample

_BLOCK = 4096


@triton.jit
def _rough_noise(hashed, out, B: tl.constexpr):
    index = tl.program_id(0) * B + tl.arange(0, B)
    tl.store(out + index, sample._rough(tl.load(hashed + index)))


def edge_hashes(more: int = 2**16) -> torch.Tensor:
    """Hashes, int64: all of either end, and `more` in between, even in their logarithm."""
    few = torch.arange(2**15)
    between = (2 ** torch.linspace(8, 31, more, dtype=torch.float64)).long().clamp(max=2**31 - 1)
    return torch.cat((few, 2**31 - 1 - few, between))


def rough_noise_error(hashed: torch.Tensor) -> torch.Tensor:
    """Of int64 `hashed` in [0, 2**31), float64: what the kernel's `log2(E)` lacks."""
    count = -len(hashed) % _BLOCK
    values = torch.cat((hashed, hashed[:1].expand(count))).float()
    out = torch.empty_like(values)
    _rough_noise[(len(values) // _BLOCK,)](values, out, B=_BLOCK)
    u = (values + 0.5) * (-(2.0**-31) * (1 - 2.0**-24))  # rounded to float32, as it is defined
    return (-u.double().log1p()).log2() - out.double()
