"""How keys and values lie in pages. A format is a plug-in: bytes, store, gather, poison."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch

from baton.core.errors import ConfigError
from baton.core.kv import KVShape, KVView
from baton.core.registry import Registry
from baton.ops.dtypes import torch_dtype
from baton.ops.kv_pages import store_tokens


class KVFormat(ABC):
    """One way of keeping a layer's keys and values."""

    @abstractmethod
    def bytes_per_token(self, shape: KVShape) -> int:
        """Bytes that one token takes in one layer of `shape`."""

    @abstractmethod
    def view(
        self,
        shape: KVShape,
        num_pages: int,
        page_size: int,
        compute_dtype: torch.dtype,
        device: torch.device,
    ) -> KVView:
        """Allocate one layer's pages."""


class DenseFormat(KVFormat):
    """Values as they are, in one floating dtype."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype

    def bytes_per_token(self, shape: KVShape) -> int:
        return shape.width * self.dtype.itemsize

    def view(
        self,
        shape: KVShape,
        num_pages: int,
        page_size: int,
        compute_dtype: torch.dtype,
        device: torch.device,
    ) -> KVView:
        return DenseView(shape, num_pages, page_size, self.dtype, compute_dtype, device)


class DenseView:
    """One layer's pages in one dtype; a KVView.

    Pages are laid out `[page, head, offset, dim]`: a head's tokens are then contiguous, in the
    page and after `gather`. Memory is left as it comes: readers never look past a sequence's
    length, and `poison` proves it. With `shape.shared_value` only keys are kept, and values are
    their first columns.
    """

    def __init__(
        self,
        shape: KVShape,
        num_pages: int,
        page_size: int,
        dtype: torch.dtype,
        compute_dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.shape, self.page_size, self._compute_dtype = shape, page_size, compute_dtype
        size = num_pages, shape.heads, page_size
        self._key = torch.empty(*size, shape.key_dim, dtype=dtype, device=device)
        self._value = (
            self._key[..., : shape.value_dim]
            if shape.shared_value
            else torch.empty(*size, shape.value_dim, dtype=dtype, device=device)
        )
        self._heads = torch.arange(shape.heads, device=device)[None, :, None]

    def store(self, slots: torch.Tensor, key: torch.Tensor, value: torch.Tensor | None) -> None:
        """See KVView. Rounds to the format's dtype."""
        key_pages, value_pages = self.paged()
        store_tokens(slots, key_pages, key, value_pages, value)

    def gather(
        self, pages: torch.Tensor, out: tuple[torch.Tensor, torch.Tensor] | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See KVView."""
        key_out, value_out = (None, None) if out is None else out
        rows = (pages[:, None] * self.shape.heads + self._heads).flatten()
        size = pages.shape[0], self.shape.heads, pages.shape[1] * self.page_size
        key = self._rows(self._key, rows, size, key_out)
        if self.shape.shared_value:
            return key, key[..., : self.shape.value_dim]
        return key, self._rows(self._value, rows, size, value_out)

    def _rows(
        self,
        store: torch.Tensor,
        rows: torch.Tensor,
        size: tuple[int, int, int],
        out: torch.Tensor | None,
    ) -> torch.Tensor:
        # One row per (page, head): index_select then copies long runs.
        flat = store.view(store.shape[0] * store.shape[1], -1)
        if out is None:
            return flat.index_select(0, rows).to(self._compute_dtype).view(*size, -1)
        if store.dtype == out.dtype:
            torch.index_select(flat, 0, rows, out=out.view(rows.shape[0], -1))
            return out
        return out.copy_(flat.index_select(0, rows).view(out.shape))

    def paged(self) -> tuple[torch.Tensor, torch.Tensor]:
        """See KVView. Strided views of the memory."""
        return self._key.transpose(1, 2), self._value.transpose(1, 2)

    def poison(self, pages: torch.Tensor) -> None:
        """See KVView."""
        self._key[pages] = torch.nan
        if not self.shape.shared_value:
            self._value[pages] = torch.nan


FLOAT64 = DenseFormat(torch.float64)
FLOAT32 = DenseFormat(torch.float32)
BFLOAT16 = DenseFormat(torch.bfloat16)
FLOAT16 = DenseFormat(torch.float16)

FORMATS: Registry[KVFormat] = Registry(
    "KV format",
    {
        name: f"baton.kv.format:{name.upper()}"
        for name in ("float32", "bfloat16", "float16", "float64")
    },
)


def make_views(
    shapes: Sequence[KVShape],
    num_pages: int,
    page_size: int,
    kv_dtype: str,
    compute_dtype: str | torch.dtype,
    device: str | torch.device,
) -> list[KVView]:
    """Pages of every layer, allocated.

    Raises:
        ConfigError: when `kv_dtype` is no format, or a size is not positive.
    """
    if num_pages < 1 or page_size < 1:
        raise ConfigError(f"KV pool of {num_pages} pages of {page_size} tokens: must be positive")
    form, dtype, where = FORMATS.get(kv_dtype), torch_dtype(compute_dtype), torch.device(device)
    return [form.view(shape, num_pages, page_size, dtype, where) for shape in shapes]


def bytes_per_page(shapes: Sequence[KVShape], page_size: int, kv_dtype: str) -> int:
    """Bytes that one page takes over all layers of this rank."""
    form = FORMATS.get(kv_dtype)
    return page_size * sum(form.bytes_per_token(shape) for shape in shapes)
