"""A result, or a comparison, as one HTML file that loads nothing: tables, heat maps of length by
depth as inline SVG, and the numbers as JSON."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from html import escape
from importlib import resources

import msgspec

from baton.evals.compare import Comparison, Group
from baton.evals.document import Answer, Document
from baton.evals.groups import BINS, by_distance, kind, part, split
from baton.evals.stats import wilson

Cell = tuple[str, float, int] | None
"""What a cell of a heat map says, its shade from -1 to 1, and of how many queries it is."""


def result_page(document: Document) -> str:
    """Of one evaluation."""
    answers = document.answers
    tasks = split(answers, lambda one: one.task)
    maps = [heat("All tasks", _lengths(answers), _cells(answers))]
    for task, mine in tasks.items() if len(tasks) > 1 else ():
        maps.append(heat(task, _lengths(mine), _cells(mine)))
    body = [
        "<h2>Exact match by length and depth</h2>",
        "<p>Depth is where the farthest fact lies that the answer needs: 0% is the start of the "
        "context. Darker is better.</p>",
        f'<div class="maps">{"".join(maps)}</div>',
        "<h2>By task</h2>",
        _shares("task", tasks.items()),
        "<h2>By distance</h2>",
        _shares("tokens up to", by_distance(answers)),
    ]
    kinds = split(answers, kind)
    if kinds:
        body += ["<h2>By kind</h2>", _shares("kind", kinds.items())]
    if document.perplexity:
        rows = [
            [text.text, f"{text.length:,}", f"{text.tokens:,}", f"{text.value:.4f}"]
            for text in document.perplexity
        ]
        body += [
            "<h2>Perplexity</h2>",
            table(["text", "window", "tokens", "perplexity"], rows),
        ]
    elif document.no_perplexity:
        body.append(f"<p>No perplexity: {escape(document.no_perplexity)}.</p>")
    if drafts := document.acceptance():
        rows = [[name, f"{share:.2%}", f"{tokens:,}"] for name, share, tokens in drafts]
        body += [
            "<h2>Guesses of the MTP module that are the model's own</h2>",
            table(["in", "share", "tokens"], rows),
        ]
    summary = {"subject": document.subject, "about": document.about, "suite": document.suite}
    return _page(f"Evaluation of {document.name}", body, msgspec.json.encode(summary).decode())


def comparison_page(made: Comparison) -> str:
    """Of B beside A."""
    both = f"A is {escape(made.a.name)}, B is {escape(made.b.name)}."
    found, words = made.all.paired, "no difference is shown"
    if found.worse:
        words = "B is worse"
    elif found.interval.low > 0:
        words = "B is better"
    lengths = _lengths(made.a.answers)
    cells = {group.name: group for group in made.cells}

    def cell(length: int, depth: int) -> Cell:
        group = cells.get(f"{length} {depth}")
        if group is None:
            return None
        difference = group.paired.difference
        return f"{100 * difference:+.1f}", max(-1.0, min(1.0, difference * 4)), group.paired.n

    body = [
        f'<p class="big">{words}: {100 * found.difference:+.2f} points</p>',
        f"<p>{both} 95% interval {100 * found.interval.low:+.2f} to "
        f"{100 * found.interval.high:+.2f} points, {found.n:,} queries about {found.contexts:,} "
        f"contexts ({escape(found.method)}).</p>",
        "<h2>By length and depth</h2>",
        f'<div class="maps">{heat("A", lengths, _cells(made.a.answers))}'
        f"{heat('B', lengths, _cells(made.b.answers))}{heat('B - A, points', lengths, cell)}</div>",
    ]
    for title, groups in (
        ("By task", [*made.tasks, made.all]), ("By length", made.lengths),
        ("By distance to the farthest fact needed", made.distances), ("By kind", made.notes),
    ):  # fmt: skip
        if groups:
            body += [f"<h2>{title}</h2>", _groups(groups)]
    if made.texts:
        rows = [
            [t.text, f"{t.length:,}", f"{t.a:.4f}", f"{t.b:.4f}", f"{t.change:+.3%}"]
            for t in made.texts
        ]
        body += ["<h2>Perplexity</h2>", table(["text", "window", "A", "B", "change"], rows)]
    elif made.no_perplexity:
        body.append(f"<p>No perplexity: {escape(made.no_perplexity)}.</p>")
    data = msgspec.json.encode(made.as_dict()).decode()
    return _page(f"{made.b.name} beside {made.a.name}", body, data)


def heat(title: str, lengths: Sequence[int], cell: Callable[[int, int], Cell]) -> str:
    """Columns are lengths, rows are depths."""
    wide, tall, left, top = 64, 28, 52, 24
    width, height = left + wide * len(lengths), top + tall * BINS
    drawn = [
        f'<text x="{left + wide * i + wide / 2}" y="{top - 8}" class="mid">{_short(length)}</text>'
        for i, length in enumerate(lengths)
    ]
    for row in range(BINS):
        y = top + tall * row
        drawn.append(
            f'<text x="{left - 8}" y="{y + tall / 2 + 4}" class="end">{100 * row // BINS}%</text>'
        )
        for i, length in enumerate(lengths):
            found = cell(length, row)
            if found is None:
                continue
            text, shade, count = found
            colour = "bad" if shade < 0 else "good"
            x, strong = left + wide * i, abs(shade)
            tip = f"{length:,} tokens, depth {100 * row // BINS}%: {text} of {count} queries"
            drawn.append(
                f'<g><title>{escape(tip)}</title><rect x="{x + 1}" y="{y + 1}" width="{wide - 2}" '
                f'height="{tall - 2}" class="{colour}" fill-opacity="{0.04 + 0.8 * strong:.3f}"/>'
                f'<text x="{x + wide / 2}" y="{y + tall / 2 + 4}" class="mid'
                f'{" on" if strong > 0.6 else ""}">{text}</text></g>'
            )
    name = escape(title)
    return (
        f'<figure><figcaption>{name}</figcaption><svg viewBox="0 0 {width} {height}" '
        f'width="{width}" role="img" aria-label="{name}: length by depth">{"".join(drawn)}</svg>'
        "</figure>"
    )


def table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """The first column names the row."""
    head = "".join(f"<th>{escape(one)}</th>" for one in heads)
    lines = "".join(
        "<tr>" + "".join(f"<td>{escape(one)}</td>" for one in row) + "</tr>" for row in rows
    )
    return (
        f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{lines}</tbody></table>'
        "</div>"
    )


def _lengths(answers: Sequence[Answer]) -> list[int]:
    return sorted({one.length for one in answers})


def _cells(answers: Sequence[Answer]) -> Callable[[int, int], Cell]:
    cells = split(answers, lambda one: (one.length, part(one.depth)))

    def cell(length: int, depth: int) -> Cell:
        found = cells.get((length, depth))
        if found is None:
            return None
        share = sum(one.hit for one in found) / len(found)
        return f"{share:.0%}", share, len(found)

    return cell


def _shares(head: str, groups: Iterable[tuple[str, list[Answer]]]) -> str:
    rows = []
    for name, mine in groups:
        hits = sum(one.hit for one in mine)
        low, high = wilson(hits, len(mine))
        share, ends = f"{hits / len(mine):.1%}", f"{low:.1%} to {high:.1%}"
        rows.append([name, share, ends, f"{len(mine):,}"])
    return table([head, "exact", "95%", "queries"], rows)


def _groups(groups: Sequence[Group]) -> str:
    rows = []
    for group in groups:
        found = group.paired
        low, high = found.interval
        rows.append(
            [
                group.name, f"{found.a:.1%}", f"{found.b:.1%}", f"{100 * found.difference:+.2f}",
                f"{100 * low:+.2f} to {100 * high:+.2f}", str(found.lost), str(found.won),
                f"{found.n:,}", "-" if group.kl is None else f"{group.kl.mean:.2g}",
                f"{group.needed:,}",
            ]
        )  # fmt: skip
    heads = ["", "A", "B", "B - A", "95%, points", "lost", "won", "queries", "KL", "needed"]
    return table(heads, rows)


def _short(length: int) -> str:
    return f"{length // 1024}K" if length % 1024 == 0 else str(length)


def _page(title: str, body: Sequence[str], data: str) -> str:
    style = resources.files("baton.evals").joinpath("page.css").read_text("utf-8")
    inner = data.replace("<", "\\u003c")
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{style}</style></head><body>"
        f"<main><h1>{escape(title)}</h1>{''.join(body)}</main>"
        f'<script type="application/json" id="summary">{inner}</script></body></html>\n'
    )
