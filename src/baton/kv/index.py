"""Names full pages by what they contain, so that equal prefixes share them."""

from __future__ import annotations

import hashlib
import struct
from array import array
from collections.abc import Iterator, KeysView, Sequence
from typing import cast


class BlockIndex:
    """Digest -> page and back; at most one page per digest and one digest per page.

    A page's digest is SHA-256(parent digest, token ids as the machine's int64), so it stands for
    every token up to the end of the page. The first parent is `root(salt)`, which covers the
    namespace (model, weights, tokenizer, KV format...) and the tenant.
    """

    def __init__(self, namespace: bytes) -> None:
        self._namespace = namespace
        self._pages: dict[bytes, int] = {}
        self._digests: dict[int, bytes] = {}

    def __len__(self) -> int:
        return len(self._pages)

    def __iter__(self) -> Iterator[int]:
        return iter(self._digests)

    def __contains__(self, page: int) -> bool:
        return page in self._digests

    def root(self, salt: str) -> bytes:
        """Parent digest of a sequence's first page."""
        # The length keeps (namespace "a", salt "bc") apart from (namespace "ab", salt "c").
        head = struct.pack("<q", len(self._namespace)) + self._namespace
        return hashlib.sha256(head + salt.encode()).digest()

    def digest(self, parent: bytes, tokens: Sequence[int]) -> bytes:
        """Digest of a full page of `tokens` that follows `parent`."""
        return hashlib.sha256(parent + array("q", tokens).tobytes()).digest()

    @property
    def named(self) -> KeysView[int]:
        """Every page that has a digest, now and later."""
        return self._digests.keys()

    def find(self, digests: Sequence[bytes]) -> list[int]:
        """Pages of the leading digests that have one. A long prefix is thousands of them, so what
        is done for each is left to the interpreter's own loops."""
        found = list(map(self._pages.get, digests))
        known = found.index(None) if None in found else len(found)
        return cast(list[int], found[:known])

    def insert(self, digest: bytes, page: int) -> None:
        """Name `page`; a digest that is already named keeps its first page."""
        if digest not in self._pages:
            self._pages[digest] = page
            self._digests[page] = digest

    def remove(self, page: int) -> None:
        """Forget a page whose content is about to be overwritten."""
        del self._pages[self._digests.pop(page)]

    def check(self) -> None:
        """Assert that both directions agree."""
        assert len(self._pages) == len(self._digests), "index directions differ in size"
        for digest, page in self._pages.items():
            assert self._digests.get(page) == digest, f"page {page} is indexed one way only"
