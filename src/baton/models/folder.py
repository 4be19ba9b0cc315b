"""Folders with `config.json` and safetensors files, as Hugging Face writes them."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError, safe_open

from baton.core.errors import ModelError

if TYPE_CHECKING:  # what reads a config or a tokenizer needs no torch
    import torch

INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"
#: weights in formats that need unpickling or another framework
_FOREIGN = ("*.bin", "*.pt", "*.pth", "*.h5", "*.msgpack")


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file; ModelError when it is missing, damaged or not an object."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ModelError(file=path, problem="is missing", expected="a JSON file") from None
    except (OSError, ValueError) as error:
        raise ModelError(
            file=path, problem=f"cannot be read: {error}", expected="a JSON object"
        ) from None
    if not isinstance(value, dict):
        raise ModelError(
            file=path, problem=f"holds a {type(value).__name__}", expected="a JSON object"
        )
    return value


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files that hold the weights, in name order.

    The index decides, then `model.safetensors`, then `model*.safetensors`, then any.

    Raises:
        ModelError: no safetensors file, or one that the index lists is missing.
    """
    if (folder / INDEX).exists():
        return sorted({folder / shard for shard in _read_index(folder).values()})
    if (folder / _SINGLE).exists():
        return [folder / _SINGLE]
    for pattern in ("model*.safetensors", "*.safetensors"):
        files = sorted(folder.glob(pattern))
        if files:
            return files
    foreign = sorted(path.name for pattern in _FOREIGN for path in folder.glob(pattern))
    found = f"only {', '.join(foreign[:3])}" if foreign else "no weights"
    raise ModelError(
        file=folder,
        problem=f"has {found}",
        expected=f"{_SINGLE}, or shards with {INDEX}"
        + (" (save the model again with `save_pretrained`)" if foreign else ""),
    )


class SafetensorsCheckpoint:
    """Checkpoint over a folder. Headers are read and checked at once, tensors when asked for.

    Raises:
        ModelError: missing or damaged file, a tensor that the index places in a file that does
            not have it, a tensor in two files, or a quantisation that is not supported.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        _refuse_quantised(self.folder)
        self._where: dict[str, Path] = {}
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._open: dict[Path, Any] = {}
        for path in weight_files(self.folder):
            for name, entry in read_header(path).items():
                if name in self._where:
                    raise ModelError(
                        file=path,
                        tensor=name,
                        problem=f"is also in {self._where[name].name}",
                        expected="each tensor in one file",
                    )
                self._where[name] = path
                self._shapes[name] = tuple(entry["shape"])
        self._check_index()

    def names(self) -> list[str]:
        """Every tensor name."""
        return list(self._where)

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor, without reading it."""
        self.file(name)
        return self._shapes[name]

    def file(self, name: str) -> str:
        """Path of the file that holds the tensor."""
        path = self._where.get(name)
        if path is None:
            raise ModelError(
                file=self.folder,
                tensor=name,
                problem="is in none of the safetensors files",
                expected=f"one of their {len(self._where)} tensors",
            )
        return str(path)

    def read(self, name: str) -> torch.Tensor:
        """The tensor on the CPU, in the file's dtype; pages come from the file when touched."""
        path = Path(self.file(name))
        try:
            if path not in self._open:
                self._open[path] = safe_open(path, framework="pt", device="cpu")
            tensor: torch.Tensor = self._open[path].get_tensor(name)
        except (SafetensorError, OSError) as error:
            raise ModelError(
                file=path,
                tensor=name,
                problem=f"cannot be read: {error}",
                expected="a safetensors file",
            ) from None
        return tensor

    def _check_index(self) -> None:
        if not (self.folder / INDEX).exists():
            return
        for name, shard in _read_index(self.folder).items():
            if self._where.get(name) != self.folder / shard:
                raise ModelError(
                    file=self.folder / shard,
                    tensor=name,
                    problem="is not in this file",
                    expected=f"it here, where {INDEX} places it",
                )


def read_header(path: Path) -> dict[str, dict[str, Any]]:
    """Tensor name -> `{"dtype", "shape", "data_offsets"}`, checked against the file's length.

    Raises:
        ModelError: the file is missing, damaged, or ends inside a tensor (which is named).
    """

    def fail(problem: str, expected: str, tensor: str | None = None) -> ModelError:
        return ModelError(file=path, problem=problem, expected=expected, tensor=tensor)

    try:
        size = path.stat().st_size
        with open(path, "rb") as file:
            prefix = file.read(8)
            length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else 0
            if not 2 <= length <= size - 8:
                raise fail(f"has {size} bytes and a header of {length}", "a whole safetensors file")
            header = json.loads(file.read(length))
        header.pop("__metadata__", None)
        for name, entry in header.items():
            end = 8 + length + entry["data_offsets"][1]
            if end > size:
                raise fail(
                    f"the file ends at byte {size}, inside or before this tensor",
                    f"its data up to byte {end}; fetch the file again",
                    name,
                )
            tuple(map(int, entry["shape"]))
    except OSError as error:
        raise fail(f"cannot be read: {error.strerror}", "a safetensors file") from None
    except (ValueError, KeyError, IndexError, TypeError, AttributeError):
        raise fail("has a damaged header", "the JSON header of a safetensors file") from None
    return dict(header)


def _read_index(folder: Path) -> dict[str, str]:
    """The index's `weight_map`: tensor name -> shard in the same folder, which must exist."""
    path = folder / INDEX
    placed = read_json(path).get("weight_map")
    if not isinstance(placed, dict) or not placed:
        raise ModelError(
            file=path, problem="has no weight_map", expected="an object: tensor -> shard"
        )
    missing: dict[str, list[str]] = {}
    for name, shard in placed.items():
        if not isinstance(shard, str) or Path(shard).name != shard:
            raise ModelError(
                file=path, tensor=name, problem=f"is placed in {shard!r}", expected="a file name"
            )
        missing.setdefault(shard, []).append(name)
    for shard, names in sorted(missing.items()):
        if not (folder / shard).exists():
            raise ModelError(
                file=folder / shard,
                tensor=names[0],
                problem="the shard is missing",
                expected=f"a file with {len(names)} tensors, as {INDEX} says",
            )
    return placed


def _refuse_quantised(folder: Path) -> None:
    """No quantised safetensors format is read yet; wrong numbers would be the alternative."""
    path = folder / "config.json"
    quantised = read_json(path).get("quantization_config") if path.exists() else None
    if quantised:
        method = quantised.get("quant_method") if isinstance(quantised, dict) else quantised
        raise ModelError(
            file=path,
            problem=f"quantization_config has quant_method {method!r}",
            expected="weights in float32, float16 or bfloat16, or a GGUF file",
        )
