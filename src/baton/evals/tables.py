"""Results as tables of at most 100 columns."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from rich.console import Group as Stack
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from baton.evals.compare import Comparison, Group
from baton.evals.document import Answer, Document
from baton.evals.groups import by_distance, kind, split
from baton.evals.stats import wilson


def result(document: Document) -> RenderableType:
    """Exact match by task and length, by distance, by note; perplexity."""
    answers = document.answers
    parts: list[RenderableType] = [
        _tasks(f"Exact match of {document.name}", answers),
        _shares("By distance to the farthest fact needed", "distance up to", by_distance(answers)),
    ]
    kinds = split(answers, kind)
    if kinds:
        parts.append(_shares("By kind", "kind", kinds.items()))
    if document.perplexity:
        made = _table("Perplexity", "text", "window", "tokens", "perplexity", "bits per token")
        for text in document.perplexity:
            bits = text.loss / math.log(2)
            numbers = f"{text.length:,}", f"{text.tokens:,}", f"{text.value:.3f}", f"{bits:.3f}"
            made.add_row(text.text, *numbers)
        parts.append(made)
    elif document.no_perplexity:
        parts.append(Text(f"No perplexity: {document.no_perplexity}."))
    if drafts := document.acceptance():
        made = _table("Guesses of the MTP module that are the model's own", "in", "share", "tokens")
        for name, share, tokens in drafts:
            made.add_row(name, f"{share:.1%}", f"{tokens:,}")
        parts.append(made)
    return Stack(*parts, Text(_effort(document), style="dim"))


def comparison(made: Comparison) -> RenderableType:
    """B beside A."""
    parts: list[RenderableType] = [
        Text(f"A  {made.a.name}\nB  {made.b.name}"),
        _pairs("B beside A on the same queries", "task", [*made.tasks, made.all]),
    ]
    for title, head, groups in (
        ("By length", "length", made.lengths),
        ("By distance to the farthest fact needed", "up to", made.distances),
        ("By kind", "kind", made.notes),
    ):
        if len(groups) > 1:
            parts.append(_pairs(title, head, groups))
    if made.texts:
        table = _table("Perplexity", "text", "window", "tokens", "A", "B", "change")
        for text in made.texts:
            numbers = f"{text.length:,}", f"{text.tokens:,}", f"{text.a:.4f}", f"{text.b:.4f}"
            table.add_row(text.text, *numbers, f"{text.change:+.3%}")
        parts.append(table)
    elif made.no_perplexity:
        parts.append(Text(f"No perplexity: {made.no_perplexity}."))
    return Stack(*parts, Text(_method(made), style="dim"))


def _table(title: str, *heads: str) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold")
    table.add_column(heads[0], overflow="fold")
    for head in heads[1:]:
        table.add_column(head, justify="right")
    return table


def _tasks(title: str, answers: list[Answer]) -> Table:
    """Rows by task and one for all, columns by length, and the interval over all lengths."""
    lengths = sorted({one.length for one in answers})
    table = _table(title, "task", *(f"{length:,}" for length in lengths), "95%", "queries")

    def row(name: str, mine: list[Answer]) -> None:
        cells = [_share([one for one in mine if one.length == length]) for length in lengths]
        table.add_row(name, *cells, _interval(mine), f"{len(mine):,}")

    for task, mine in split(answers, lambda one: one.task).items():
        row(task, mine)
    table.add_section()
    row("all", answers)
    return table


def _shares(title: str, head: str, rows: Iterable[tuple[str, list[Answer]]]) -> Table:
    table = _table(title, head, "exact", "95%", "queries")
    for name, mine in rows:
        table.add_row(name, _share(mine), _interval(mine), f"{len(mine):,}")
    return table


def _share(answers: list[Answer]) -> str:
    return f"{sum(one.hit for one in answers) / len(answers):.1%}" if answers else "-"


def _interval(answers: list[Answer]) -> str:
    low, high = wilson(sum(one.hit for one in answers), len(answers))
    return f"{100 * low:.0f} to {100 * high:.0f}"


def _pairs(title: str, head: str, groups: Sequence[Group]) -> Table:
    table = _table(
        title, head, "A", "B", "B - A", "95%, points", "lost", "won", "queries", "KL", "needed"
    )
    for group in groups:
        found = group.paired
        style = "red" if found.worse else "green" if found.interval.low > 0 else ""
        table.add_row(
            group.name,
            f"{found.a:.1%}",
            f"{found.b:.1%}",
            Text(f"{100 * found.difference:+.2f}", style=style),
            f"{100 * found.interval.low:+.1f} to {100 * found.interval.high:+.1f}",
            str(found.lost),
            str(found.won),
            f"{found.n:,}",
            "-" if group.kl is None else f"{group.kl.mean:.2g}",
            f"{group.needed:,}",
        )
    return table


def _effort(document: Document) -> str:
    computed = "" if document.computed is None else f", {document.computed:,} computed"
    return (
        f"{len(document.answers):,} queries in {document.seconds:.1f} s over {document.prompts:,} "
        f"prompt tokens{computed}. The interval is Wilson's, as if queries were independent."
    )


def _method(made: Comparison) -> str:
    return (
        "lost / won: queries that only A / only B answers. The interval of B - A over all is "
        f"{made.all.paired.method} (a score interval for paired shares; queries of a context count "
        "less than independent ones). KL: nats per answer position from A, a lower bound from the "
        f"20 likeliest tokens. needed: independent queries that show a difference of "
        f"{made.resolve:g} in exact match with a chance of 80%, at the share of pairs that differ."
    )
