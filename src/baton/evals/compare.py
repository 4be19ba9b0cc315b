"""Two documents of the same queries: what B loses against A, how sure that is, how far apart their
distributions are."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable
from dataclasses import asdict, dataclass
from typing import Any

from baton.core.errors import ConfigError
from baton.evals.document import Answer, Document
from baton.evals.groups import bucket, kind, part, split
from baton.evals.stats import Paired, paired, queries_for


@dataclass(frozen=True)
class Divergence:
    """Of B's distribution from A's, KL(A || B) in nats per answer position: mean and largest over
    `positions`. A lower bound: tokens that are not among the likeliest of both count as one."""

    positions: int
    mean: float
    largest: float


@dataclass(frozen=True)
class Group:
    """Queries of one kind. needed: independent queries to see the stated difference."""

    name: str
    paired: Paired
    kl: Divergence | None
    needed: int


@dataclass(frozen=True)
class Texts:
    """Perplexity of one text under both, and b's relative to a's, less 1."""

    text: str
    length: int
    tokens: int
    a: float
    b: float
    change: float


@dataclass(frozen=True)
class Comparison:
    """Everything that is said about B beside A.

    all: every query. tasks, lengths, distances, notes: by task; by length; by power of two of the
        distance; by task and note. cells: by length and part of the depth, named "length depth".
    resolve: the difference that `needed` is about.
    """

    a: Document
    b: Document
    all: Group
    tasks: list[Group]
    lengths: list[Group]
    distances: list[Group]
    notes: list[Group]
    cells: list[Group]
    texts: list[Texts]
    resolve: float

    @property
    def no_perplexity(self) -> str:
        """Why there is none beside the answers, for people; empty where there is."""
        if self.texts:
            return ""
        sides = {"A": self.a.no_perplexity, "B": self.b.no_perplexity}
        said = "; ".join(f"{side}: {why}" for side, why in sides.items() if why)
        return said or "A and B did not read the same text in the same windows"

    def groups(self) -> dict[str, Group]:
        """By the name that a gate uses: "all", "task NAME", "length N", "distance N" and so on."""
        named = {"task": self.tasks, "length": self.lengths, "distance": self.distances}
        named["note"] = self.notes
        found = {"all": self.all}
        for prefix, groups in named.items():
            found |= {f"{prefix} {group.name}": group for group in groups}
        return found

    def as_dict(self) -> dict[str, Any]:
        """As JSON, without the answers."""
        made: dict[str, Any] = {
            side: {
                "subject": document.subject, "about": document.about, "seconds": document.seconds,
                "computed": document.computed, "prompts": document.prompts,
            }
            for side, document in (("a", self.a), ("b", self.b))
        }  # fmt: skip
        made |= {"suite": self.a.suite, "digest": self.a.digest, "resolve": self.resolve}
        made["no_perplexity"] = self.no_perplexity
        made["all"] = asdict(self.all)
        for name in ("tasks", "lengths", "distances", "notes", "cells", "texts"):
            made[name] = [asdict(one) for one in getattr(self, name)]
        return made


def compare(a: Document, b: Document, resolve: float = 0.01) -> Comparison:
    """B beside A.

    Args:
        resolve: a difference of shares; the report says how many queries would show it.

    Raises:
        ConfigError: they did not answer the same queries.
    """
    if a.digest != b.digest:
        differ = {k: (v, b.suite.get(k)) for k, v in a.suite.items() if v != b.suite.get(k)}
        reason = ", ".join(f"{k} is {x} and {y}" for k, (x, y) in differ.items())
        raise ConfigError(
            f"the two did not answer the same queries: {reason or 'their tokenizers differ'}"
        )
    if not 0 < resolve <= 1:
        raise ConfigError(f"the difference to resolve must be in (0, 1], got {resolve}")
    pairs = list(zip(a.answers, b.answers, strict=True))

    def by(name: Callable[[Answer], Hashable | None]) -> list[Group]:
        found = split(pairs, lambda pair: name(pair[0]))
        return [group(str(key), mine, resolve) for key, mine in found.items()]

    distances = by(lambda one: bucket(one.distance))
    return Comparison(
        a=a,
        b=b,
        all=group("all", pairs, resolve),
        tasks=by(lambda one: one.task),
        lengths=by(lambda one: one.length),
        distances=sorted(distances, key=lambda found: int(found.name)),
        notes=by(kind),
        cells=by(lambda one: f"{one.length} {part(one.depth)}"),
        texts=list(_texts(a, b)),
        resolve=resolve,
    )


def group(name: str, pairs: list[tuple[Answer, Answer]], resolve: float) -> Group:
    """Some of the queries."""
    contexts = [(a.task, a.length, a.context) for a, _ in pairs]
    found = paired([a.hit for a, _ in pairs], [b.hit for _, b in pairs], contexts)
    discordant = (found.lost + found.won) / found.n if found.n else 0.0
    return Group(name, found, divergence(pairs), queries_for(resolve, discordant))


def divergence(pairs: Iterable[tuple[Answer, Answer]]) -> Divergence | None:
    """Over all answer positions; None where a side has no distributions."""
    found = [
        kl(dict(zip(ids, logprobs, strict=True)), dict(zip(more, others, strict=True)))
        for a, b in pairs
        for ids, logprobs, more, others in zip(a.ids, a.logprobs, b.ids, b.logprobs, strict=False)
    ]
    if not found:
        return None
    return Divergence(len(found), sum(found) / len(found), max(found))


def kl(p: dict[int, float], q: dict[int, float]) -> float:
    """KL(p || q) in nats of two distributions of which the largest log-probabilities are known.

    Tokens known in both count by themselves, those known in `p` alone as one, all others as one;
    merging outcomes can only make a divergence smaller (Cover and Thomas, Elements of Information
    Theory, 2.8). What `q` gives to tokens that it does not list is not known, but to none of them
    more than to the last one that it lists, and to all of them no more than what is left; of all
    that is possible the smallest divergence counts.
    """
    shared = p.keys() & q.keys()
    total = sum(math.exp(p[i]) * (p[i] - q[i]) for i in shared)
    own = sum(math.exp(p[i]) for i in p.keys() - q.keys())
    rest_p = max(0.0, 1.0 - own - sum(math.exp(p[i]) for i in shared))
    rest_q = max(1e-9, 1.0 - sum(math.exp(q[i]) for i in shared))
    most = len(p.keys() - q.keys()) * math.exp(min(q.values(), default=0.0))
    left = rest_q - sum(math.exp(q[i]) for i in q.keys() - p.keys())
    given = min(most, left, rest_q * own / (own + rest_p)) if own > 0.0 else 0.0
    for mass, other in ((own, given), (rest_p, rest_q - given)):
        if mass > 1e-9:
            total += mass * math.log(mass / max(1e-9, other))
    return max(0.0, total)


def _texts(a: Document, b: Document) -> Iterable[Texts]:
    others = {(one.text, one.length, one.tokens): one for one in b.perplexity}
    for one in a.perplexity:
        other = others.get((one.text, one.length, one.tokens))
        if other is not None:
            change = math.expm1(other.loss - one.loss)
            yield Texts(one.text, one.length, one.tokens, one.value, other.value, change)
