"""Turning token ids into text as they arrive: only complete text, at constant cost per token.

What `push` returns and `flush` adds, joined, is what decoding all ids at once gives. Two kinds of
vocabulary cover the models served and are exact for any ids; other decoders go through a window.
"""

from __future__ import annotations

import codecs
import json
from collections.abc import Callable, Iterable
from typing import Protocol

from tokenizers import Tokenizer as Backend

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
_SPACE = "\N{LOWER ONE EIGHTH BLOCK}"  # SentencePiece writes a space so
#: the window decoder waits this many tokens for a character to complete
_PATIENCE = 16


class Joiner(Protocol):
    """State of one stream: pieces of text in, complete text out."""

    def push(self, ids: Iterable[int]) -> str:
        """Text that `ids` completed."""

    def flush(self) -> str:
        """What is left; incomplete characters become U+FFFD."""


class Detokenizer:
    """One output stream. Not shared between threads."""

    def __init__(self, joiner: Joiner, hidden: frozenset[int]) -> None:
        self._joiner = joiner
        self._hidden = hidden

    def push(self, ids: list[int]) -> str:
        """The complete text that these ids add, possibly empty."""
        return self._joiner.push(one for one in ids if one not in self._hidden)

    def flush(self) -> str:
        """End of the stream: what was held back (a cut character reads as U+FFFD)."""
        return self._joiner.flush()


class Pieces:
    """How a tokenizer's ids become text, for streams and for single tokens. Thread-safe.

    Args:
        backend: the tokenizer; it must not change afterwards.
    """

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._bytes: dict[int, bytes] = {}
        decoder = json.loads(backend.decoder.__getstate__()) if backend.decoder else {}
        stages = decoder.get("decoders", [decoder])
        kinds = [stage.get("type") for stage in stages]
        self._strip = 0
        self._piece: Callable[[str], bytes] | None = None
        self.joiner: Callable[[], Joiner]
        if kinds == ["ByteLevel"]:
            self._piece = _byte_level
            self.joiner = lambda: _ByteLevel(self.bytes)
        elif _is_sentencepiece(stages):
            self._piece = _sentencepiece
            self._strip = stages[-1].get("start", 0)
            self.joiner = lambda: _ByteFallback(self.name, self._strip)
        else:
            self.joiner = lambda: _Window(self._decode)

    def name(self, token_id: int) -> str:
        """The vocabulary's own spelling; empty for ids outside it, which decode to nothing."""
        return self._backend.id_to_token(token_id) or ""

    def bytes(self, token_id: int) -> bytes:
        """The bytes a token stands for; part of a character for some."""
        found = self._bytes.get(token_id)
        if found is None:
            if self._piece is None:
                found = self._decode([token_id]).encode()
            else:
                found = self._piece(self.name(token_id))
            self._bytes[token_id] = found
        return found

    def _decode(self, ids: list[int]) -> str:
        text: str = self._backend.decode(ids, skip_special_tokens=False)
        return text


def _is_sentencepiece(stages: list[dict[str, object]]) -> bool:
    """Exactly the decoder of SentencePiece BPE with byte fallback (Llama 2, Mistral, Gemma)."""
    expected: list[dict[str, object]] = [
        {"type": "Replace", "pattern": {"String": _SPACE}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
    ]
    if stages[:3] != expected:
        return False
    rest = stages[3:]
    return not rest or (
        len(rest) == 1
        and rest[0].get("type") == "Strip"
        and rest[0].get("content") == " "
        and rest[0].get("stop") == 0
    )


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's printable stand-in for each byte -> the byte."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in plain]
    table = {chr(byte): byte for byte in plain}
    return table | {chr(256 + index): byte for index, byte in enumerate(others)}


ALPHABET = _byte_alphabet()


def _byte_level(piece: str) -> bytes:
    """Added tokens are plain text: a piece with any character outside the alphabet is one."""
    try:
        return bytes(ALPHABET[char] for char in piece)
    except KeyError:
        return piece.encode()


def _byte_of(piece: str) -> int | None:
    """The byte of a `<0xE2>` piece."""
    if len(piece) == 6 and piece.startswith("<0x") and piece.endswith(">"):
        try:
            return int(piece[3:5], 16)
        except ValueError:
            return None
    return None


def _sentencepiece(piece: str) -> bytes:
    byte = _byte_of(piece)
    return piece.replace(_SPACE, " ").encode() if byte is None else bytes([byte])


class _ByteLevel:
    """Byte-level BPE: every token is bytes, and text is their UTF-8."""

    def __init__(self, bytes_of: Callable[[int], bytes]) -> None:
        self._bytes_of = bytes_of
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, ids: Iterable[int]) -> str:
        return self._utf8.decode(b"".join(map(self._bytes_of, ids)))

    def flush(self) -> str:
        return self._utf8.decode(b"", True)


class _ByteFallback:
    """SentencePiece: tokens are text, except runs of byte tokens, which are text only if the
    whole run is UTF-8 (otherwise each byte reads as U+FFFD). A run is held until it ends."""

    def __init__(self, name_of: Callable[[int], str], strip: int) -> None:
        self._name_of = name_of
        self._strip = strip
        self._run = bytearray()

    def push(self, ids: Iterable[int]) -> str:
        parts: list[str] = []
        for one in ids:
            piece = self._name_of(one)
            byte = _byte_of(piece)
            if byte is not None:
                self._run.append(byte)
            elif piece:
                parts += self._end_run(), piece.replace(_SPACE, " ")
        return self._stripped("".join(parts))

    def flush(self) -> str:
        return self._stripped(self._end_run())

    def _end_run(self) -> str:
        run, self._run = bytes(self._run), bytearray()
        try:
            return run.decode()
        except UnicodeDecodeError:
            return REPLACEMENT * len(run)

    def _stripped(self, text: str) -> str:
        """Without the spaces that the decoder takes from the very start of the output."""
        while self._strip and text:
            if text[0] != " ":
                self._strip = 0
                break
            text = text[1:]
            self._strip -= 1
        return text


class _Window:
    """Any other decoder: decode the last tokens with and without the new ones and return the
    difference. Exact as long as a token's text depends only on the few tokens before it."""

    def __init__(self, decode: Callable[[list[int]], str]) -> None:
        self._decode = decode
        self._seen: list[int] = []  # context whose text is out
        self._held: list[int] = []

    def push(self, ids: Iterable[int]) -> str:
        return "".join(map(self._one, ids))

    def flush(self) -> str:
        before = self._decode(self._seen)
        text = self._decode(self._seen + self._held)[len(before) :]
        self._seen, self._held = [], []
        return text

    def _one(self, token_id: int) -> str:
        self._held.append(token_id)
        before, after = self._decode(self._seen), self._decode(self._seen + self._held)
        incomplete = len(after) <= len(before) or after.endswith(REPLACEMENT)
        if incomplete and len(self._held) < _PATIENCE:
            return ""
        self._seen, self._held = (self._seen + self._held)[-_PATIENCE:], []
        # the context shrank: what it now decodes to is not what was sent, only its length counts
        return after[len(before) :]
