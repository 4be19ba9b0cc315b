"""Rotary positions: frequencies of every scaling kind, and the rotation itself.

RoPE: arXiv 2104.09864. YaRN: arXiv 2309.00071. The llama3 kind is the ramp of Llama 3.1's
release; linear is position interpolation (arXiv 2306.15595).
"""

from __future__ import annotations

import math

import torch

from baton.config.model import RopeConfig
from baton.ops.dispatch import on_gpu


def inverse_frequencies(rope: RopeConfig, dtype: torch.dtype) -> torch.Tensor:
    """Radians per position of each rotated pair, `[dim / 2]` in `dtype` (float32 or float64).

    Raises:
        ValueError: for a kind that is not implemented.
    """
    exponent = torch.arange(0, rope.dim, 2, dtype=dtype) / rope.dim
    base = 1.0 / (rope.theta**exponent)
    if rope.kind == "default":
        return base
    if rope.kind == "linear":
        return base / rope.scaling["factor"]
    if rope.kind == "llama3":
        return _llama3(base, rope.scaling)
    if rope.kind == "yarn":
        return _yarn(base, rope)
    raise ValueError(f"unknown rope kind {rope.kind!r}")


def _llama3(base: torch.Tensor, scaling: dict[str, float]) -> torch.Tensor:
    """Slow pairs are interpolated, fast ones kept, those between blended."""
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    turns = scaling["original_max_position_embeddings"] * base / (2 * math.pi)
    keep = ((turns - low) / (high - low)).clamp(0, 1)
    return (1 - keep) * base / scaling["factor"] + keep * base


def _yarn(base: torch.Tensor, rope: RopeConfig) -> torch.Tensor:
    """NTK-by-parts (YaRN 3.2): a ramp over pair indices from kept to interpolated."""
    scaling = rope.scaling
    original = scaling["original_max_position_embeddings"]

    def pair(rotations: float) -> float:
        numerator = rope.dim * math.log(original / (rotations * 2 * math.pi))
        return numerator / (2 * math.log(rope.theta))

    low = pair(scaling.get("beta_fast") or 32.0)
    high = pair(scaling.get("beta_slow") or 1.0)
    if scaling.get("truncate", 1.0):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rope.dim - 1)
    if low == high:
        high += 0.001
    index = torch.arange(rope.dim // 2, dtype=base.dtype)
    keep = 1 - ((index - low) / (high - low)).clamp(0, 1)
    return base / scaling["factor"] * (1 - keep) + base * keep


def yarn_mscale(factor: float, mscale: float = 1.0) -> float:
    """YaRN's temperature term `0.1 m ln(s) + 1` (section 3.4); 1 when nothing is stretched."""
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def attention_scaling(rope: RopeConfig) -> float:
    """Factor on cos and sin; not 1 only for YaRN, where it carries the temperature."""
    if rope.kind != "yarn":
        return 1.0
    scaling = rope.scaling
    if "attention_factor" in scaling:
        return scaling["attention_factor"]
    numerator, denominator = scaling.get("mscale", 0.0), scaling.get("mscale_all_dim", 0.0)
    if numerator and denominator:
        factor = scaling["factor"]
        return yarn_mscale(factor, numerator) / yarn_mscale(factor, denominator)
    return yarn_mscale(scaling["factor"])


def angles(
    positions: torch.Tensor, frequencies: torch.Tensor, scaling: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosine and sine of `positions` (int64 `[T]`) times `frequencies` (`[dim / 2]`, float32 or
    float64), times `scaling`: `[T, dim / 2]` each, in the dtype of frequencies."""
    if on_gpu(frequencies) and positions.is_contiguous():
        from baton.ops.triton import angles as kernels

        return kernels.angles(positions, frequencies, scaling)
    turn = positions.to(frequencies.dtype)[:, None] * frequencies
    return turn.cos() * scaling, turn.sin() * scaling


class Rotation:
    """One step's angles, made once and used by every layer: cos and sin `[T, dim / 2]`."""

    def __init__(self, cos: torch.Tensor, sin: torch.Tensor, interleaved: bool) -> None:
        self.cos, self.sin, self.interleaved = cos, sin, interleaved

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Rotate the first `dim` columns of `x [T, heads, D]`; same shape and dtype back."""
        dim = 2 * self.cos.shape[-1]
        if x.shape[-1] == dim:
            return apply_rope(x, self.cos, self.sin, self.interleaved)
        turned = apply_rope(x[..., :dim], self.cos, self.sin, self.interleaved)
        return torch.cat((turned, x[..., dim:]), -1)


def apply_rope(
    x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, interleaved: bool
) -> torch.Tensor:
    """Rotate the last dimension of `x [T, heads, dim]` by `cos`, `sin` `[T, dim / 2]`.

    Pairs are `(i, i + dim/2)` (NeoX rotate-half), or `(2i, 2i + 1)` when `interleaved`. The
    rotation runs in the tables' dtype (float32 or float64); the result has x's dtype and layout.
    """
    cos, sin = cos[:, None], sin[:, None]
    if interleaved:
        first, second = x[..., 0::2], x[..., 1::2]
        turned = torch.stack((first * cos - second * sin, second * cos + first * sin), -1)
        return turned.flatten(-2).to(x.dtype)
    first, second = x.chunk(2, dim=-1)
    turned = torch.cat((first * cos - second * sin, second * cos + first * sin), -1)
    return turned.to(x.dtype)
