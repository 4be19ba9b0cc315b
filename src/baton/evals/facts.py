"""Facts and questions about them, as rows of tokens: the families that retrieval is judged by.

A fact is `<def> key value`, a question its mark, what it asks for, and the answer. A question
comes later than the facts it needs; how much later is a matter of `time`, a number in (0, 1) that
`context` turns into an order. Everything is vectorised: training reads millions of tokens a second.

Families, with the RULER task (arXiv 2404.06654) or other task that each one stands for:

- `ask`: one fact (niah single and multi-key, by what lies around it);
- `last`: the newest of several values of a key (override);
- `nth`: the n-th of several values of a key (OpenAI's MRCR);
- `all`: every value of a key, oldest first (niah multi-value);
- `trace`: a chain of facts, each hop written out (variable tracking, pointer chain);
- `deep`: a chain of two facts, only its end written out (alias -> key -> value at once);
- `same`: whether two keys have the same value (comparison);
- `copy`: a span repeated without any mark (induction).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace

import numpy as np
from numpy.typing import NDArray

from baton.evals import vocab

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]

FAMILIES = ("ask", "last", "nth", "all", "trace", "deep", "same", "copy", "top")
WIDTH = 32  #: most tokens of an item
HOPS = 4  #: most hops of a chain
FACT = 1 + 2 * vocab.KEY  #: tokens of a fact, and of a plain question


@dataclass
class Items:
    """Facts and questions; a row each.

    tokens: `[M, WIDTH]`, of which `length [M]` count.
    answer: first column of the answer, `[M]`; `length` where nothing is asked.
    family: index into `FAMILIES`, `[M]`.
    time: `[M]`; a question's is later than those of its facts.
    source: row of the fact that is asked for (the oldest of several), `[M]`; -1 for a fact.
    """

    tokens: Ints
    length: Ints
    answer: Ints
    family: Ints
    time: Floats
    source: Ints

    @staticmethod
    def stack(*parts: Items) -> Items:
        """All rows; sources are rows of the result already."""
        return Items(*(np.concatenate([getattr(p, f.name) for p in parts]) for f in fields(Items)))

    @staticmethod
    def join(parts: list[Items]) -> Items:
        """All rows of parts that do not know one another: sources are renumbered."""
        first = np.cumsum([0] + [len(part.length) for part in parts])
        moved = (
            replace(part, source=np.where(part.source < 0, -1, part.source + start))
            for start, part in zip(first, parts, strict=False)
        )
        return Items.stack(*moved)

    @property
    def size(self) -> int:
        """Tokens in all."""
        return int(self.length.sum())


class Bank:
    """Symbols of one context: keys that are all different, and values.

    Args:
        rng: the context's stream.
        alphabet: symbols in use here, at most `vocab.SYMBOLS`; fewer make keys more alike.
        twins: share of keys that differ from another in one symbol only.
        most: keys that may be taken.
    """

    def __init__(self, rng: np.random.Generator, alphabet: int, twins: float, most: int) -> None:
        # room for four times as many keys as are needed, or drawing different ones takes long
        while alphabet < vocab.SYMBOLS and alphabet**vocab.KEY < 4 * most:
            alphabet *= 2
        self.alphabet = min(alphabet, vocab.SYMBOLS)
        self._rng, self._taken = rng, 0
        self.symbols = vocab.SYMBOL + rng.permutation(vocab.SYMBOLS)[: self.alphabet]
        draw = rng.integers(0, self.alphabet, (2 * most + 16, vocab.KEY))
        copies = int(twins * most)
        if copies:
            near = draw[rng.integers(0, len(draw), copies)]
            where = np.arange(copies), rng.integers(0, vocab.KEY, copies)
            near[where] = (near[where] + rng.integers(1, self.alphabet, copies)) % self.alphabet
            draw = np.concatenate((near, draw))
        code = draw @ self.alphabet ** np.arange(vocab.KEY)
        _, first = np.unique(code, return_index=True)
        keep = np.sort(first)[: max(most, copies)]
        self._keys = draw[rng.permutation(keep)]

    def keys(self, *shape: int) -> Ints:
        """`[*shape, KEY]`, different from one another and from all taken before."""
        count = int(np.prod(shape))
        found = self._keys[self._taken : self._taken + count]
        if len(found) < count:
            raise ValueError(f"{count} keys wanted, {len(found)} of {len(self._keys)} left")
        self._taken += count
        taken: Ints = self.symbols[found].reshape(*shape, vocab.KEY)
        return taken

    def values(self, *shape: int) -> Ints:
        """`[*shape, KEY]`, any."""
        found: Ints = self.symbols[self._rng.integers(0, self.alphabet, (*shape, vocab.KEY))]
        return found


def items(family: str, columns: list[Ints | int], answer: int, time: Floats, source: Ints) -> Items:
    """Rows whose tokens are `columns` side by side (`[M, n]` each, or one token for all)."""
    count = len(time)
    tokens = np.zeros((count, WIDTH), np.int64)
    at = 0
    for column in columns:
        width = 1 if isinstance(column, int) else column.shape[1]
        tokens[:, at : at + width] = column
        at += width
    code = FAMILIES.index(family)
    return Items(
        tokens, np.full(count, at), np.full(count, answer), np.full(count, code), time, source
    )


def facts(family: str, keys: Ints, values: Ints, time: Floats) -> Items:
    """`<def> key value` rows of `[M, KEY]` keys and values."""
    none = np.full(len(time), -1)
    return items(family, [vocab.DEF, keys, values], FACT, time, none)


def later(rng: np.random.Generator, time: Floats) -> Floats:
    """A time after each of `time`: half of them anywhere, half at a log-uniform distance."""
    room = 1.0 - time
    near = room * np.exp(rng.uniform(np.log(1e-3), 0.0, time.shape))
    far = room * rng.random(time.shape)
    after: Floats = time + np.where(rng.random(time.shape) < 0.5, near, far)
    return after


def ask(rng: np.random.Generator, bank: Bank, size: int) -> Items:
    """Plain facts; each is asked for once, or more often."""
    count = max(1, int(size / (3 * FACT)))
    key, value, time = bank.keys(count), bank.values(count), rng.random(count)
    pick = np.concatenate((np.arange(count), rng.integers(0, count, count)))
    question = items(
        "ask", [vocab.ASK, key[pick], value[pick]], 1 + vocab.KEY, later(rng, time[pick]), pick
    )
    return Items.stack(facts("ask", key, value, time), question)


def _groups(
    rng: np.random.Generator, bank: Bank, size: int, asked: float, most: int
) -> tuple[Ints, Ints, Floats]:
    """Keys `[G, KEY]` with R values each, `[G, R, KEY]`, and their times, sorted, `[G, R]`."""
    repeats = int(rng.integers(2, most + 1))
    groups = max(1, int(size / (FACT * repeats + asked)))
    time = np.sort(rng.random((groups, repeats)), axis=1)
    return bank.keys(groups), bank.values(groups, repeats), time


def _group_facts(family: str, key: Ints, value: Ints, time: Floats) -> Items:
    repeats = time.shape[1]
    return facts(family, np.repeat(key, repeats, 0), value.reshape(-1, vocab.KEY), time.ravel())


def last(rng: np.random.Generator, bank: Bank, size: int) -> Items:
    """Keys with several values; the newest at the time of the question is asked for."""
    key, value, time = _groups(rng, bank, size, FACT, 4)
    groups, repeats = time.shape
    when = later(rng, time[:, min(1, repeats - 1)])
    newest = (time < when[:, None]).sum(1) - 1
    row = np.arange(groups)
    columns: list[Ints | int] = [vocab.LAST, key, value[row, newest]]
    question = items("last", columns, 1 + vocab.KEY, when, row * repeats + newest)
    return Items.stack(_group_facts("last", key, value, time), question)


def nth(rng: np.random.Generator, bank: Bank, size: int) -> Items:
    """Keys with several values; the n-th is asked for, by one question in two for the key."""
    key, value, time = _groups(rng, bank, size, 2 * FACT, vocab.MOST)
    groups, repeats = time.shape
    row = np.repeat(np.arange(groups), 2)
    when = later(rng, time[row, -1])
    n = rng.integers(0, repeats, 2 * groups)
    mark = (vocab.NTH + n)[:, None]
    columns: list[Ints | int] = [mark, key[row], value[row, n]]
    question = items("nth", columns, 1 + vocab.KEY, when, row * repeats + n)
    return Items.stack(_group_facts("nth", key, value, time), question)


def every(rng: np.random.Generator, bank: Bank, size: int) -> Items:
    """Keys with several values, all of which are asked for."""
    key, value, time = _groups(rng, bank, size, 1 + 4 * vocab.KEY, 4)
    groups, repeats = time.shape
    columns: list[Ints | int] = [vocab.ALL, key, value.reshape(groups, -1)]
    when = later(rng, time[:, -1])
    question = items("all", columns, 1 + vocab.KEY, when, np.arange(groups) * repeats)
    return Items.stack(_group_facts("all", key, value, time), question)


def _chain(
    rng: np.random.Generator, bank: Bank, size: int, family: str, hops: int
) -> tuple[Ints, Floats, Items]:
    """Nodes `[G, hops + 1, KEY]`, the latest time of each chain, and its facts."""
    asked = 1 + vocab.KEY * (hops + 1)
    groups = max(1, int(size / (FACT * hops + asked)))
    nodes, time = bank.keys(groups, hops + 1), rng.random((groups, hops))
    flat = nodes[:, :-1].reshape(-1, vocab.KEY), nodes[:, 1:].reshape(-1, vocab.KEY)
    return nodes, time.max(1), facts(family, *flat, time.ravel())


def trace(rng: np.random.Generator, bank: Bank, size: int) -> Items:
    """Chains of two to four facts; a question writes every hop."""
    hops = int(rng.integers(2, HOPS + 1))
    nodes, time, known = _chain(rng, bank, size, "trace", hops)
    groups = len(nodes)
    columns: list[Ints | int] = [vocab.TRACE, nodes.reshape(groups, -1)]
    source = np.arange(groups) * hops
    return Items.stack(known, items("trace", columns, 1 + vocab.KEY, later(rng, time), source))


def deep(rng: np.random.Generator, bank: Bank, size: int) -> Items:
    """Chains of two facts; a question writes only the end."""
    nodes, time, known = _chain(rng, bank, size, "deep", 2)
    columns: list[Ints | int] = [vocab.DEEP, nodes[:, 0], nodes[:, 2]]
    source = np.arange(len(nodes)) * 2
    return Items.stack(known, items("deep", columns, 1 + vocab.KEY, later(rng, time), source))


def same(rng: np.random.Generator, bank: Bank, size: int) -> Items:
    """Pairs of keys, half of them with the same value."""
    groups = max(1, int(size / (2 * FACT + 2 + 2 * vocab.KEY)))
    key, value, time = bank.keys(groups, 2), bank.values(groups, 2), rng.random((groups, 2))
    equal = rng.random(groups) < 0.5
    value[equal, 1] = value[equal, 0]
    equal = (value[:, 0] == value[:, 1]).all(1)
    verdict = np.where(equal, vocab.YES, vocab.NO)[:, None]
    columns: list[Ints | int] = [vocab.SAME, key[:, 0], key[:, 1], verdict]
    when, source = later(rng, time.max(1)), np.arange(groups) * 2
    known = facts("same", key.reshape(-1, vocab.KEY), value.reshape(-1, vocab.KEY), time.ravel())
    return Items.stack(known, items("same", columns, 1 + 2 * vocab.KEY, when, source))


def copy(rng: np.random.Generator, bank: Bank, size: int) -> Items:
    """Spans of symbols, each repeated once or twice; scored once three symbols have been seen."""
    width = int(rng.integers(8, WIDTH + 1))
    count = max(1, int(size / (2.5 * width)))
    span = bank.values(count, -(-width // vocab.KEY)).reshape(count, -1)[:, :width]
    time, none = rng.random(count), np.full(count, -1)
    pick = np.concatenate((np.arange(count), rng.integers(0, count, count // 2)))
    again = items("copy", [span[pick]], vocab.KEY, later(rng, time[pick]), pick)
    return Items.stack(items("copy", [span], width, time, none), again)


BUILDERS: dict[str, Callable[[np.random.Generator, Bank, int], Items]] = {
    "ask": ask, "last": last, "nth": nth, "all": every, "trace": trace, "deep": deep,
    "same": same, "copy": copy,
}  # fmt: skip
"""Family -> facts and questions of about `size` tokens."""
