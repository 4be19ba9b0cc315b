"""How much text one token can stand for: what is too long for a model is known before the work."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from tokenizers import Tokenizer as Backend
from tokenizers.models import BPE

from baton.models.detokenizer import ALPHABET

#: stages before the vocabulary that drop nothing, unless their "behavior" says so
_KEEP = {"ByteLevel", "Digits", "Metaspace", "Punctuation", "Split"}
#: NFC makes a text at most so many times shorter, in UTF-8: decomposing a character takes off at
#: most two of three bytes (K of Kelvin's sign), and composing again two thirds (Hangul)
_NFC = 9


@dataclass(frozen=True)
class Span:
    """A token stands for `most` bytes of UTF-8 at most, beside bytes that the vocabulary does not
    have, `unknown`: these may be dropped, or any number of them be one token."""

    most: int
    unknown: bytes = b""

    @classmethod
    def of(cls, backend: Backend) -> Span | None:
        """Of a tokenizer; None where nothing bounds it. Known are vocabularies of byte pairs, of
        bytes or with all of them to fall back on."""
        before = _stages(backend.pre_tokenizer, "pretokenizers")
        for stage in before:
            if stage["type"] not in _KEEP or stage.get("behavior") == "Removed":
                return None
        added = backend.get_added_tokens_decoder().values()
        if any(token.lstrip or token.rstrip for token in added):
            return None
        found = _vocabulary(backend, any(stage["type"] == "ByteLevel" for stage in before))
        if found is None:
            return None
        most = max([found.most, *(len(token.content.encode()) for token in added)])
        for stage in _stages(backend.normalizer, "normalizers"):
            if stage["type"] == "NFC" and not found.unknown:
                most *= _NFC
            elif not _lengthens(stage):
                return None
        return cls(most, found.unknown)

    def least_tokens(self, text: bytes) -> int:
        """Tokens that a text, in UTF-8, has at least."""
        return -(-len(text.translate(None, self.unknown)) // self.most)


def _vocabulary(backend: Backend, byte_level: bool) -> Span | None:
    if not isinstance(backend.model, BPE):
        return None
    vocabulary = backend.get_vocab(with_added_tokens=False)
    if byte_level:  # a character for each byte
        unknown = bytes(byte for char, byte in ALPHABET.items() if char not in vocabulary)
        return Span(max(map(len, vocabulary), default=1), unknown)
    whole = all(f"<0x{byte:02X}>" in vocabulary for byte in range(256))
    if not (whole and backend.model.byte_fallback):
        return None
    return Span(max(len(token.encode()) for token in vocabulary))


def _lengthens(stage: dict[str, Any]) -> bool:
    """Whether a normalizer never makes a text shorter."""
    if stage["type"] != "Replace":
        return bool(stage["type"] == "Prepend")
    old = stage["pattern"].get("String")  # else a regular expression
    return old is not None and len(stage["content"].encode()) >= len(old.encode())


def _stages(part: Any, inner: str) -> list[dict[str, Any]]:
    """A normalizer or pre-tokenizer as a list of those that it consists of."""
    if part is None:
        return []
    waiting, found = [json.loads(part.__getstate__())], []
    while waiting:
        stage = waiting.pop()
        if stage["type"] == "Sequence":
            waiting += stage[inner]
        else:
            found.append(stage)
    return found
