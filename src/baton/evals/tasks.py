"""The tasks of an evaluation: which facts lie where in a context, and what is asked about them.

After RULER (arXiv 2404.06654): `single`, `multikey1` to `3`, `multivalue`, `multiquery`,
`tracking` (variable tracking), `common` and `frequent` (words). After OpenAI's MRCR: `nth`. Across
segments, where what is needed is spread over equal parts of the context and the question lies in
the last one, which holds no fact: `alias`, `override`, `chain`, `compare`; and `boundary`, whose
facts straddle the ends of pages, blocks, chunks and segments.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from baton.evals.facts import HOPS
from baton.evals.forms import Form, Name, Question

Segments = tuple[int, ...]


@dataclass(frozen=True)
class Borders:
    """Where things that a server cuts a context into end, in tokens; `segments` equal parts."""

    page: int = 64
    block: int = 128
    chunk: int = 8192
    segments: int = 8


@dataclass(frozen=True)
class Room:
    """What a context of a task offers.

    size: tokens. queries: wanted at most. loads: facts in each segment so far.
    """

    form: Form
    rng: np.random.Generator
    size: int
    queries: int
    borders: Borders
    loads: Counter[int] = field(default_factory=Counter)

    @property
    def facts(self) -> int:
        """How many fit side by side, with a little to spare."""
        return int(0.98 * (self.size - len(self.form.start)) / self.form.width)

    def count(self, per_query: int, share: float = 0.5) -> int:
        """Queries that need so many facts each, in at most a share of the context."""
        return min(self.queries, int(share * self.facts) // per_query)


@dataclass(frozen=True)
class Fact:
    """A statement, in a segment of the context (-1: anywhere) or at a position."""

    key: Name
    value: Name
    segment: int = -1
    at: int | None = None


@dataclass(frozen=True)
class Wanted:
    """A question, and which facts (indices) its answer takes."""

    question: Question
    keys: list[Name]
    values: list[Name]
    facts: list[int]
    n: int = 0
    note: str = ""


@dataclass
class Made:
    """Facts to lay out and questions to ask."""

    kind: Literal["noise", "prose"] = "prose"
    facts: list[Fact] = field(default_factory=list)
    wanted: list[Wanted] = field(default_factory=list)

    def add(self, key: Name, value: Name, segment: int = -1) -> int:
        """A fact; its index."""
        self.facts.append(Fact(key, value, segment))
        return len(self.facts) - 1


def _plain(room: Room, made: Made, count: int, asked: int, alike: bool = False) -> Made:
    """`count` facts, of which `asked` are asked for."""
    names = room.form.names(room.rng, count, alike)
    keys, values = names.keys(count), names.values(count)
    for key, value in zip(keys, values, strict=True):
        made.add(key, value)
    for i in room.rng.permutation(count)[:asked].tolist():
        made.wanted.append(Wanted("ask", [keys[i]], [values[i]], [i]))
    return made


def single(room: Room) -> Made:
    """Few facts in noise, all of them asked for."""
    count = room.count(1, 0.25)
    return _plain(room, Made("noise"), count, count)


def multikey1(room: Room) -> Made:
    """Few facts in text, one in four asked for."""
    count = room.count(4)
    return _plain(room, Made(), 4 * count, count)


def multikey2(room: Room) -> Made:
    """Nothing but facts."""
    return _plain(room, Made(), room.facts, room.count(1, 1.0))


def multikey3(room: Room) -> Made:
    """Nothing but facts, whose keys resemble one another."""
    return _plain(room, Made(), room.facts, room.count(1, 1.0), alike=True)


def multiquery(room: Room) -> Made:
    """Four facts asked for one after the other, all of which must be right."""
    count, made = room.count(4), Made()
    names = room.form.names(room.rng, 4 * count, False)
    for _ in range(count):
        keys, values = names.keys(4), names.values(4)
        found = [made.add(key, value) for key, value in zip(keys, values, strict=True)]
        made.wanted.append(Wanted("ask", keys, values, found))
    return made


def _repeated(
    room: Room, repeats: int, segments: Callable[[], Segments]
) -> tuple[Made, list[tuple[Name, list[Name], list[int]]]]:
    """Keys with several values each, in the order in which they come."""
    made, count = Made(), room.count(repeats)
    names, groups = room.form.names(room.rng, count, False), []
    for _ in range(count):
        (key,), values = names.keys(1), names.values(repeats)
        found = [
            made.add(key, value, segment) for value, segment in zip(values, segments(), strict=True)
        ]
        groups.append((key, values, found))
    return made, groups


def multivalue(room: Room) -> Made:
    """Four values of a key, all of which are asked for."""
    made, groups = _repeated(room, 4, lambda: (-1,) * 4)
    made.wanted += [Wanted("all", [key], values, found) for key, values, found in groups]
    return made


def nth(room: Room) -> Made:
    """Four values of a key, one of which is asked for by its number."""
    made, groups = _repeated(room, 4, lambda: (-1,) * 4)
    for key, values, found in groups:
        n = int(room.rng.integers(0, 4))
        made.wanted.append(Wanted("nth", [key], [values[n]], [found[n]], n))
    return made


def override(room: Room) -> Made:
    """Three values of a key in different segments; the last one counts."""
    made, groups = _repeated(room, 3, lambda: _spread(room, 3))
    made.wanted += [Wanted("last", [key], values[-1:], found[-1:]) for key, values, found in groups]
    return made


def _spread(room: Room, count: int) -> Segments:
    """Different segments in order, none of them the last; of all, those that hold least so far."""
    segments: list[int] = room.rng.permutation(room.borders.segments - 1).tolist()
    chosen = sorted(segments, key=lambda segment: room.loads[segment])[:count]
    room.loads.update(chosen)
    return tuple(sorted(chosen))


def _chains(room: Room, hops: int, segments: Callable[[], Segments], ask: Question) -> Made:
    """Chains of facts; the question names the first node."""
    made, count = Made(), room.count(hops)
    names = room.form.names(room.rng, count * (hops + 1), False)
    for _ in range(count):
        nodes = names.keys(hops + 1)
        found = [made.add(nodes[i], nodes[i + 1], segment) for i, segment in enumerate(segments())]
        answer = nodes[-1:] if ask == "deep" else nodes[1:]
        made.wanted.append(Wanted(ask, nodes[:1], answer, found))
    return made


def tracking(room: Room) -> Made:
    """Chains of four facts anywhere in the context, whose every hop is asked for."""
    return _chains(room, HOPS, lambda: (-1,) * HOPS, "trace")


def chain(room: Room) -> Made:
    """Chains with one hop per segment, whose every hop is asked for."""
    hops = min(HOPS, room.borders.segments - 1)
    return _chains(room, hops, lambda: _spread(room, hops), "trace")


def alias(room: Room) -> Made:
    """Alias -> key and key -> value in two segments, the question in a third; only the value is
    asked for."""
    return _chains(room, 2, lambda: tuple(room.rng.permutation(_spread(room, 2)).tolist()), "deep")


def compare(room: Room) -> Made:
    """Whether two keys, in different segments, have the same value."""
    made, count = Made(), room.count(2)
    names = room.form.names(room.rng, 2 * count, False)
    for i in range(count):
        keys, values = names.keys(2), names.values(2)
        if i % 2:
            values[1] = values[0]
        found = [
            made.add(key, value, segment)
            for key, value, segment in zip(keys, values, _spread(room, 2), strict=True)
        ]
        made.wanted.append(Wanted("same", keys, [], found, int(values[0] == values[1])))
    return made


def boundary(room: Room) -> Made:
    """Facts that straddle the end of a page, block, chunk or segment; notes say which."""
    width, made, borders = room.form.width, Made(), room.borders
    sizes = {
        "segment": room.size // borders.segments, "chunk": borders.chunk, "block": borders.block,
        "page": borders.page,
    }  # fmt: skip
    taken = np.zeros(room.size, bool)
    chosen: list[tuple[int, str]] = []
    for i, (what, size) in enumerate(sizes.items()):
        share = -(-(room.count(1) - len(chosen)) // (len(sizes) - i))
        ends = np.arange(size, room.size - width, size) if size > width else np.zeros(0, int)
        for end in room.rng.permutation(ends).tolist():
            at = end - int(room.rng.integers(1, width))
            if share > 0 and at >= len(room.form.start) and not taken[at : at + width].any():
                taken[at : at + width], share = True, share - 1
                chosen.append((at, what))
    names = room.form.names(room.rng, max(1, len(chosen)), False)
    keys, values = names.keys(len(chosen)), names.values(len(chosen))
    for (at, what), key, value in sorted(zip(chosen, keys, values, strict=True)):
        made.wanted.append(Wanted("ask", [key], [value], [len(made.facts)], note=what))
        made.facts.append(Fact(key, value, at=at))
    return made


BUILDERS: dict[str, Callable[[Room], Made]] = {
    made.__name__: made
    for made in (
        single, multikey1, multikey2, multikey3, multivalue, multiquery, tracking, nth,
        alias, override, chain, compare, boundary,
    )
}  # fmt: skip
"""Tasks about facts, by name."""
COUNTING = ("common", "frequent")
"""Tasks about how often words occur."""
TASKS = (*BUILDERS, *COUNTING)
ACROSS = ("alias", "override", "chain", "compare", "boundary")
"""The cross-segment suite."""
