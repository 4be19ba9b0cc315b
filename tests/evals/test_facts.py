"""Every question in a context can be answered from what comes before it, and only so."""

from __future__ import annotations

import numpy as np
import pytest

from baton.evals import seeds, text, vocab
from baton.evals.context import KINDS, Mix, noise, sample
from baton.evals.facts import FAMILIES
from helpers.reader import Reader

K = vocab.KEY


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
