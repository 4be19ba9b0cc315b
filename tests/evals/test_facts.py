"""Every question in a context can be answered from what comes before it, and only so."""

from __future__ import annotations

from collections import defaultdict

import numpy as np
import pytest

from baton.evals import seeds, text, vocab
from baton.evals.context import KINDS, Context, Mix, noise, sample
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
        self.asked = 0

    def key(self, at: int) -> tuple[int, ...]:
        return tuple(self.tokens[at : at + K])

    def read(self) -> int:
        """Check every question; how many there were."""
        for at, token in enumerate(self.tokens):
            if token == vocab.DEF:
                self.known[self.key(at + 1)].append(self.key(at + 1 + K))
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


@pytest.fixture(scope="module")
def texts() -> dict[str, text.Bytes]:
    return {
        "code": text.sources(held_out=True),
        "prose": text.prose("validation", 0, 1 << 16),
        "noise": noise(),
    }


@pytest.mark.parametrize("length", [128, 1024, 16384])
@pytest.mark.parametrize("alphabet", [8, 128])
def test_answers_follow_from_the_context(
    length: int, alphabet: int, texts: dict[str, text.Bytes]
) -> None:
    mix = Mix({f: 1.0 for f in FAMILIES if f not in ("copy", "top")}, (alphabet,), (0.3, 1.0))
    asked = 0
    for i in range(max(8, 20000 // length)):
        context = sample(seeds.stream("validation", 1, length, i), length, mix, texts)
        assert len(context.tokens) == length
        asked += Reader(context).read()
    assert asked > 100


def test_a_distance_is_that_to_the_fact(texts: dict[str, text.Bytes]) -> None:
    context = sample(
        seeds.stream("validation", 2), 4096, Mix({"ask": 1.0}, density=(0.5, 1.0)), texts
    )
    tokens = context.tokens.tolist()
    told = {tuple(tokens[i + 1 : i + 1 + K]): i for i, t in enumerate(tokens) if t == vocab.DEF}
    seen: set[tuple[int, ...]] = set()
    for i, token in enumerate(tokens):
        if token == vocab.ASK:
            key, first = tuple(tokens[i + 1 : i + 1 + K]), i + 1 + K
            expected = 0 if key in seen else first - told[key]
            assert context.distance[first] == expected
            seen.add(key)
    assert len(seen) > 50


def test_copied_spans_are_copies(texts: dict[str, text.Bytes]) -> None:
    context = sample(
        seeds.stream("validation", 3), 2048, Mix({"copy": 1.0}, density=(0.5, 1.0)), texts
    )
    scored = np.concatenate(([False], context.kind == KINDS.index("copy"), [False]))
    edges = np.flatnonzero(np.diff(scored.astype(int))).reshape(-1, 2).tolist()
    first_copies = [(a, b) for a, b in edges if context.distance[a] > 0]
    assert len(first_copies) > 5
    for start, end in first_copies:
        source = start - int(context.distance[start]) + K
        span = context.tokens[source : source + end - start]
        assert (context.tokens[start:end] == span).all()


def test_commonest_words_are_the_commonest() -> None:
    context = sample(seeds.stream("validation", 4), 2048, Mix({"top": 1.0}), {"code": noise()})
    tokens = context.tokens
    ends = np.flatnonzero(tokens == vocab.TOP)
    assert len(ends) > 3
    for at in ends.tolist():
        seen = tokens[1:at]
        counts = np.bincount(seen[seen >= vocab.SYMBOL], minlength=vocab.VOCAB)
        best = tokens[at + 1 : at + 4]
        assert counts[best].min() >= np.sort(counts)[-3], "nothing is commoner"


def test_purposes_never_share_a_stream() -> None:
    purposes: tuple[seeds.Purpose, ...] = ("training", "validation", "evaluation")
    draws = {
        tuple(seeds.stream(purpose, seed, i).integers(0, 1 << 62, 4).tolist())
        for purpose in purposes
        for seed in range(5)
        for i in range(40)
    }
    assert len(draws) == 3 * 5 * 40


def test_held_out_files_are_held_out() -> None:
    kept, rest = text.sources(held_out=True), text.sources(held_out=False)
    piece = kept[len(kept) // 2 : len(kept) // 2 + 400].tobytes()
    assert len(rest) > 4 * len(kept)
    assert piece not in rest.tobytes()
