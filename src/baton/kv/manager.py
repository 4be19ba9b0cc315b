"""Pages of every sequence: prefix hits, growth, sealing, release.

    match, hold -> grow ... grow -> seal (after commit) ... -> release
    share hits    take pages         name full pages         idle or free, leaf first

A page is written by one sequence only, and only while it is not sealed. It is sealed (may be hit
by others) after the step that computed its last token has committed.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from baton.kv.index import BlockIndex
from baton.kv.pool import PagePool


class Match(NamedTuple):
    """Pages of a prefix that can be shared; nobody holds `idle` of them now. Valid until pages
    are next taken or released."""

    pages: list[int]
    idle: int


@dataclass(slots=True, eq=False)
class KVSequence:
    """One sequence's page table and digests.

    `pages[i]` holds tokens `[i * page_size, (i + 1) * page_size)`; the first `sealed` of them
    were offered to the index. `chain[0]` is the root and `chain[i + 1]` the digest of page i;
    tokens never change, so the chain outlives a release and each page is hashed once.
    """

    chain: list[bytes]
    pages: list[int] = field(default_factory=list)
    sealed: int = 0


class KVManager:
    """`num_pages` pages of `page_size` tokens. All counts are in pages unless a name says tokens.

    `namespace` must cover everything that makes KV incompatible. `track_freed` records the ids of
    pages whose content became worthless, for `drain_freed`. `looks_ahead`: a position's KV depends
    on the token behind it too (an MTP module's does), so a match's last page is computed again.
    """

    def __init__(
        self,
        num_pages: int,
        page_size: int,
        namespace: bytes,
        prefix_caching: bool = True,
        track_freed: bool = False,
        looks_ahead: bool = False,
    ) -> None:
        self.num_pages = num_pages
        self.page_size = page_size
        self.prefix_caching = prefix_caching
        self._index = BlockIndex(namespace)
        self._pool = PagePool(num_pages, self._evicted)
        self._track_freed, self._looks_ahead = track_freed, looks_ahead
        self._freed: list[int] = []
        #: tokens and chain of the sequence before
        self._matched: tuple[Sequence[int], list[bytes]] = ([], [b""])

    @property
    def available(self) -> int:
        """Pages that can be taken now, evicting idle ones."""
        return self._pool.available

    @property
    def used(self) -> int:
        """Pages held by sequences."""
        return self._pool.held

    @property
    def cached(self) -> int:
        """Pages nobody holds whose content may still be hit."""
        return self._pool.idle

    def pages_for(self, num_tokens: int) -> int:
        """Pages that hold `num_tokens` tokens."""
        return -(-num_tokens // self.page_size)

    def open(self, salt: str = "") -> KVSequence:
        """A sequence that holds nothing; `salt` keeps its prefixes apart from other tenants'."""
        return KVSequence([self._index.root(salt)])

    def match(self, sequence: KVSequence, tokens: Sequence[int], most: int | None = None) -> Match:
        """The longest cached prefix of `tokens`, of at most `most` of them; by default it leaves
        one token to compute. Holds nothing. Costs one hash per page the first time and one look-up
        per page after that."""
        if not self.prefix_caching:
            return Match([], 0)
        self._borrow(sequence, tokens)
        chain, most = sequence.chain, len(tokens) - 1 if most is None else most
        full = most // self.page_size
        pages = self._index.find(chain[1 : full + 1])
        while len(pages) == len(chain) - 1 < full:  # all that are hashed are hits
            self._extend(sequence, tokens)
            pages += self._index.find(chain[-1:])
        if self._looks_ahead:
            pages = pages[:-1]
        return Match(pages, self._pool.idle_among(pages))

    def hold(self, sequence: KVSequence, match: Match) -> int:
        """Let an empty sequence start with the pages of its match; tokens it need not compute."""
        assert not sequence.pages, "a sequence that holds pages cannot start from the cache"
        self._pool.hold(match.pages)
        sequence.pages = list(match.pages)
        sequence.sealed = len(match.pages)
        return len(match.pages) * self.page_size

    def grow(self, sequence: KVSequence, num_tokens: int) -> list[int] | None:
        """New pages so that the table covers `num_tokens` tokens; None, and no change, when there
        are not enough even after eviction."""
        pages = self._pool.take(self.pages_for(num_tokens) - len(sequence.pages))
        if pages is not None:
            sequence.pages.extend(pages)
        return pages

    def seal(self, sequence: KVSequence, tokens: Sequence[int], computed: int) -> None:
        """Offer the full pages among the first `computed` tokens to the index. Call only when the
        step that computed them has committed."""
        full = computed // self.page_size
        if self.prefix_caching:
            while len(sequence.chain) <= full:
                self._extend(sequence, tokens)
            for number in range(sequence.sealed, full):
                self._index.insert(sequence.chain[number + 1], sequence.pages[number])
        sequence.sealed = full

    def release(self, sequence: KVSequence) -> None:
        """Give all pages back. The leaf end becomes idle first, so that it is evicted first and a
        parent outlives its children. No step in flight may still read or write the pages."""
        freed = self._pool.drop(reversed(sequence.pages), keep=self._index.named)
        if self._track_freed:
            self._freed += freed
        sequence.pages = []
        sequence.sealed = 0

    def drain_freed(self) -> list[int]:
        """Pages whose content became worthless since the last call. Poison them on the device
        after `plan()` and before that plan runs: some may be handed out again in it."""
        freed, self._freed = self._freed, []
        return freed

    def check(self, sequences: Iterable[KVSequence]) -> None:
        """Assert integrity, given every sequence that holds pages."""
        tables = [sequence.pages for sequence in sequences]
        self._pool.check(tables)
        self._index.check()
        held = {page for table in tables for page in table}
        alive = sum(page in held or self._pool.idle_among([page]) for page in self._index)
        assert alive == len(self._index), "a free page is indexed"
        assert self.cached <= alive, "an idle page is not indexed"

    def _borrow(self, sequence: KVSequence, tokens: Sequence[int]) -> None:
        """Let a new sequence take the digests that it shares with the one before it: requests with
        a long prefix in common often follow one another, and comparing costs less than hashing."""
        other, chain = self._matched
        self._matched = tokens, sequence.chain
        if len(sequence.chain) == 1 and chain[0] == sequence.chain[0]:
            pages = min(len(chain) - 1, len(tokens) // self.page_size)
            stride = 64 * self.page_size
            for start in range(0, pages * self.page_size, stride):
                if tokens[start : start + stride] != other[start : start + stride]:
                    pages = start // self.page_size  # the few of this stride are hashed again
                    break
            sequence.chain.extend(chain[1 : pages + 1])

    def _extend(self, sequence: KVSequence, tokens: Sequence[int]) -> None:
        """Hash the next page of a sequence."""
        start = (len(sequence.chain) - 1) * self.page_size
        page = tokens[start : start + self.page_size]
        sequence.chain.append(self._index.digest(sequence.chain[-1], page))

    def _evicted(self, page: int) -> None:
        self._index.remove(page)
        if self._track_freed:
            self._freed.append(page)
