"""Tasks in the reference models' vocabulary: marks say what follows, symbols mean nothing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from baton.core.errors import ConfigError
from baton.evals import vocab
from baton.evals.context import noise
from baton.evals.facts import FACT, Bank
from baton.evals.forms import Asked, Name, Question
from baton.evals.text import prose

_MARK = {
    "ask": vocab.ASK, "all": vocab.ALL, "trace": vocab.TRACE, "deep": vocab.DEEP,
    "last": vocab.LAST, "same": vocab.SAME, "top": vocab.TOP,
}  # fmt: skip
_PROSE = 1 << 20  # bytes made, from which contexts take their filler
_FAMILY = 8  # keys that are alike


class MarkNames:
    """Symbols of one context; see `facts.Bank`."""

    def __init__(self, bank: Bank) -> None:
        self._bank = bank

    def keys(self, count: int) -> list[Name]:
        """See Names."""
        return [tuple(key) for key in self._bank.keys(count).tolist()]

    def values(self, count: int) -> list[Name]:
        """See Names."""
        return [tuple(value) for value in self._bank.values(count).tolist()]


class AlikeNames(MarkNames):
    """Keys in families that have all symbols but one in common."""

    def __init__(self, rng: np.random.Generator, alphabet: int, most: int) -> None:
        super().__init__(Bank(rng, alphabet, 0.0, most))
        symbols = self._bank.alphabet
        size = min(_FAMILY, symbols)
        made: dict[tuple[int, ...], None] = {}
        while len(made) < most:
            count = -(-2 * most // size)
            keys = np.repeat(rng.integers(0, symbols, (count, vocab.KEY)), size, 0)
            place = np.repeat(rng.integers(0, vocab.KEY, count), size)
            other = rng.permuted(np.tile(np.arange(symbols), (count, 1)), axis=1)[:, :size]
            keys[np.arange(len(keys)), place] = other.ravel()
            made |= dict.fromkeys(map(tuple, keys.tolist()))
        chosen = np.array(list(made)[:most])  # whole families, in random order
        self._left = rng.permutation(self._bank.symbols[chosen]).tolist()

    def keys(self, count: int) -> list[Name]:
        """See Names."""
        taken, self._left = self._left[:count], self._left[count:]
        assert len(taken) == count, "more keys are taken than were asked for"
        return [tuple(key) for key in taken]


class Marks:
    """A `forms.Form`.

    Args:
        alphabet: symbols in use in a context, at most `vocab.SYMBOLS`. Where keys need more, there
            are more.
        seed: of the prose.
    """

    width = FACT

    def __init__(self, alphabet: int, seed: int) -> None:
        if not 2 <= alphabet <= vocab.SYMBOLS:
            raise ConfigError(f"an alphabet has 2 to {vocab.SYMBOLS} symbols, got {alphabet}")
        self.start = [vocab.BOS]
        self._alphabet, self._seed = alphabet, seed

    def names(self, rng: np.random.Generator, most: int, alike: bool) -> MarkNames:
        """See Form. Alike: one symbol of three differs from other keys'."""
        if alike:
            return AlikeNames(rng, self._alphabet, most)
        return MarkNames(Bank(rng, self._alphabet, 0.0, most))

    def fact(self, key: Name, value: Name) -> list[int]:
        """See Form."""
        return [vocab.DEF, *_ids(key), *_ids(value)]

    def ask(
        self, question: Question, keys: Sequence[Name], values: Sequence[Name], n: int = 0
    ) -> Asked:
        """See Form."""
        if question == "ask":  # of several keys one after the other
            tokens: list[int] = []
            spans = []
            for key, value in zip(keys, values, strict=True):
                tokens += [vocab.ASK, *_ids(key), *_ids(value)]
                spans.append((len(tokens) - len(value), len(tokens)))
            return Asked(tokens, spans)
        mark = vocab.NTH + n if question == "nth" else _MARK[question]
        tokens = [mark, *(token for key in keys for token in _ids(key))]
        first = len(tokens)
        if question == "same":
            tokens.append(vocab.YES if n else vocab.NO)
        tokens += [token for value in values for token in _ids(value)]
        return Asked(tokens, [(first, len(tokens))])

    def filler(
        self, rng: np.random.Generator, size: int, kind: Literal["noise", "prose"]
    ) -> NDArray[np.int64]:
        """See Form: bytes."""
        text = noise() if kind == "noise" else prose("evaluation", self._seed, _PROSE)
        start = int(rng.integers(0, len(text)))
        return np.resize(np.roll(text, -start), size).astype(np.int64)

    def words(self, count: int) -> list[tuple[Name, list[int]]]:
        """See Form: single symbols."""
        if count > vocab.SYMBOLS:
            raise ConfigError(f"there are {vocab.SYMBOLS} symbols to count, not {count}")
        return [((vocab.SYMBOL + i,), [vocab.SYMBOL + i]) for i in range(count)]


def _ids(name: Name) -> tuple[int, ...]:
    assert not isinstance(name, str), "names of one form only"
    return name
