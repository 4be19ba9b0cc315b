"""Answers in groups: by task and note, by distance, by part of a context's depth."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from typing import TypeVar

from baton.evals.document import Answer

T = TypeVar("T")
K = TypeVar("K", bound=Hashable)

BINS = 8  #: equal parts of a context's depth


def split(items: Iterable[T], name: Callable[[T], K | None]) -> dict[K, list[T]]:
    """Items by name, in the order in which names first come; those without a name are left out."""
    groups: dict[K, list[T]] = {}
    for item in items:
        key = name(item)
        if key is not None:
            groups.setdefault(key, []).append(item)
    return groups


def kind(answer: Answer) -> str | None:
    """Task and note, for tasks that have kinds of queries."""
    return f"{answer.task}/{answer.note}" if answer.note else None


def bucket(distance: int) -> int:
    """The power of two at or above a distance."""
    return 1 << max(0, distance - 1).bit_length()


def part(depth: float) -> int:
    """Which of the `BINS` parts of a context a depth in [0, 1] lies in."""
    return min(BINS - 1, int(depth * BINS))


def by_distance(answers: Iterable[Answer]) -> list[tuple[str, list[Answer]]]:
    """By power of two of the distance, as people write it, from near to far."""
    found = split(answers, lambda one: bucket(one.distance))
    return [(f"{distance:,}", found[distance]) for distance in sorted(found)]
