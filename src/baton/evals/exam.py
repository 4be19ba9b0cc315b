"""Contexts with the questions that are asked about them, made from a seed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

import numpy as np

from baton.core.errors import ConfigError
from baton.evals.forms import Asked, Form, Name, Span
from baton.evals.seeds import stream
from baton.evals.tasks import BUILDERS, COUNTING, TASKS, Borders, Fact, Made, Room

FEWEST = 4  #: segments: three that hold facts, and the question's
_ALPHABET = 64  # words to count
_TOP = 3  # of which are asked for


@dataclass(frozen=True)
class Query:
    """A question about the first `at` tokens of a context.

    tokens: question and answer. spans: of `tokens`, what must be right. distance: tokens between
    the farthest fact that is needed and the question. note: of tasks that have kinds of queries.
    """

    at: int
    tokens: list[int]
    spans: list[Span]
    distance: int
    note: str = ""


@dataclass(frozen=True)
class Exam:
    """A context and its queries. With the longest of them it has at most `length` tokens."""

    task: str
    length: int
    number: int
    tokens: list[int]
    queries: list[Query]


@dataclass(frozen=True)
class Suite:
    """What an evaluation asks. The same suite, form and seed give the same queries anywhere.

    form: "marks" for the reference models, "words" for models of text.
    contexts: of each task and length. queries: of each context, fewer where it is short.
    """

    form: Literal["marks", "words"] = "words"
    tasks: tuple[str, ...] = TASKS
    lengths: tuple[int, ...] = (4096,)
    contexts: int = 4
    queries: int = 16
    seed: int = 0
    alphabet: int = 128
    borders: Borders = field(default_factory=Borders)

    def check(self) -> Suite:
        """Self.

        Raises:
            ConfigError: unknown tasks, or numbers out of range.
        """
        unknown = [task for task in self.tasks if task not in TASKS]
        if unknown or not self.tasks:
            raise ConfigError(f"unknown task {', '.join(unknown) or '(none)'}: one of {TASKS}")
        if len(set(self.tasks)) < len(self.tasks) or len(set(self.lengths)) < len(self.lengths):
            raise ConfigError("a task or a length is named twice")
        numbers = {"contexts": self.contexts, "queries": self.queries, **asdict(self.borders)}
        for name, number in {**numbers, "lengths": min(self.lengths, default=0)}.items():
            if number < 1:
                raise ConfigError(f"{name} must be at least 1, got {number}")
        if self.borders.segments < FEWEST:
            raise ConfigError(f"segments must be at least {FEWEST}, got {self.borders.segments}")
        if self.seed < 0:
            raise ConfigError(f"seed must not be negative, got {self.seed}")
        return self

    def __len__(self) -> int:
        return len(self.tasks) * len(self.lengths) * self.contexts

    def exams(self, form: Form) -> Iterator[Exam]:
        """All of them, by length and task."""
        for length in self.lengths:
            for task in self.tasks:
                for number in range(self.contexts):
                    yield self.exam(form, task, length, number)

    def exam(self, form: Form, task: str, length: int, number: int) -> Exam:
        """One of them.

        Raises:
            ConfigError: the length is too short for the task.
        """
        rng = stream("evaluation", self.seed, TASKS.index(task), length, number)
        last = 0  # tokens to keep free for the longest question: known when it has been asked
        for _ in range(4):
            state = rng.bit_generator.state
            room = Room(form, rng, max(0, length - last), self.queries, self.borders)
            made = _count(room, task) if task in COUNTING else _facts(room, BUILDERS[task](room))
            tokens, queries = made
            longest = max((query.at + len(query.tokens) for query in queries), default=0)
            if not queries:
                raise ConfigError(f"a length of {length} is too short for the task {task!r}")
            if longest <= length:
                return Exam(task, length, number, tokens, queries)
            last += longest - length
            rng.bit_generator.state = state
        raise ConfigError(f"a length of {length} is too short for the questions of {task!r}")

    def settings(self) -> dict[str, Any]:
        """As JSON."""
        return asdict(self)


def _facts(room: Room, made: Made) -> tuple[list[int], list[Query]]:
    """Lay out facts with filler between them."""
    form, size = room.form, room.size
    written = [form.fact(fact.key, fact.value) for fact in made.facts]
    places = _places(room, made.facts, [len(tokens) for tokens in written])
    tokens = form.filler(room.rng, size, made.kind)
    tokens[: len(form.start)] = form.start
    for at, fact in zip(places, written, strict=True):
        tokens[at : at + len(fact)] = fact
    queries = []
    for wanted in made.wanted:
        asked = form.ask(wanted.question, wanted.keys, wanted.values, wanted.n)
        distance = size - min(places[i] for i in wanted.facts)
        queries.append(Query(size, asked.tokens, asked.spans, distance, wanted.note))
    return tokens.tolist(), queries


def _places(room: Room, facts: list[Fact], widths: list[int]) -> list[int]:
    """Where each fact starts: as it says, or at random in its segment. Facts of one segment keep
    their order only where they have the same key."""
    places = [-1 if fact.at is None else fact.at for fact in facts]
    parts = room.borders.segments
    for segment in sorted({fact.segment for fact in facts}):
        mine = [i for i, fact in enumerate(facts) if fact.at is None and fact.segment == segment]
        if not mine:
            continue
        whole = segment < 0
        start = max(len(room.form.start), 0 if whole else room.size * segment // parts)
        stop = room.size if whole else room.size * (segment + 1) // parts
        order = _shuffled(room.rng, mine, facts)
        total = sum(widths[i] for i in mine)
        if total > stop - start:
            raise ConfigError(
                f"{len(mine)} facts of {total} tokens do not fit in the {stop - start} tokens of a "
                f"segment: fewer queries, fewer segments or a greater length would do"
            )
        gaps = np.sort(room.rng.integers(0, stop - start - total + 1, len(mine))).tolist()
        at = start
        for i, gap in zip(order, gaps, strict=True):
            places[i] = at + gap
            at += widths[i]
    return places


def _shuffled(rng: np.random.Generator, mine: list[int], facts: list[Fact]) -> list[int]:
    """A random order in which facts about one key come as they were made."""
    order: list[int] = rng.permutation(mine).tolist()
    slots: dict[Name, list[int]] = {}
    for place, i in enumerate(order):
        slots.setdefault(facts[i].key, []).append(place)
    for taken in slots.values():
        for place, i in zip(taken, sorted(order[place] for place in taken), strict=True):
            order[place] = i
    return order


def _count(room: Room, task: str) -> tuple[list[int], list[Query]]:
    """Words in random order, and which are most frequent up to several points."""
    form, rng = room.form, room.rng
    words = form.words(_ALPHABET)
    chosen = [words[i] for i in rng.permutation(_ALPHABET).tolist()]
    if task == "common":  # a few words often, the others all as rarely
        weight = np.full(_ALPHABET, 0.64 / (_ALPHABET - _TOP))
        weight[:_TOP] = (0.16, 0.12, 0.08)
    else:  # Zipf's law
        weight = (np.arange(_ALPHABET) + 1.0) ** -1.5
    draw = rng.choice(_ALPHABET, room.size, p=weight / weight.sum())
    tokens, ends = list(form.start), [len(form.start)]
    for word in draw.tolist():
        more = chosen[word][1]
        if len(tokens) + len(more) > room.size:
            break
        tokens += more
        ends.append(len(tokens))
    queries = []
    points = len(ends) - 1 - np.arange(room.queries) * (len(ends) // (2 * room.queries) or 1)
    # the whole context first: the others find theirs in the cache
    for point in sorted({p for p in points.tolist() if p > len(ends) // 2}, reverse=True):
        counts = np.bincount(draw[:point], minlength=_ALPHABET)
        best = np.argsort(-counts, kind="stable")[: _TOP + 1]
        if (np.diff(counts[best]) >= 0).any():
            continue  # a tie has no answer
        asked: Asked = form.ask("top", [], [chosen[i][0] for i in best[:_TOP].tolist()])
        queries.append(Query(ends[point], asked.tokens, asked.spans, ends[point]))
    return tokens, queries
