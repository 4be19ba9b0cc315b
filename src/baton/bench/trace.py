"""Request traces in Mooncake's JSONL form, read with care and scaled without losing structure.

A line is `{"timestamp": ms, "input_length": tokens, "output_length": tokens, "hash_ids": [...]}`
with one id for each block of 512 prompt tokens, the last for the partial tail. Equal ids mean the
same block after the same prefix (Qin et al., Mooncake, FAST'25).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np

from baton.core.errors import BatonError, ConfigError

BLOCK = 512


class TraceError(BatonError):
    """A trace file is not what it should be; names the file and the line."""


@dataclass(frozen=True)
class TraceRequest:
    """One request: seconds from the start, lengths in tokens, ids of its blocks of `BLOCK`."""

    at: float
    input_length: int
    output_length: int
    hash_ids: tuple[int, ...]


def read_trace(path: str | Path, limit: int | None = None) -> list[TraceRequest]:
    """The first `limit` requests of a trace file (all when None).

    Raises:
        TraceError: naming the line, for anything that is not a valid request.
    """
    try:
        with open(path, encoding="utf-8") as lines:
            return _parse(lines, str(path), limit)
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise TraceError(f"{path}: cannot be read: {reason}") from None


def _parse(lines: Iterable[str], name: str, limit: int | None) -> list[TraceRequest]:
    requests: list[TraceRequest] = []
    for number, line in enumerate(lines, start=1):
        if limit is not None and len(requests) >= limit:
            break
        if not line.strip():
            continue
        try:
            request = _request(line)
            if requests and request.at < requests[-1].at:
                raise ValueError("timestamp goes back")
        except ValueError as error:
            raise TraceError(f"{name}:{number}: {error}") from None
        requests.append(request)
    if not requests:
        raise TraceError(f"{name}: no requests in it")
    return requests


def _request(line: str) -> TraceRequest:
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"not JSON: {error}") from None
    if not isinstance(row, dict):
        raise ValueError(f"expected a JSON object, got {type(row).__name__}")
    length = _count(row, "input_length", least=1)
    ids = row.get("hash_ids")
    if not isinstance(ids, list) or not all(type(i) is int and i >= 0 for i in ids):
        raise ValueError("hash_ids must be a list of non-negative integers")
    expected = -(-length // BLOCK)
    if len(ids) != expected:
        raise ValueError(
            f"hash_ids has {len(ids)} ids, but {length} tokens are {expected} blocks of {BLOCK}"
        )
    at = _count(row, "timestamp", least=0) / 1000
    return TraceRequest(at, length, _count(row, "output_length", least=1), tuple(ids))


def _count(row: dict[str, Any], key: str, least: int) -> int:
    if key not in row:
        raise ValueError(f"{key} is missing")
    value = row[key]
    if type(value) is not int or value < least:
        raise ValueError(f"{key} must be an integer of at least {least}, got {value!r}")
    return value


def write_trace(path: str | Path, requests: Iterable[TraceRequest]) -> None:
    """Write requests in the form that `read_trace` reads; times are rounded to milliseconds."""
    with open(path, "w", encoding="utf-8") as out:
        for request in requests:
            row = {
                "timestamp": round(request.at * 1000),
                "input_length": request.input_length,
                "output_length": request.output_length,
                "hash_ids": list(request.hash_ids),
            }
            out.write(json.dumps(row) + "\n")


class PromptMaker:
    """Token ids for traces: equal block ids give equal tokens, different ids different ones.

    Each block of 512 tokens becomes `512 * scale` tokens, so requests share exactly the same
    scaled blocks as before; a partial tail becomes the first `ceil(tail * scale)` tokens of its
    block. The first tokens of a block spell its id, which keeps different blocks apart for sure.

    Args:
        scale: length scale in (0, 1] with whole scaled blocks, for example 1/64.
        vocab: token ids are drawn from [low, high).
        seed: another seed gives other tokens, for example to miss a warm cache.

    Raises:
        ConfigError: the scale splits blocks, or the range is empty.
    """

    def __init__(
        self, scale: Fraction, vocab: tuple[int, int] = (256, 32000), seed: int = 0
    ) -> None:
        low, high = vocab
        if low < 0 or high - low < 2:
            raise ConfigError(f"vocabulary range {low}:{high} is empty")
        block = scale * BLOCK
        if not 0 < scale <= 1 or block.denominator != 1:
            raise ConfigError(
                f"length scale {scale} makes {float(block):g} tokens of a block of {BLOCK}: "
                f"use 1/N with N a divisor of {BLOCK}"
            )
        self.scale, self.block = scale, int(block)
        self._low, self._span, self._seed = low, high - low, seed
        self._blocks: dict[int, list[int]] = {}

    def prompt(self, request: TraceRequest) -> list[int]:
        """The token ids of a request's prompt."""
        full = request.input_length // BLOCK
        tokens = [token for i in request.hash_ids[:full] for token in self._tokens(i)]
        tail = self.length(request) - len(tokens)
        return tokens + self._tokens(request.hash_ids[-1])[:tail] if tail else tokens

    def length(self, request: TraceRequest) -> int:
        """Tokens of the scaled prompt."""
        full, tail = divmod(request.input_length, BLOCK)
        return full * self.block + -(-tail * self.scale.numerator // self.scale.denominator)

    def _tokens(self, block_id: int) -> list[int]:
        tokens = self._blocks.get(block_id)
        if tokens is None:
            rest = block_id
            digits: list[int] = []
            while rest or not digits:
                rest, digit = divmod(rest, self._span)
                digits.append(digit)
            if len(digits) > self.block:
                raise TraceError(
                    f"block id {block_id} cannot be told apart in {self.block} token(s) of "
                    f"{self._span} values: use a larger --length-scale or --vocab"
                )
            draw = np.random.default_rng([self._seed, block_id])
            drawn = draw.integers(0, self._span, self.block).tolist()
            drawn[: len(digits)] = [(digit + self._seed) % self._span for digit in digits]
            tokens = self._blocks[block_id] = [self._low + value for value in drawn]
        return tokens


@dataclass(frozen=True)
class Job:
    """One request as it will be sent: seconds from the start, prompt ids, tokens to generate."""

    at: float
    prompt: list[int]
    max_tokens: int


def make_jobs(
    requests: Sequence[TraceRequest],
    maker: PromptMaker,
    *,
    time_scale: float = 1.0,
    output_scale: Fraction | None = None,
    max_tokens: int | None = None,
) -> Iterator[Job]:
    """Scaled requests in trace order, the first at time 0.

    Args:
        time_scale: times are multiplied by it; 0 sends everything at once.
        output_scale: scale of output lengths (at least 1 token stays); the maker's when None.
        max_tokens: requests whose prompt and output together are longer are cut: blocks leave
            the end of the prompt, so that prefixes stay shared.
    """
    scale = maker.scale if output_scale is None else output_scale
    start = requests[0].at
    for request in requests:
        output = max(1, -(-request.output_length * scale.numerator // scale.denominator))
        if max_tokens is not None:
            output = min(output, max(1, max_tokens // 2))
            request = _cut(request, maker, max_tokens - output)
        yield Job((request.at - start) * time_scale, maker.prompt(request), output)


def _cut(request: TraceRequest, maker: PromptMaker, most: int) -> TraceRequest:
    if maker.length(request) <= most:
        return request
    blocks = max(1, most // maker.block)
    return replace(request, input_length=blocks * BLOCK, hash_ids=request.hash_ids[:blocks])


def span(requests: Sequence[TraceRequest]) -> float:
    """Seconds between the first and the last arrival."""
    return requests[-1].at - requests[0].at
