"""Exams: every question can be answered from its context, and lies where its task says."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from baton.core.errors import ConfigError
from baton.evals import vocab
from baton.evals.context import Context
from baton.evals.document import Digest
from baton.evals.exam import Exam, Query, Suite
from baton.evals.forms import Form
from baton.evals.marks import Marks
from baton.evals.tasks import ACROSS, BUILDERS, COUNTING, TASKS, Borders
from baton.evals.words import Words
from baton.models.source import resolve_source
from baton.models.tokenizer import load_tokenizer
from helpers.reader import Reader

K = vocab.KEY
BORDERS = Borders(page=64, block=128, chunk=512, segments=8)
SUITE = Suite(form="marks", queries=12, borders=BORDERS)


def read(exam: Exam, query: Query) -> Reader:
    """One who has read the context and has the question before him."""
    tokens = np.array(exam.tokens[: query.at] + query.tokens)
    none = np.zeros(len(tokens), int)
    reader = Reader(Context(tokens, none, none))  # type: ignore[arg-type]
    for at, token in enumerate(exam.tokens):
        if token == vocab.DEF:
            reader.learn(at)
    return reader


@pytest.mark.parametrize("task", BUILDERS)
@pytest.mark.parametrize("length", [256, 2048, 16384])
def test_questions_follow_from_their_context(task: str, length: int) -> None:
    exam = SUITE.exam(Marks(128, 0), task, length, 0)
    assert len(exam.tokens) + max(len(query.tokens) for query in exam.queries) <= length
    for query in exam.queries:
        reader = read(exam, query)
        for first, last in query.spans:
            marks = [i for i in range(first) if query.tokens[i] in range(vocab.DEF, vocab.SYMBOL)]
            mark = marks[-1]
            right = reader.answer(query.tokens[mark], query.at + mark + 1)
            assert query.tokens[first:last] == right


@pytest.mark.parametrize("task", BUILDERS)
def test_distances_are_those_of_the_farthest_fact(task: str) -> None:
    exam = SUITE.exam(Marks(128, 0), task, 2048, 1)
    for query in exam.queries:
        reader = read(exam, query)
        keys = [tuple(query.tokens[i + 1 : i + 1 + K]) for i in asked(query)]
        places = [at for key in keys for at in reader.places[key]]
        if task in ("tracking", "chain", "alias"):
            node = keys[0]
            places = []
            while node in reader.known:
                places += reader.places[node]
                node = reader.known[node][0]
        elif task == "compare":
            places += reader.places[tuple(query.tokens[1 + K : 1 + 2 * K])]
        elif task == "override":
            places = places[-1:]
        elif task == "nth":
            n = query.tokens[0] - vocab.NTH
            places = places[n : n + 1]
        assert query.distance == query.at - min(places)


def asked(query: Query) -> list[int]:
    """Where the question's marks are."""
    marks = {*range(vocab.ASK, vocab.TOP), *range(vocab.NTH, vocab.NTH + vocab.MOST)}
    return [i for i, token in enumerate(query.tokens) if token in marks]


