"""Reading the GGUF container: metadata and tensor directory, checked against the file's length.

Layout (the GGUF specification, versions 2 and 3, little endian): magic, version, tensor count,
metadata count, metadata, tensor infos, padding to `general.alignment`, tensor data.
Only the header is parsed here, in one pass over a memory map; tensor bytes are paged in when read.
"""

from __future__ import annotations

import mmap
import struct
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

from baton.core.errors import ModelError

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_STRING, _ARRAY = 8, 9
#: GGUF scalar type -> struct code
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q"}
_SCALARS |= {12: "d"}


@dataclass(frozen=True)
class TensorInfo:
    """One entry of the directory. `shape` is in PyTorch's order, `offset` from the file start."""

    name: str
    shape: tuple[int, ...]
    kind: GGMLQuantizationType
    offset: int
    size: int


class GGUFFile:
    """A GGUF file's metadata (`fields`) and tensors (`tensors`), both in file order.

    Raises:
        ModelError: not a GGUF file, a version or tensor type that is not known, or a file that
            ends before what its header promises; the message names the tensor or key.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with open(path, "rb") as file:
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except (OSError, ValueError) as error:
            raise ModelError(
                file=path, problem=f"cannot be read: {error}", expected="a GGUF file"
            ) from None
        self._at = 0
        self.fields: dict[str, Any] = {}
        self.tensors: dict[str, TensorInfo] = {}
        try:
            self._parse()
        except UnicodeDecodeError as error:
            raise self._error(f"holds text that is not UTF-8: {error}", "UTF-8 names") from None

    def data(self, name: str) -> npt.NDArray[np.uint8]:
        """Raw bytes of a tensor as read-only uint8 `[size]`, not copied."""
        info = self.tensors[name]
        return np.frombuffer(self._map, dtype=np.uint8, count=info.size, offset=info.offset)

    def header(self) -> memoryview:
        """Bytes before the tensor data, for digests."""
        return memoryview(self._map)[: self._at]

    def _error(self, problem: str, expected: str, tensor: str | None = None) -> ModelError:
        return ModelError(file=self.path, problem=problem, expected=expected, tensor=tensor)

    def _parse(self) -> None:
        if self._map[:4] != _MAGIC:
            raise self._error(f"starts with {bytes(self._map[:4])!r}", "the GGUF magic b'GGUF'")
        self._at = 4
        version = self._scalar("I", "the version")
        if version not in _VERSIONS:
            raise self._error(f"has GGUF version {version}", f"version {_VERSIONS} little endian")
        tensors, keys = self._scalar("Q", "counts"), self._scalar("Q", "counts")
        for number in range(keys):
            key = self._string(f"metadata key {number} of {keys}")
            kind = self._scalar("I", f"metadata key {key!r}")
            self.fields[key] = self._value(kind, f"metadata key {key!r}")
        infos = [self._info(number, tensors) for number in range(tensors)]
        align = self.fields.get("general.alignment", 32)
        if not isinstance(align, int) or align <= 0 or align & (align - 1):
            raise self._error(f"general.alignment is {align!r}", "a power of two")
        self._at += -self._at % align
        for info in infos:
            self._add(info)

    def _add(self, info: TensorInfo) -> None:
        """Place one tensor behind the header; its bytes must lie within the file."""
        if info.name in self.tensors:
            raise self._error("is listed twice", "unique names", info.name)
        end = self._at + info.offset + info.size
        if end > len(self._map):
            raise self._error(
                f"the file ends at byte {len(self._map)}, inside or before this tensor",
                f"{info.size} bytes of {info.kind.name} up to byte {end}; fetch the file again",
                info.name,
            )
        self.tensors[info.name] = TensorInfo(
            info.name, info.shape, info.kind, self._at + info.offset, info.size
        )

    def _take(self, size: int, what: str) -> int:
        """Move over `size` bytes and return where they start."""
        start = self._at
        if start + size > len(self._map):
            raise self._error(
                f"ends at byte {len(self._map)}, inside its header ({what})",
                f"at least {start + size} bytes; fetch the file again",
            )
        self._at = start + size
        return start

    def _scalar(self, code: str, what: str) -> Any:
        start = self._take(struct.calcsize("<" + code), what)
        return struct.unpack_from("<" + code, self._map, start)[0]

    def _string(self, what: str) -> str:
        size = self._scalar("Q", what)
        start = self._take(size, what)
        return self._map[start : start + size].decode()

    def _value(self, kind: int, what: str) -> Any:
        if kind == _STRING:
            return self._string(what)
        if kind in _SCALARS:
            return self._scalar(_SCALARS[kind], what)
        if kind != _ARRAY:
            raise self._error(f"{what} has value type {kind}", "a type of GGUF version 3")
        inner, count = self._scalar("I", what), self._scalar("Q", what)
        if inner == _STRING:
            return self._strings(count, what)
        if inner not in _SCALARS:
            raise self._error(f"{what} is an array of type {inner}", "numbers or strings")
        code = _SCALARS[inner]
        start = self._take(count * struct.calcsize("<" + code), what)
        return list(struct.unpack_from(f"<{count}{code}", self._map, start))

    def _strings(self, count: int, what: str) -> list[str]:
        """An array of strings; vocabularies have 10^5 of them, so this loop is kept tight."""
        values, data, at, end = [], self._map, self._at, len(self._map)
        length = struct.Struct("<Q").unpack_from
        for _ in range(count):
            stop = at + 8 + (length(data, at)[0] if at + 8 <= end else 0)
            if stop > end or at + 8 > end:
                self._take(stop - self._at, what)
            values.append(data[at + 8 : stop].decode())
            at = stop
        self._at = at
        return values

    def _info(self, number: int, count: int) -> TensorInfo:
        name = self._string(f"tensor {number} of {count}")
        what = f"directory entry of tensor {name!r}"
        dims = [self._scalar("Q", what) for _ in range(self._scalar("I", what))]
        raw, offset = self._scalar("I", what), self._scalar("Q", what)
        try:
            kind = GGMLQuantizationType(raw)
        except ValueError:
            raise self._error(f"has tensor type {raw}", "a known GGML type", name) from None
        block, size = GGML_QUANT_SIZES[kind]
        if not dims or dims[0] % block:
            raise self._error(
                f"has dimensions {dims}", f"rows in whole blocks of {block} for {kind.name}", name
            )
        # GGML lists the fastest dimension first
        return TensorInfo(name, tuple(reversed(dims)), kind, offset, prod(dims) // block * size)
