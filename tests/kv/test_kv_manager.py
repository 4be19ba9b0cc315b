"""Pages: identity, sharing, eviction order, integrity."""

from __future__ import annotations

import random

import pytest

from baton.kv.index import BlockIndex
from baton.kv.manager import KVManager, KVSequence
from baton.kv.pool import PagePool


def fill(kv: KVManager, tokens: list[int], salt: str = "") -> tuple[KVSequence, int]:
    """A sequence with all of `tokens` computed and sealed; also its hit tokens."""
    sequence = kv.open(salt)
    hit = kv.hold(sequence, kv.match(sequence, tokens))
    assert kv.grow(sequence, len(tokens)) is not None
    kv.seal(sequence, tokens, len(tokens))
    return sequence, hit


def test_pool_states() -> None:
    evicted: list[int] = []
    pool = PagePool(4, evicted.append)
    assert pool.take(5) is None
    pages = pool.take(3)
    assert pages == [0, 1, 2]
    pool.hold([1])
    assert not pool.drop([1], keep={1})
    assert pool.held == 3
    assert pool.drop([0, 1], keep={1}) == [0]
    assert (pool.held, pool.idle, pool.available) == (1, 1, 3)
    pool.check([[2]])
    assert pool.take(3) == [0, 3, 1]
    assert evicted == [1]
    with pytest.raises(AssertionError):
        pool.check([[2]])


def test_digest_is_a_chain_over_tokens_namespace_and_salt() -> None:
    index = BlockIndex(b"model")
    first = index.digest(index.root(""), [1, 2, 3, 4])
    assert len(first) == 32
    assert index.digest(first, [1, 2, 3, 4]) != first
    assert index.digest(index.root("tenant"), [1, 2, 3, 4]) != first
    assert index.root("a") != BlockIndex(b"modela").root("")
    assert BlockIndex(b"other").digest(BlockIndex(b"other").root(""), [1, 2, 3, 4]) != first


def test_hit_leaves_one_token_to_compute() -> None:
    kv = KVManager(16, 4, b"x")
    tokens = list(range(12))
    sequence, hit = fill(kv, tokens)
    assert hit == 0
    assert fill(kv, tokens)[1] == 8
    assert fill(kv, [*tokens, 99])[1] == 12
    assert fill(kv, tokens[:3])[1] == 0
    assert fill(kv, [7, *tokens[1:]])[1] == 0
    assert sequence.sealed == 3


def test_salt_and_switch_keep_prefixes_apart() -> None:
    kv = KVManager(16, 4, b"x")
    fill(kv, list(range(9)), "a")
    assert fill(kv, list(range(9)), "b")[1] == 0
    assert fill(kv, list(range(9)), "a")[1] == 8
    off = KVManager(16, 4, b"x", prefix_caching=False)
    fill(off, list(range(9)))
    assert fill(off, list(range(9)))[1] == 0


def test_unsealed_pages_are_never_hit() -> None:
    kv = KVManager(16, 4, b"x")
    first = kv.open()
    assert kv.grow(first, 8) == [0, 1]
    assert len(kv.match(kv.open(), list(range(9))).pages) == 0
    kv.seal(first, list(range(8)), 4)
    assert len(kv.match(kv.open(), list(range(9))).pages) == 1


def test_equal_pages_are_named_once() -> None:
    kv = KVManager(16, 4, b"x")
    one, two = kv.open(), kv.open()
    for sequence in (one, two):
        kv.grow(sequence, 8)
    kv.seal(one, list(range(8)), 8)
    kv.seal(two, list(range(8)), 8)
    kv.release(two)
    assert kv.cached == 0
    kv.release(one)
    assert kv.cached == 2
    kv.check([])


def test_eviction_from_the_leaf_up() -> None:
    kv = KVManager(4, 4, b"x", track_freed=True)
    sequence, _ = fill(kv, list(range(16)))
    kv.release(sequence)
    other = kv.open("other")
    assert kv.grow(other, 5) == [3, 2]
    assert kv.drain_freed() == [3, 2]
    assert kv.drain_freed() == []
    assert len(kv.match(kv.open(), list(range(16))).pages) == 2
    assert kv.grow(kv.open(), 12) is None
    kv.check([other])


def test_check_notices_a_lost_reference() -> None:
    kv = KVManager(4, 4, b"x")
    sequence, _ = fill(kv, list(range(8)))
    kv.check([sequence])
    sequence.pages.pop()
    with pytest.raises(AssertionError):
        kv.check([sequence])