@pytest.mark.parametrize("task", [task for task in ACROSS if task != "boundary"])
def test_what_is_needed_lies_in_different_segments(task: str) -> None:
    exam = SUITE.exam(Marks(128, 0), task, 4096, 0)
    size = len(exam.tokens)
    for query in exam.queries:
        reader = read(exam, query)
        node = tuple(query.tokens[1 : 1 + K])
        places = list(reader.places[node])
        if task == "compare":
            places += reader.places[tuple(query.tokens[1 + K : 1 + 2 * K])]
        while task in ("alias", "chain") and reader.known.get(node):
            node = reader.known[node][0]
            places += reader.places.get(node, [])
        segments = [at * BORDERS.segments // size for at in places]
        assert len(set(segments)) == len(segments) > 1
        assert max(segments) < BORDERS.segments - 1, "the last segment is the question's"


def test_boundary_facts_straddle_what_they_say() -> None:
    exam = SUITE.exam(Marks(128, 0), "boundary", 4096, 0)
    size = len(exam.tokens)
    ends = {
        "page": 64, "block": 128, "chunk": 512, "segment": size // BORDERS.segments
    }  # fmt: skip
    seen = set()
    for query in exam.queries:
        at, end = query.at - query.distance, ends[query.note]
        assert at // end != (at + 2 * K) // end, "all on one side"
        seen.add(query.note)
    assert seen == set(ends)


@pytest.mark.parametrize("task", COUNTING)
def test_counted_words_are_the_most_frequent(task: str) -> None:
    exam = SUITE.exam(Marks(128, 0), task, 4096, 0)
    assert len(exam.queries) > 4
    lengths = [query.at for query in exam.queries]
    assert lengths == sorted(lengths, reverse=True), "what is cached first serves all"
    for query in exam.queries:
        counts = np.bincount(exam.tokens[1 : query.at], minlength=vocab.VOCAB)
        order = np.argsort(-counts, kind="stable")[:4]
        assert query.tokens[1:] == order[:3].tolist()
        assert (np.diff(counts[order]) < 0).all(), "a tie"


def test_look_alikes_differ_in_one_symbol() -> None:
    exam = SUITE.exam(Marks(128, 0), "multikey3", 4096, 0)
    keys = np.array(list(read(exam, exam.queries[0]).known))
    near = [int((np.abs(keys - key) > 0).sum(1)[np.arange(len(keys)) != i].min()) for i, key in
            enumerate(keys)]  # fmt: skip
    assert np.mean(np.array(near) == 1) > 0.95


@pytest.fixture(scope="module")
def words() -> Words:
    return Words(load_tokenizer(resolve_source("smollm2-135m")))


@pytest.mark.parametrize("task", TASKS)
def test_words_say_the_same(task: str, words: Words) -> None:
    tokenizer = load_tokenizer(resolve_source("smollm2-135m"))
    exam = SUITE.exam(words, task, 1024, 0)
    text = tokenizer.decode(exam.tokens)
    for query in exam.queries:
        assert query.at + len(query.tokens) <= 1024
        answers = [tokenizer.decode(query.tokens[a:b]).strip() for a, b in query.spans]
        question = tokenizer.decode(query.tokens[: query.spans[0][0]])
        assert all(answers)
        if task == "compare":
            assert answers[0] in ("yes", "no")
        elif task not in COUNTING:
            for answer in ", ".join(answers).split(", "):
                assert f"leads to {answer}." in text
        assert question.startswith("\nQuestion:")


def test_seeds_and_numbers_make_exams_differ_and_nothing_else_does() -> None:
    def digest(suite: Suite, form: Form) -> str:
        found = Digest()
        for exam in suite.exams(form):
            found.add(exam)
        return found.text()

    suite = replace(SUITE, tasks=("single", "chain"), lengths=(512,), contexts=2)
    assert digest(suite, Marks(128, 0)) == digest(suite, Marks(128, 0))
    others = [replace(suite, seed=1), replace(suite, queries=5), replace(suite, lengths=(513,))]
    assert len({digest(one, Marks(128, 0)) for one in [suite, *others]}) == 4
    contexts = [exam.tokens for exam in suite.exams(Marks(128, 0))]
    assert len({tuple(tokens) for tokens in contexts}) == 4


@pytest.mark.parametrize(
    "change, names",
    [
        ({"tasks": ("singel",)}, "singel"),
        ({"lengths": (0,)}, "lengths"),
        ({"borders": Borders(segments=3)}, "segments"),
        ({"contexts": 0}, "contexts"),
        ({"tasks": ("single", "single")}, "twice"),
    ],
)
def test_senseless_suites_are_refused(change: dict[str, object], names: str) -> None:
    with pytest.raises(ConfigError, match=names):
        replace(SUITE, **change).check()  # type: ignore[arg-type]


def test_too_short_a_context_is_an_error() -> None:
    with pytest.raises(ConfigError, match="too short for"):
        SUITE.exam(Marks(128, 0), "chain", 40, 0)
