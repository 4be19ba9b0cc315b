"""Parameters that know which checkpoint tensors fill them, and which part this rank takes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import nn

from baton.core.errors import ConfigError
from baton.core.forward import TensorGroup

Index = tuple[int | slice, ...]


@dataclass(frozen=True)
class LayerContext:
    """What every layer is built for: dtype of weights, and the ranks that share it."""

    dtype: torch.dtype
    group: TensorGroup


@dataclass(frozen=True)
class Split:
    """This rank's contiguous share `[start, stop)` of a dimension of `total`."""

    total: int
    start: int
    stop: int

    @property
    def size(self) -> int:
        """Elements this rank holds."""
        return self.stop - self.start

    @property
    def index(self) -> slice:
        """The share as an index."""
        return slice(self.start, self.stop)


def whole(total: int) -> Split:
    """Every rank holds all of it."""
    return Split(total, 0, total)


def split_even(total: int, group: TensorGroup, what: str, width: int = 1) -> Split:
    """`total` things of `width` elements, the same number for every rank.

    Raises:
        ConfigError: when the ranks do not divide them; names both numbers.
    """
    if total % group.size:
        raise ConfigError(
            f"tensor_parallel_size {group.size} does not divide {what} ({total}); "
            f"use a size that does"
        )
    each = total // group.size * width
    return Split(total * width, group.rank * each, (group.rank + 1) * each)


def split_kv_heads(heads: int, width: int, group: TensorGroup) -> Split:
    """KV heads over ranks; where there are fewer heads than ranks, neighbours hold the same one.

    Raises:
        ConfigError: when neither number divides the other.
    """
    if heads >= group.size:
        return split_even(heads, group, "the number of KV heads", width)
    if group.size % heads:
        raise ConfigError(
            f"tensor_parallel_size {group.size} and the number of KV heads ({heads}): "
            f"one must divide the other"
        )
    head = group.rank * heads // group.size
    return Split(heads * width, head * width, (head + 1) * width)


@dataclass(frozen=True)
class Source:
    """A checkpoint tensor: its name relative to the module's parent, its whole shape, and the
    part of it that this rank takes."""

    name: str
    shape: tuple[int, ...]
    take: Index


@dataclass(frozen=True)
class Fill:
    """A region of a parameter and the checkpoint tensors that can fill it, the released name
    first. No source: the region is padding and is zeroed. `dummy` is what stands there when
    there is no checkpoint."""

    parameter: str
    into: Index
    sources: tuple[Source, ...]
    dummy: Literal["normal", "one", "zero"] = "normal"


class Weighted(nn.Module):
    """A module with parameters of its own, made without memory and filled by the loader.

    `fills` cover every element of every parameter exactly once. `columns_first`: matrices that
    lie column by column in a CPU's memory (their shape is the same): products with one or two
    rows stream such a matrix faster, which pays for a matrix as large as the vocabulary.
    """

    columns_first: frozenset[str] = frozenset()

    def __init__(self) -> None:
        super().__init__()
        self.fills: list[Fill] = []

    def declare(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        """Add parameter `name`, on the meta device until the loader gives it memory."""
        empty = torch.empty(shape, dtype=dtype, device="meta")
        self.register_parameter(name, nn.Parameter(empty, requires_grad=False))

    def derive(self) -> None:
        """Make again what is computed of the parameters once; called when they have changed."""