class PaperCache:
    """An LRU over prefixes that knows nothing of digests, pages or reference counts.

    `order` lists prefixes, least recently released first; `holders` counts who uses each now.
    """

    def __init__(self, capacity: int, page: int) -> None:
        self.capacity, self.page = capacity, page
        self.order: list[tuple[int, ...]] = []
        self.holders: dict[tuple[int, ...], int] = {}
        self.private = 0  # pages in use that have no name
        self.open: dict[int, tuple[list[tuple[int, ...]], int]] = {}

    def start(self, key: int, tokens: list[int]) -> int | None:
        """Run a request; hit tokens, or None when it does not fit."""
        names = [tuple(tokens[:end]) for end in range(self.page, len(tokens) + 1, self.page)]
        hit = 0
        while hit < (len(tokens) - 1) // self.page and self._known(names[hit]):
            hit += 1
        total = -(-len(tokens) // self.page)
        idle_after = sum(name not in names[:hit] for name in self.order)
        used = len(self.holders) + sum(name in self.order for name in names[:hit]) + self.private
        if self.capacity - used < total - hit:
            return None
        spare = self.capacity - used - idle_after
        for name in names[:hit]:
            self._hold(name)
        for _ in range(max(0, total - hit - spare)):
            self.order.pop(0)
        mine = names[:hit]
        private = total - len(names)
        for name in names[hit:]:
            if self._known(name):
                private += 1  # somebody else's copy has the name
            else:
                self._hold(name)
                mine.append(name)
        self.private += private
        self.open[key] = (mine, private)
        return hit * self.page

    def stop(self, key: int) -> None:
        """End a request: its prefixes become the most recent, the shortest last."""
        names, private = self.open.pop(key)
        self.private -= private
        for name in reversed(names):
            self.holders[name] -= 1
            if self.holders[name] == 0:
                del self.holders[name]
                self.order.append(name)

    def _known(self, name: tuple[int, ...]) -> bool:
        return name in self.holders or name in self.order

    def _hold(self, name: tuple[int, ...]) -> None:
        if name in self.order:
            self.order.remove(name)
        self.holders[name] = self.holders.get(name, 0) + 1


@pytest.mark.parametrize("seed", range(40))
def test_hits_equal_an_lru_on_paper(seed: int) -> None:
    rng = random.Random(seed)
    page, capacity = rng.choice([1, 2, 4]), rng.choice([6, 12, 30])
    kv, paper = KVManager(capacity, page, b"x"), PaperCache(capacity, page)
    live: dict[int, KVSequence] = {}
    hits = 0
    for key in range(200):
        # Two symbols and short lengths: most prefixes recur.
        tokens = [
            rng.randrange(2) for _ in range(rng.randint(1, min(10, capacity) * page // 2 + 1))
        ]
        sequence = kv.open()
        want = paper.start(key, tokens)
        before = kv.hold(sequence, kv.match(sequence, tokens))
        if kv.grow(sequence, len(tokens)) is None:
            assert want is None
            kv.release(sequence)
            # On paper nothing happened; here the hit pages became the most recent.
            paper_touch(paper, tokens, before)
        else:
            assert before == want
            hits += before
            kv.seal(sequence, tokens, len(tokens))
            live[key] = sequence
        kv.check(live.values())
        while len(live) > rng.choice([0, 1, 3]):
            gone = rng.choice(sorted(live))
            kv.release(live.pop(gone))
            paper.stop(gone)
    assert hits > 0


def paper_touch(paper: PaperCache, tokens: list[int], hit: int) -> None:
    for end in range(hit, 0, -paper.page):
        name = tuple(tokens[:end])
        if name in paper.order:
            paper.order.remove(name)
            paper.order.append(name)


def test_digests_taken_from_the_sequence_before_are_its_own() -> None:
    """Whatever two prompts have in common, and whatever was matched in between."""
    rng = random.Random(5)
    shared = [rng.randrange(1000) for _ in range(700)]
    manager = KVManager(256, 4, b"n")
    for _ in range(60):
        tokens = shared[: rng.randrange(1, 700)] + [rng.randrange(3) for _ in range(9)]
        salt = rng.choice(("", "other"))
        sequence = manager.open(salt)
        manager.match(sequence, tokens)
        if rng.random() < 0.5 and manager.grow(sequence, len(tokens)) is not None:
            manager.seal(sequence, tokens, len(tokens))
            manager.release(sequence)
        alone = KVManager(1, 4, b"n").open(salt)
        fresh = KVManager(256, 4, b"n")
        assert fresh.grow(alone, len(tokens)) is not None
        fresh.seal(alone, tokens, len(tokens))
        assert sequence.chain == alone.chain[: len(sequence.chain)]
