"""Text to hide facts in: Python's standard library, seeded prose, and noise.

Prose is made here, so that an evaluation reads the same on every machine; the library's sources
are real text, and differ from one Python to the next.
"""

from __future__ import annotations

import sysconfig
import zlib
from functools import cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from baton.core.errors import ConfigError
from baton.evals.seeds import Purpose, stream

Bytes = NDArray[np.uint8]

_LICENCES = Path("/usr/share/common-licenses")
_HELD_OUT = 16  # one file in so many is kept for evaluation
_LARGEST = 400_000  # bytes of a file; larger ones are tables

_ONSETS = list("bcdfghklmnprstvw")
_VOWELS = [*"aeiou", "ai", "ea", "oo"]
_CODAS = [*"bdglmnprst", "ck", "nd", "ng", "rk", "sh", "th"]
NOISE = b"The tide goes out and the tide comes in. The lamp is lit. Here we are, and here we stay. "


def sources(held_out: bool) -> Bytes:
    """The standard library's sources and licence texts of this machine as one run of bytes.

    Args:
        held_out: the sixteenth of the files (by a hash of the name) that training never reads,
            or the rest.

    Raises:
        ConfigError: this Python came without sources.
    """
    library = Path(sysconfig.get_path("stdlib"))
    files = [p for p in library.rglob("*.py") if "site-packages" not in p.parts]
    files += [p for p in _LICENCES.glob("*") if p.is_file()] if _LICENCES.is_dir() else []
    found = []
    for path in sorted(files):
        kept = zlib.crc32(path.name.encode()) % _HELD_OUT == 0
        if kept == held_out and path.stat().st_size < _LARGEST:
            found.append(path.read_bytes())
    if not found:
        raise ConfigError(f"no Python sources under {library}: they are the text to read")
    return np.frombuffer(b"\n".join(found), np.uint8)


@cache
def prose(purpose: Purpose, seed: int, size: int) -> Bytes:
    """`size` bytes of sentences over invented words with Zipf frequencies.

    The words are the same for every purpose, the sentences are not.
    """
    words = _words()
    rng = stream(purpose, 0x9805E, seed)
    weight = 1.0 / (np.arange(len(words)) + 2.0)
    picks = iter(rng.choice(len(words), size // 3 + 64, p=weight / weight.sum()).tolist())
    lengths = iter(rng.integers(4, 14, size // 16 + 64).tolist())
    out, total = [], 0
    while total < size:
        sentence = " ".join(words[next(picks)] for _ in range(next(lengths)))
        sentence = sentence[0].upper() + sentence[1:] + ". "
        out.append(sentence)
        total += len(sentence)
    return np.frombuffer("".join(out).encode()[:size], np.uint8)


def _words() -> list[str]:
    """Six hundred pronounceable words, short ones first: frequent words are short."""
    rng = stream("evaluation", 0x3089)
    made: dict[str, None] = {}
    while len(made) < 600:
        syllables = 1 + (len(made) > 80) + (len(made) > 350)
        parts = [rng.choice(part) for _ in range(syllables) for part in (_ONSETS, _VOWELS)]
        made["".join(parts) + rng.choice(_CODAS)] = None
    return list(made)
