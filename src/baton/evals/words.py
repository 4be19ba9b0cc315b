"""Tasks as English text, for models that were trained on text.

A question ends with the beginning of its own answer, so that a model without any chat template
can go on with the rest; what is scored is whether it goes on with exactly the answer.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from baton.core.errors import ConfigError
from baton.evals.forms import Asked, Name, Question
from baton.evals.text import NOISE


def _list(words: str) -> list[str]:
    return words.split()


_TRAITS = _list(
    "amber brave calm copper dusty eager faded gentle golden hidden icy jolly keen lonely marble "
    "misty noble olive pale quiet rapid rusty scarlet silent silver sleepy solar steady stormy "
    "tall tiny velvet violet warm wild winter wooden yellow young zesty"
)
_THINGS = _list(
    "anchor badger barrel beacon bridge candle castle comet cradle dagger eagle falcon feather "
    "forest garden glacier hammer harbor island jacket kettle ladder lantern meadow mirror "
    "mountain needle orchard otter palace pepper pirate planet ribbon river rocket saddle "
    "tiger tunnel walnut"
)
_WHO = _list("miller baker sailor painter teacher farmer doctor singer tailor hunter clerk guard")
_DOES = _list("carried lost found sold mended painted hid bought borrowed cleaned forgot drew")
_WHERE = _list("harbour market station chapel school field mill bakery garden tower")
_ORDER = _list("first second third fourth fifth sixth seventh eighth")


class Encoder(Protocol):
    """What is needed of a tokenizer."""

    def encode(self, text: str, special: bool = True) -> list[int]:
        """Token ids; `special` adds what the model wants around a text."""


class WordNames:
    """Two words for a key, six digits for a value."""

    def __init__(self, rng: np.random.Generator, most: int, alike: bool) -> None:
        room = len(_TRAITS) * len(_THINGS)
        self._rng, self._copies = rng, -(-most // room)
        if alike:  # all of a few things, so that every key has many that differ in one word
            few = max(1, -(-most // len(_TRAITS)))
            order = np.arange(len(_TRAITS) * min(few, len(_THINGS)))
            rng.shuffle(order)
        else:
            order = rng.permutation(room)
        self._left = [(i, copy) for copy in range(self._copies) for i in order.tolist()]

    def keys(self, count: int) -> list[Name]:
        """See Names."""
        if len(self._left) < count:
            raise ConfigError(f"{count} more keys wanted where {len(self._left)} are left")
        taken, self._left = self._left[:count], self._left[count:]
        return [self._key(i, copy) for i, copy in taken]

    def _key(self, i: int, copy: int) -> str:
        trait, thing = _TRAITS[i % len(_TRAITS)], _THINGS[i // len(_TRAITS)]
        return f"{trait} {thing}" + (f" {copy + 1}" if self._copies > 1 else "")

    def values(self, count: int) -> list[Name]:
        """See Names."""
        return [str(value) for value in self._rng.integers(100_000, 1_000_000, count).tolist()]


class Words:
    """A `forms.Form` over a tokenizer.

    A fact says that one thing leads to another, so that chains read well: what follows a key may be
    a number or another key.
    """

    def __init__(self, tokenizer: Encoder) -> None:
        self._encoder = tokenizer
        special = set(tokenizer.encode("a")) - set(tokenizer.encode("a", special=False))
        self.start = [token for token in tokenizer.encode("a") if token in special]
        sample = [f"{trait} {thing} 12" for trait, thing in zip(_TRAITS, _THINGS, strict=True)]
        widest = max(sample, key=lambda key: len(self._encode(key)))
        self.width = len(self.fact(widest, widest)) + 2

    def names(self, rng: np.random.Generator, most: int, alike: bool) -> WordNames:
        """See Form. Alike: keys that share a word."""
        return WordNames(rng, most, alike)

    def fact(self, key: Name, value: Name) -> list[int]:
        """See Form."""
        return self._encode(f" Note: {key} leads to {value}.")

    def ask(
        self, question: Question, keys: Sequence[Name], values: Sequence[Name], n: int = 0
    ) -> Asked:
        """See Form."""
        if question == "ask" and len(keys) > 1:
            parts = [self.ask("ask", [k], [v]) for k, v in zip(keys, values, strict=True)]
            starts = np.cumsum([0, *(len(part.tokens) for part in parts)]).tolist()
            spans = [
                (first + start, last + start)
                for part, start in zip(parts, starts, strict=False)
                for first, last in part.spans
            ]
            return Asked([token for part in parts for token in part.tokens], spans)
        text = self._question(question, [str(key) for key in keys], n)
        answer = ("yes" if n else "no") if question == "same" else ", ".join(map(str, values))
        before, after = self._encode(text), self._encode(f" {answer}")
        return Asked([*before, *after], [(len(before), len(before) + len(after))])

    def _question(self, question: Question, keys: list[str], n: int) -> str:
        """The question, up to where the answer begins."""
        key = keys[0] if keys else ""
        if question == "ask":
            return f"\nQuestion: What does {key} lead to?\nAnswer: {key} leads to"
        if question == "all":
            return (
                f"\nQuestion: What does {key} lead to, according to each note about it, in order?"
                f"\nAnswer: {key} leads to"
            )
        if question == "trace":
            return (
                f"\nQuestion: {key} leads to something, which leads to something else, and so on. "
                f"What are the steps, in order?\nAnswer: from {key} to"
            )
        if question == "deep":
            return (
                f"\nQuestion: What does the thing that {key} leads to lead to?"
                f"\nAnswer: by way of another thing, {key} leads to"
            )
        if question == "last":
            return (
                f"\nQuestion: What does {key} lead to, according to the last note about it?"
                f"\nAnswer: According to the last note, {key} leads to"
            )
        if question == "nth":
            return (
                f"\nQuestion: What does {key} lead to, according to the {_ORDER[n]} note about it?"
                f"\nAnswer: According to the {_ORDER[n]} note, {key} leads to"
            )
        if question == "same":
            return (
                f"\nQuestion: Do {key} and {keys[1]} lead to the same number, yes or no?\nAnswer:"
            )
        return "\nQuestion: Which words are most frequent, the most frequent first?\nAnswer:"

    def filler(
        self, rng: np.random.Generator, size: int, kind: Literal["noise", "prose"]
    ) -> NDArray[np.int64]:
        """See Form."""
        if kind == "noise":
            return np.resize(np.array(self._encode(" " + NOISE.decode().strip())), size)
        found: list[int] = []
        while len(found) < size:
            found += self._encode("".join(_sentence(rng) for _ in range(64)))
        return np.array(found[:size], np.int64)

    def words(self, count: int) -> list[tuple[Name, list[int]]]:
        """See Form."""
        names: list[str] = [*_THINGS, *_TRAITS, *_WHO, *_DOES]
        if count > len(names):
            raise ConfigError(f"there are {len(names)} words to count, not {count}")
        return [(name, self._encode(" " + name)) for name in names[:count]]

    def _encode(self, text: str) -> list[int]:
        return self._encoder.encode(text, special=False)


def _sentence(rng: np.random.Generator) -> str:
    """One of some hundred thousand."""
    pick = [str(rng.choice(words)) for words in (_WHO, _DOES, _TRAITS, _THINGS, _WHERE)]
    return f" The {pick[0]} {pick[1]} a {pick[2]} {pick[3]} near the {pick[4]}."
