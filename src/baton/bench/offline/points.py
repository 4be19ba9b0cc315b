"""The points an engine is measured at: prompt lengths, and batches at a context length."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from baton.core.errors import ConfigError

#: tokens that a decode point generates after the first
DECODE_STEPS = 64
#: prompts in one measurement up to which it is repeated
REPEATED_TOKENS = 65536

TTFT = (1024, 4096, 16384, 65536, 131072)
DECODE = ((1, 1024), (16, 1024), (64, 1024), (128, 1024), (1, 65536), (8, 65536))

_PAIR = re.compile(r"([0-9]+)x([0-9]+)")


@dataclass(frozen=True)
class Limits:
    """What an engine can hold; None: not known yet.

    max_len: longest sequence in tokens. max_seqs: sequences at once. pages: of `page_size` tokens.
    """

    max_len: int | None = None
    max_seqs: int | None = None
    pages: int | None = None
    page_size: int = 1


@dataclass(frozen=True)
class Point:
    """`decode_steps` 0: time to the first token of one prompt of `context` tokens. Else: time per
    step of `batch` sequences with prompts of `context` tokens."""

    batch: int
    context: int
    decode_steps: int = 0

    @property
    def name(self) -> str:
        """As in tables and files: `"ttft 4096"`, `"decode 8x65536"`."""
        if self.decode_steps:
            return f"decode {self.batch}x{self.context}"
        return f"ttft {self.context}"

    @property
    def length(self) -> int:
        """Longest sequence it needs, prompt and output, in tokens."""
        return self.context + 1 + self.decode_steps

    def repeats(self, most: int) -> int:
        """How often it is measured: once when its prompts are long, else `most` times."""
        return most if self.batch * self.context <= REPEATED_TOKENS else 1

    def misfit(self, limits: Limits) -> str:
        """Why an engine of these limits cannot run it; "" when it can."""
        if limits.max_len is not None and self.length > limits.max_len:
            return f"needs {self.length} tokens, more than the max_model_len of {limits.max_len}"
        if limits.max_seqs is not None and self.batch > limits.max_seqs:
            return f"needs {self.batch} sequences, more than the max_num_seqs of {limits.max_seqs}"
        pages = self.batch * -(-self.length // limits.page_size)
        if limits.pages is not None and pages > limits.pages:
            return f"needs {pages} KV pages, the pool has {limits.pages}"
        return ""


def ttft_points(text: str) -> list[Point]:
    """From `"1024,4096"`; nothing from "".

    Raises:
        ConfigError: naming the part that is no length.
    """
    points = []
    for part in _parts(text):
        if not part.isdecimal() or int(part) < 1:
            raise ConfigError(f"--ttft {part!r}: write prompt lengths, for example 1024,4096")
        points.append(Point(1, int(part)))
    return points


def decode_points(text: str) -> list[Point]:
    """From `"1x1024,8x65536"`; nothing from "".

    Raises:
        ConfigError: naming the part that is no pair.
    """
    points = []
    for part in _parts(text):
        pair = _PAIR.fullmatch(part)
        if pair is None or min(int(pair[1]), int(pair[2])) < 1:
            raise ConfigError(
                f"--decode {part!r}: write BATCHxCONTEXT, both at least 1, for example 8x65536"
            )
        points.append(Point(int(pair[1]), int(pair[2]), DECODE_STEPS))
    return points


def default_points() -> list[Point]:
    """The grid that the published peers were measured on."""
    return [Point(1, n) for n in TTFT] + [Point(b, c, DECODE_STEPS) for b, c in DECODE]


def require_fit(points: Iterable[Point], limits: Limits) -> None:
    """Refuse points that the engine cannot run.

    Raises:
        ConfigError: naming the first such point and the limit.
    """
    for point in points:
        why = point.misfit(limits)
        if why:
            raise ConfigError(f"{point.name} {why}")


def _parts(text: str) -> list[str]:
    return list(dict.fromkeys(part.strip() for part in text.split(",") if part.strip()))
