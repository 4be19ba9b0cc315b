"""What a model asks of attention: the shape of one rank's heads."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from baton.core.kv import KVShape


@dataclass(frozen=True)
class GQASpec:
    """Grouped-query attention (arXiv 2305.13245): `num_heads` query heads of this rank over
    `num_kv_heads`; `scale` multiplies the scores."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float

    @property
    def kv_shape(self) -> KVShape:
        """What a token leaves in the cache."""
        return KVShape(self.num_kv_heads, self.head_dim, self.head_dim)


@dataclass(frozen=True)
class MLASpec:
    """Multi-head latent attention (arXiv 2405.04434, 2.1): one latent of `latent_dim` and one
    rotated part of `rope_dim` per token, shared by this rank's `num_heads`."""

    num_heads: int
    latent_dim: int
    nope_dim: int
    rope_dim: int
    value_dim: int
    scale: float

    @property
    def kv_shape(self) -> KVShape:
        """What a token leaves in the cache."""
        return KVShape(1, self.latent_dim + self.rope_dim, self.latent_dim, shared_value=True)


AttentionSpec = GQASpec | MLASpec


@dataclass(frozen=True)
class AttentionNeed:
    """What a backend must be able to serve; `half` None asks for whatever it has."""

    spec: AttentionSpec
    dtype: torch.dtype
    device: torch.device
    half: Literal["prefill", "decode"] | None = None
