"""How a task is put into tokens: as marks and symbols, or as text. Tasks do not know which."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np
from numpy.typing import NDArray

Name = tuple[int, ...] | str
"""A key or a value: symbols or words."""
Span = tuple[int, int]
Question = Literal["ask", "all", "trace", "deep", "last", "nth", "same", "top"]
"""What may be asked; see `facts` for what each one means."""


@dataclass(frozen=True)
class Asked:
    """A question with its answer: `tokens`, of which those in `spans` are the answer."""

    tokens: list[int]
    spans: list[Span]


class Names(Protocol):
    """Keys and values of one context. Keys differ from one another."""

    def keys(self, count: int) -> list[Name]:
        """Keys that were not given before."""

    def values(self, count: int) -> list[Name]:
        """Values, which may repeat."""


class Form(Protocol):
    """A way to write facts, questions and what lies between them.

    start: tokens that every context begins with. width: most tokens of a fact.
    """

    start: list[int]
    width: int

    def names(self, rng: np.random.Generator, most: int, alike: bool) -> Names:
        """For a context with at most `most` keys; `alike`: keys that differ in little."""

    def fact(self, key: Name, value: Name) -> list[int]:
        """The statement that a key has a value, of at most `width` tokens."""

    def ask(
        self, question: Question, keys: Sequence[Name], values: Sequence[Name], n: int = 0
    ) -> Asked:
        """A question about `keys` whose answer is `values`, in order.

        n: of "nth" the occurrence, from 0; of "same" 1 for yes and 0 for no.
        """

    def filler(
        self, rng: np.random.Generator, size: int, kind: Literal["noise", "prose"]
    ) -> NDArray[np.int64]:
        """`size` tokens of text that states no fact."""

    def words(self, count: int) -> list[tuple[Name, list[int]]]:
        """Words to be counted, and the tokens of each in a list."""
