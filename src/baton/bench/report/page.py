"""The report as one HTML file that loads nothing: text, tables, inline SVG and the document itself
as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from importlib import resources

import msgspec

from baton.bench.record import Run
from baton.bench.report import figures, searched, sections
from baton.bench.report.document import Document
from baton.bench.report.words import Numbers, paragraph


def page(made: Document, runs: Sequence[Run]) -> str:
    """The whole page.

    Args:
        runs: of the document's `runs`, in the same order, with their records.
    """
    write = Numbers(msgspec.to_builtins(made))
    parts = [(name, title, body) for name, title, body in _bodies(made, runs, write) if body]
    links = "".join(f'<a href="#{name}">{title}</a>' for name, title, _ in parts)
    body = "".join(f'<h2 id="{name}">{title}</h2>{text}' for name, title, text in parts)
    warnings = "".join(paragraph(text, "warning") for text in _warnings(made))
    data = msgspec.json.encode(made).decode().replace("<", "\\u003c")
    style = resources.files("baton.bench.report").joinpath("page.css").read_text("utf-8")
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(made.title)}</title><style>{style}</style></head><body>"
        f'<header><h1>{escape(made.title)}</h1><p class="by">{_by(made)}</p></header><main>'
        f"{sections.answers(made, write)}{warnings}<nav>{links}</nav>{body}</main>"
        f"<footer>baton bench {escape(made.version)}, {escape(made.made)}. The page loads nothing "
        "and holds every number it shows as JSON, in its element with the id summary.</footer>"
        f'<script type="application/json" id="summary">{data}</script></body></html>\n'
    )


def _bodies(made: Document, runs: Sequence[Run], write: Numbers) -> list[tuple[str, str, str]]:
    fronts = "".join(figures.pareto(made, latency).html() for latency in made.pareto)
    fronts = f'<div class="plots">{fronts}</div>' if fronts else ""
    return [
        ("loads", "Five loads", searched.five_loads(made, write)),
        ("differences", "Differences", sections.differences(made, write)),
        ("latency", "Latency", sections.latency(made, runs, write)),
        ("time", "Over time", sections.timelines(made, runs)),
        ("throughput", "Requests and tokens", sections.rates(made, write)),
        ("groups", "By group", sections.groups(made, write)),
        (
            "pareto",
            "Throughput against latency",
            fronts,
        ),
        ("setting", "What was measured", sections.setting(made)),
        ("definitions", "Definitions", sections.definitions(made)),
    ]


def _warnings(made: Document) -> list[str]:
    invalid = [f"{run.name} is no valid measurement: {w}" for run in made.runs for w in run.invalid]
    return [*invalid, *made.warnings]


def _by(made: Document) -> str:
    """The servers measured and when, in a line."""
    seen = dict.fromkeys(
        ", ".join(
            str(run.server[name])[:40]
            for name in ("model", "version", "commit", "url")
            if run.server.get(name)
        )
        for run in made.runs
    )
    when = min((run.started for run in made.runs if run.started), default="")
    return escape(" · ".join(text for text in (*seen, sections.moment(when)) if text))
