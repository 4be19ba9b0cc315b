"""Answers questions in marks by reading, independently of what makes them."""

from __future__ import annotations

from collections import defaultdict

from baton.evals import vocab
from baton.evals.context import KINDS, Context
from baton.evals.facts import FAMILIES

K = vocab.KEY
QUESTIONS = {vocab.ASK, vocab.LAST, vocab.ALL, vocab.TRACE, vocab.DEEP, vocab.SAME} | {
    vocab.NTH + i for i in range(vocab.MOST)
}


class Reader:
    """Reads a context from left to right, knows its facts, and answers its questions."""

    def __init__(self, context: Context) -> None:
        self.tokens, self.kind = context.tokens.tolist(), context.kind.tolist()
        self.distance = context.distance.tolist()
        self.known: dict[tuple[int, ...], list[tuple[int, ...]]] = defaultdict(list)
        self.places: dict[tuple[int, ...], list[int]] = defaultdict(list)
        self.asked = 0

    def key(self, at: int) -> tuple[int, ...]:
        return tuple(self.tokens[at : at + K])

    def learn(self, at: int) -> None:
        """A fact, by its mark."""
        self.known[self.key(at + 1)].append(self.key(at + 1 + K))
        self.places[self.key(at + 1)].append(at)

    def read(self) -> int:
        """Check every question; how many there were."""
        for at, token in enumerate(self.tokens):
            if token == vocab.DEF:
                self.learn(at)
            elif token in QUESTIONS:
                self.asked += 1
                expected = self.answer(token, at + 1)
                first = at + 1 + K * (2 if token == vocab.SAME else 1)
                assert self.tokens[first : first + len(expected)] == expected
                kinds = self.kind[first : first + len(expected)]
                assert set(kinds) <= {KINDS.index(f) for f in FAMILIES}
                assert self.kind[at] == self.kind[first - 1] == 0, "what is asked is not scored"
        return self.asked

    def answer(self, mark: int, at: int) -> list[int]:
        """The answer of a question by its mark; `at` is where its key starts."""
        values = self.known[self.key(at)]
        assert values, "asked before it was told"
        if mark == vocab.SAME:
            other = self.known[self.key(at + K)]
            return [vocab.YES if values == other else vocab.NO]
        if mark == vocab.DEEP:
            return list(self.known[values[0]][0])
        if mark == vocab.ALL:
            return [token for value in values for token in value]
        if mark == vocab.TRACE:
            found, node = [], values[0]
            while True:
                found += node
                if node not in self.known:
                    return found
                node = self.known[node][0]
        if mark == vocab.LAST:
            return list(values[-1])
        if mark == vocab.ASK:
            assert len(values) == 1, "a plain key has one value"
            return list(values[0])
        return list(values[mark - vocab.NTH])
