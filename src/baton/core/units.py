"""Bytes and seconds, as people write and read them."""

from __future__ import annotations

import re

_SIZE = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
_SIZE |= {f"{p}i": 2 ** (10 * (i + 1)) for i, p in enumerate("kmgt")}
_TIME = {"ns": 1e-9, "us": 1e-6, "ms": 1e-3, "s": 1.0, "": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0}
_NUMBER = re.compile(r"^\s*([0-9]*\.?[0-9]+)\s*([a-zA-Z]*)\s*$")


def parse_bytes(text: str | int | float) -> int:
    """Bytes from `"512MiB"`, `"4G"`, `"1.5 GB"` or a plain number."""
    if isinstance(text, int | float):
        return int(text)
    match = _NUMBER.match(text)
    unit = match.group(2).lower().removesuffix("b") if match else None
    if match is None or unit not in _SIZE:
        raise ValueError(f"cannot read {text!r} as a size: write for example 512MiB or 4GB")
    return int(float(match.group(1)) * _SIZE[unit])


def parse_seconds(text: str | int | float) -> float:
    """Seconds from `"50ms"`, `"4s"`, `"2m"` or a plain number of seconds."""
    if isinstance(text, int | float):
        return float(text)
    match = _NUMBER.match(text)
    if match is None or match.group(2).lower() not in _TIME:
        raise ValueError(f"cannot read {text!r} as a time: write for example 50ms or 4s")
    return float(match.group(1)) * _TIME[match.group(2).lower()]


def format_bytes(size: float) -> str:
    """`1536 -> "1.50 KiB"`."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(size) < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.2f} {unit}"
        size /= 1024
    return f"{size:.2f} TiB"


def format_seconds(seconds: float) -> str:
    """`0.0123 -> "12.3 ms"`."""
    if abs(seconds) < 1e-3:
        return f"{seconds * 1e6:.0f} us"
    if abs(seconds) < 1:
        return f"{seconds * 1e3:.1f} ms"
    return f"{seconds:.2f} s"
