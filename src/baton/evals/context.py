"""Facts and questions laid out among text: one context, for training or for judging."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from baton.evals import vocab
from baton.evals.facts import BUILDERS, FACT, FAMILIES, Bank, Ints, Items
from baton.evals.text import NOISE, Bytes

KINDS = ("none", "code", "prose", "noise", *FAMILIES)
"""What a token is, as something to predict: nothing that could be known, text, or an answer."""
_FIRST_FAMILY = KINDS.index(FAMILIES[0])
TEXT_KINDS = ("code", "prose", "noise")


@dataclass
class Context:
    """One sequence; all `[length]`.

    tokens: ids.
    kind: index into `KINDS` of each token, as something to predict.
    distance: of an answer token, the tokens between it and its fact; 0 elsewhere, and where the
        same was asked for before: that answer is nearer than the fact.
    """

    tokens: NDArray[np.int16]
    kind: NDArray[np.uint8]
    distance: NDArray[np.int32]


def lay_out(
    items: Items,
    length: int,
    filler: NDArray[np.integer],
    filler_kind: int,
    rng: np.random.Generator,
) -> Context:
    """Items in the order of their times, with filler between them at random.

    Args:
        items: at most `length - 1` tokens of them.
        filler: read from its start; at least as long as what the items leave free.

    Raises:
        ValueError: the items are longer than the context.
    """
    order = np.argsort(items.time, kind="stable")
    size = items.length[order]
    free = length - 1 - items.size
    if free < 0:
        raise ValueError(f"{items.size} tokens of facts and questions in a context of {length}")
    cuts = np.sort(rng.integers(0, free + 1, len(order)))
    start = 1 + cuts + np.cumsum(size) - size
    column = np.arange(items.size) - np.repeat(np.cumsum(size) - size, size)
    row, at = np.repeat(order, size), np.repeat(start, size) + column
    tokens = np.full(length, vocab.BOS, np.int16)
    kind = np.zeros(length, np.uint8)
    distance = np.zeros(length, np.int32)
    gap = np.ones(length, bool)
    gap[0], gap[at] = False, False
    tokens[gap], kind[gap] = filler[:free], filler_kind
    tokens[at] = items.tokens[row, column]
    asked = column >= items.answer[row]
    kind[at] = np.where(asked, _FIRST_FAMILY + items.family[row], 0)
    place = np.empty(len(order), np.int64)
    place[order] = start
    news = np.zeros(len(order), bool)
    news[order[np.unique(items.source[order], return_index=True)[1]]] = True
    distance[at] = np.where(asked & news[row], at - place[items.source[row]], 0)
    return Context(tokens, kind, distance)


@dataclass(frozen=True)
class Mix:
    """What contexts of a stage of training hold.

    families: family -> weight, of which a context draws up to three; "top" is the share of
        contexts that hold nothing but words to count.
    alphabets: symbols in use, drawn per context.
    density: share of a context that is facts and questions, drawn log-uniformly.
    texts: how often the text between is of each of `TEXT_KINDS`.
    """

    families: dict[str, float]
    alphabets: tuple[int, ...] = (16, 32, 64, 128)
    density: tuple[float, float] = (0.1, 1.0)
    texts: tuple[float, float, float] = (0.6, 0.3, 0.1)


def sample(
    rng: np.random.Generator,
    length: int,
    mix: Mix,
    texts: dict[str, Bytes],
    families: tuple[str, ...] = (),
) -> Context:
    """A context for training: questions everywhere, text between, of these families or else of up
    to three that are drawn."""
    kind = TEXT_KINDS[rng.choice(3, p=mix.texts)]
    if not families and rng.random() < mix.families.get("top", 0.0):
        return count_words(rng, length)
    density = np.exp(rng.uniform(*np.log(mix.density)))
    budget = int((length - 1) * min(density, 0.98))
    chosen = families or _draw(rng, mix)
    share = rng.dirichlet(np.ones(len(chosen)) * 2)
    most = budget // (FACT + 1) + 4 * len(chosen) + 8
    bank = Bank(rng, int(rng.choice(mix.alphabets)), float(rng.choice((0.0, 0.0, 0.5))), most)
    parts: list[Items] = []
    for name, part in zip(chosen, share, strict=True):
        made = BUILDERS[name](rng, bank, int(part * budget))
        if sum(p.size for p in [*parts, made]) < length:
            parts.append(made)
    filler = _filler(rng, kind, length, texts)
    if not parts:
        return Context(filler.astype(np.int16), np.full(length, KINDS.index(kind), np.uint8),
                       np.zeros(length, np.int32))  # fmt: skip
    return lay_out(Items.join(parts), length, filler, KINDS.index(kind), rng)


def _draw(rng: np.random.Generator, mix: Mix) -> tuple[str, ...]:
    """One to three families, one of them twice perhaps."""
    names = [name for name in mix.families if name != "top"]
    weight = np.array([mix.families[name] for name in names])
    return tuple(rng.choice(names, int(rng.integers(1, 4)), p=weight / weight.sum()).tolist())


def _filler(rng: np.random.Generator, kind: str, size: int, texts: dict[str, Bytes]) -> Bytes:
    """`size` bytes from somewhere in a text, from its start again where it ends."""
    text = texts[kind]
    start = int(rng.integers(0, len(text)))
    return np.resize(np.roll(text, -start) if len(text) < size else np.concatenate(
        (text[start : start + size], text[: max(0, start + size - len(text))])), size)  # fmt: skip


def noise() -> Bytes:
    """The one phrase that noise repeats."""
    return np.frombuffer(NOISE, np.uint8)


def count_words(rng: np.random.Generator, length: int, common: int = 3) -> Context:
    """Symbols with Zipf frequencies and, now and then, which ones have been commonest so far
    (RULER's frequent and common words)."""
    alphabet = int(rng.choice((16, 32, 64)))
    symbols: Ints = vocab.SYMBOL + rng.permutation(vocab.SYMBOLS)[:alphabet]
    weight = (np.arange(alphabet) + 1.0) ** -rng.uniform(1.0, 2.0)
    words = rng.choice(alphabet, length, p=weight / weight.sum())
    tokens, kind = symbols[words], np.zeros(length, np.uint8)
    tokens[0] = vocab.BOS
    size = 1 + common
    first = max(size, length // 4)
    ends = np.unique(rng.integers(first, length, max(1, min(length // 64, 24))))
    ends = ends[np.concatenate(([True], np.diff(ends) > size))]
    for end in ends.tolist():
        start = end - common
        seen = tokens[1:start]
        counts = np.bincount(seen[seen >= vocab.SYMBOL] - vocab.SYMBOL, minlength=vocab.SYMBOLS)
        tokens[start - 1] = vocab.TOP
        tokens[start:end] = vocab.SYMBOL + np.argsort(-counts, kind="stable")[:common]
        kind[start:end] = KINDS.index("top")
    return Context(tokens.astype(np.int16), kind, np.zeros(length, np.int32))
