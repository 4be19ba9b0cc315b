"""The one type through which attention sees the KV cache, and the shape of what it stores."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch


@dataclass(frozen=True)
class KVShape:
    """What one token leaves behind in one layer, on one rank.

    GQA: `heads` KV heads with keys of `key_dim` and values of `value_dim`.
    MLA: one head; key = latent (`value_dim`) followed by the shared RoPE part, and the value is
    the first `value_dim` columns of the key, so nothing is stored twice (`shared_value`).
    """

    heads: int
    key_dim: int
    value_dim: int
    shared_value: bool = False

    @property
    def width(self) -> int:
        """Elements stored per token and layer."""
        per_head = self.key_dim if self.shared_value else self.key_dim + self.value_dim
        return self.heads * per_head


class KVView(Protocol):
    """One layer's pages. `slots` are flat positions: page id * page_size + offset."""

    shape: KVShape
    page_size: int

    def store(self, slots: torch.Tensor, key: torch.Tensor, value: torch.Tensor | None) -> None:
        """Write `key [T, heads, key_dim]` and `value [T, heads, value_dim]` (None for MLA) at
        `slots [T]` int64."""

    def gather(
        self, pages: torch.Tensor, out: tuple[torch.Tensor, torch.Tensor] | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Every token on `pages [B, P]` int64, as `(key [B, heads, P * page_size, key_dim], value
        [B, heads, P * page_size, value_dim])` in the compute dtype. What was never stored comes
        as it is, NaN perhaps. `out` (same shapes) is written to and returned, to save the
        allocation; its value is ignored with `shape.shared_value`."""

    def poison(self, pages: torch.Tensor) -> None:
        """Debug: overwrite `pages [P]` int64 so that a stale read shows (NaN)."""

    def paged(self) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Raw `(key, value)` page tensors `[num_pages, page_size, heads, dim]` for kernels that
        read them in place, or None when the format cannot be read without unpacking."""
