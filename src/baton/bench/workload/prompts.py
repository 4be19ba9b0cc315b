"""From a job's segments to the prompt in a request body: token ids, or text.

Every token is a pure function of seed, segment id and position, so that equal segments are equal
in any process and order. No tokens are stored: a prompt of 512K tokens is made in a few
milliseconds when it is due.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import msgspec
import numpy as np

from baton.bench.workload.job import WorkloadError
from baton.core.errors import ConfigError

Segments = Sequence[tuple[int, int]]

#: English of a usual tokenizer: characters of a token, the space included
CHARACTERS = 4.4


class PromptMaker(Protocol):
    """Makes the JSON of a prompt."""

    def json(self, segments: Segments) -> bytes:
        """The prompt as a JSON value."""


class TokenPrompts:
    """Prompts as token ids. The first tokens of a segment spell its id, so that different segments
    differ from the start; the others are drawn from `vocab` by a hash.

    Args:
        vocab: token ids are drawn from [low, high).
        seed: another seed gives other tokens, for example to miss a warm cache.

    Raises:
        ConfigError: the range is empty.
    """

    def __init__(self, vocab: tuple[int, int] = (256, 32000), seed: int = 0) -> None:
        low, high = vocab
        if low < 0 or high - low < 2 or high > 2**31:
            raise ConfigError(
                f"vocabulary range {low}:{high}: expected LOW:HIGH with at least two ids in it"
            )
        self._low, self._span, self._seed = low, high - low, seed
        # cells of one width, padded with blanks (which JSON allows), make the text of a prompt a
        # single lookup of its ids
        width = len(str(high - 1)) + 1
        cells = [f"{token},".rjust(width) for token in range(low, high)]
        self._cells = np.array(cells, dtype=f"S{width}")

    def digits(self, segment: int) -> int:
        """Tokens that spell a segment's id."""
        count = 1
        while segment >= self._span**count:
            count += 1
        return count

    def offsets(self, segments: Segments) -> np.ndarray:
        """The prompt's tokens, counted from `low`."""
        lengths = np.array([length for _, length in segments])
        ids = np.array([segment for segment, _ in segments], dtype=np.uint64)
        starts = np.cumsum(lengths) - lengths
        position = np.arange(lengths.sum()) - np.repeat(starts, lengths)
        drawn = _mix(np.repeat(_mix(ids, self._seed + 1), lengths) + position.astype(np.uint64))
        tokens = (drawn % np.uint64(self._span)).astype(np.int64)
        for (segment, length), start in zip(segments, starts, strict=True):
            for place in range(min(self.digits(segment), length)):
                segment, digit = divmod(segment, self._span)
                tokens[start + place] = (digit + self._seed) % self._span
        return tokens

    def ids(self, segments: Segments) -> list[int]:
        """The prompt's token ids."""
        ids: list[int] = (self.offsets(segments) + self._low).tolist()
        return ids

    def json(self, segments: Segments) -> bytes:
        """The prompt as a JSON list of ids."""
        text: bytes = self._cells[self.offsets(segments)].tobytes()
        return b"[" + text[:-1] + b"]"


def _mix(values: np.ndarray, seed: int = 0) -> np.ndarray:
    """The 64-bit finaliser of SplitMix (Steele, Lea and Flood, OOPSLA 2014), after adding a
    multiple of its gamma for the seed."""
    golden = 0x9E3779B97F4A7C15
    mixed = values + np.uint64((seed + 1) * golden % 2**64)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return np.asarray(mixed ^ (mixed >> np.uint64(31)))


class TextPrompts:
    """Prompts as English text, for servers that take no token ids: each segment begins with its id
    and goes on with prose from a place that the id decides. Lengths are about right: a tokenizer's
    own count comes back in the server's usage.

    Args:
        corpus: the prose; that of the Python manual which comes with the interpreter when None.
        chat: the prompt becomes a list with one user message instead of a string.
    """

    def __init__(self, seed: int = 0, corpus: Path | None = None, chat: bool = False) -> None:
        self._words = _read_words(corpus)
        self._seed, self._chat = seed, chat
        self.digest = hashlib.sha256(" ".join(self._words).encode()).hexdigest()[:16]

    def text(self, segments: Segments) -> str:
        """The prompt."""
        return "".join(self._segment(segment, tokens) for segment, tokens in segments)

    def json(self, segments: Segments) -> bytes:
        """The prompt as a JSON string, or as chat messages."""
        text = self.text(segments)
        value = [{"role": "user", "content": text}] if self._chat else text
        return msgspec.json.encode(value)

    def _segment(self, segment: int, tokens: int) -> str:
        size = round(tokens * CHARACTERS)
        start = int(_mix(np.array([segment], dtype=np.uint64), self._seed + 1)[0])
        at = start % len(self._words)
        pieces = [f" {segment + self._seed}:"]
        length = len(pieces[0])
        while length < size:
            word = self._words[at]
            pieces.append(word)
            length += len(word) + 1
            at = (at + 1) % len(self._words)
        return " ".join(pieces)[:size]


def _read_words(corpus: Path | None) -> list[str]:
    if corpus is None:
        from pydoc_data.topics import topics

        text = " ".join(topics[name] for name in sorted(topics))
    else:
        try:
            text = corpus.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else str(error)
            raise WorkloadError(f"{corpus}: cannot be read: {reason}") from None
    words = text.split()
    if not words:
        raise WorkloadError(f"{corpus}: no words in it: expected a text file")
    return words
