"""Where weights come from: one small interface over safetensors shards, GGUF and dummy weights."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import torch


class Checkpoint(Protocol):
    """Named tensors that are read only when asked for.

    Names are those of a Hugging Face checkpoint of the family (`model.layers.0...`), whatever the
    file's own scheme is.
    """

    def names(self) -> list[str]:
        """Every tensor name."""

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor, without reading it."""

    def file(self, name: str) -> str:
        """Path of the file that holds the tensor, for error messages."""

    def read(self, name: str) -> torch.Tensor:
        """The tensor on the CPU, unpacked to a floating dtype where the file is quantised."""
