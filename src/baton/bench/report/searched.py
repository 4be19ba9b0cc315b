"""The sections about searches: the answer, the five loads, all loads measured."""

from __future__ import annotations

from html import escape

from baton.bench.report import figures
from baton.bench.report.document import Document, SearchSummary
from baton.bench.report.forms import show
from baton.bench.report.words import Numbers, paragraph, table
from baton.bench.slo.level import ALL, Goal

STATES = {
    "above": "It is met at every load offered.",
    "below": "It fails at every load offered.",
    "open": "The search ended before the boundary was closed.",
}


def goal_text(goal: Goal) -> str:
    """The objectives in words: "TTFT ≤ 4 s and TPOT ≤ 50 ms for 95% of sent requests"."""
    limits = [f"{n.upper()} ≤ {show(getattr(goal.slo, n), 'tick')}" for n in goal.objectives]
    # an objective is not torn apart at the end of a line
    words = " and ".join(limit.replace(" ", "\u00a0") for limit in limits)
    return f"{words} for {goal.attainment * 100:g}% of sent requests"


def search_answer(search: SearchSummary, i: int, write: Numbers) -> str:
    """What one search found, with what must be known before it is trusted."""
    found, path = search.found, f"/searches/{i}"
    line, goal = found.edges[ALL], goal_text(found.goal)
    where = f"{path}/found/edges/{ALL}"
    head = f'<p class="of">{escape(search.config)}, {escape(search.shape)}</p>'
    if search.capacity is None:
        known = any(level.valid for level in found.levels)
        what = "No load offered" if known else "No valid measurement"
        head += f'<p class="big">{what}</p><p>meets {goal}.</p>'
    else:
        head += (
            f'<p class="big">{write.write(f"{path}/capacity", "load")} {escape(search.unit)}</p>'
            f"<p>is the highest load found to meet {goal}.</p>"
        )
    said = []
    if search.relative is not None:
        bounds = write.interval(f"{path}/bounds", "percent")
        said.append(
            f"That is {write.write(f'{path}/relative', 'percent')} against "
            f"{escape(search.base or '')} (beyond doubt {bounds})."
        )
    if line.fails is not None:
        said.append(f"It fails at {write.write(f'{where}/fails', 'load')}.")
    if line.state in STATES:
        said.append(STATES[line.state])
    if line.sure_meets is not None and line.sure_fails is not None:
        said.append(
            f"Beyond doubt, the boundary lies between {write.write(f'{where}/sure_meets', 'load')} "
            f"and {write.write(f'{where}/sure_fails', 'load')}."
        )
    said.append(
        f"{write.write(f'{path}/found/runs', 'count')} runs of at most "
        f"{write.write(f'{path}/found/most_runs', 'count')}."
    )
    notes = [line.cliff] if line.cliff else []
    told = "".join(paragraph(_sentence(note), "warning") for note in [*notes, *found.notes])
    kind = "" if search.capacity is not None else " missed"
    return f'<div class="answer{kind}">{head}<p class="soft">{" ".join(said)}</p>{told}</div>'


def _sentence(text: str) -> str:
    return text[:1].upper() + text[1:] + ("" if text.endswith(".") else ".")


def five_loads(made: Document, write: Numbers) -> str:
    """The five-load table and the two curves of each search."""
    return "".join(_five(s, i, write) for i, s in enumerate(made.searches))


def _five(search: SearchSummary, i: int, write: Numbers) -> str:
    heads = [
        "load",
        search.unit,
        "meets it",
        "total tokens/s",
        "output tokens/s",
        "TTFT p95",
        "TPOT p95",
    ]
    rows = []
    for k, row in enumerate(search.five):
        path = f"/searches/{i}/five/{k}"
        mark = "≥ " if row.mark else ""
        rows.append(
            [
                escape(row.label),
                mark + write.write(f"{path}/load", "load"),
                write.write(f"{path}/share", "share") + write.interval(f"{path}/interval", "share"),
                write.write(f"{path}/total", "rate"),
                write.write(f"{path}/output", "rate"),
                write.write(f"{path}/ttft", "time"),
                write.write(f"{path}/tpot", "time"),
            ]
        )
    last = [len(rows) - 1]
    plots = figures.attainment(search).html() + figures.throughput(search).html()
    return (
        f"<h3>{escape(search.config)}, {escape(search.shape)}</h3>"
        f"{table(heads, rows, main=last)}"
        f'<div class="plots">{plots}</div>{_levels(search, i, write)}'
    )


def _levels(search: SearchSummary, i: int, write: Numbers) -> str:
    goal = search.found.goal
    single = goal.objectives if len(goal.objectives) > 1 else []
    rows = []
    for k, row in enumerate(search.levels):
        path = f"/searches/{i}/levels/{k}"
        rows.append(
            [
                write.write(f"{path}/load", "load"),
                write.write(f"{path}/runs", "count"),
                write.write(f"{path}/sent", "count"),
                *(write.write(f"{path}/shares/{name}", "share") for name in single),
                write.write(f"{path}/shares/{ALL}", "share")
                + write.interval(f"{path}/interval", "share"),
                write.write(f"{path}/total", "rate"),
                escape(row.verdict),
            ]
        )
    heads = [search.unit, "runs", "sent", *(n.upper() for n in single), "all", "tokens/s", ""]
    what = (
        "meets, fails: the interval of this load's own runs leaves no doubt; unclear: it includes "
        "the target; behind: the server fell behind"
    )
    return (
        f"<details><summary>All {len(rows)} loads measured</summary>"
        f"{table(heads, rows, caption=what)}</details>"
    )
