"""`baton bench report A B C`: one page about runs or searches, side by side."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from baton.cli.bench_flags import ResultFlags
from baton.cli.bench_slo import show
from baton.cli.show import errors, examples, out, table
from baton.core.errors import ConfigError
from baton.core.progress import Progress

if TYPE_CHECKING:
    from baton.bench.report.document import Comparison, Document
    from baton.bench.report.subject import Subject


def register(group: typer.Typer) -> None:
    """Add the command."""
    group.command(
        "report",
        epilog=examples(
            "baton bench report results/ --out report/",
            "baton bench report baseline/ fp8/ --title 'FP8 KV' --out compared/",
            "baton bench report a/run.jsonl b/run.jsonl --ttft 4s --tpot 50ms",
        ),
    )(_report)


def _report(
    inputs: Annotated[
        list[Path],
        typer.Argument(
            metavar="A [B ...]",
            help="Files of runs, folders of them, or folders of `baton bench slo`; others are "
            "compared with the first.",
        ),
    ],
    folder: Annotated[
        Path, typer.Option("--out", help="Folder for report.html, summary.json and CSV.")
    ] = Path("report"),
    title: Annotated[str | None, typer.Option(help="Head of the page.")] = None,
    ttft: Annotated[
        str | None, typer.Option(help="Objective for the time to first token, as 4s.")
    ] = None,
    tpot: Annotated[
        str | None, typer.Option(help="Objective for the time per output token, as 50ms.")
    ] = None,
    e2e: Annotated[str | None, typer.Option(help="Objective for the whole request.")] = None,
    attainment: Annotated[
        float, typer.Option(help="Share of requests that must meet the objectives.")
    ] = 0.95,
    allow_different: Annotated[
        bool,
        typer.Option(
            "--allow-different/--no-allow-different",
            help="Compare runs of different workloads all the same.",
        ),
    ] = False,
    json: Annotated[
        bool, typer.Option("--json/--no-json", help="Print JSON instead of tables.")
    ] = False,
) -> None:
    """Write one self-contained page about runs, and compare them where there are several.

    Objectives are those of a search unless given. Runs of different workloads are refused: their
    difference would say nothing about the servers.
    """
    from baton.bench.report.subject import report
    from baton.bench.report.write import write
    from baton.bench.runfile import make_folder

    make_folder(folder)
    # of one input it may be the own page; of several, a summary of searches would be lost
    if len(inputs) > 1 and folder.resolve() in {path.resolve() for path in inputs}:
        raise ConfigError(f"--out {folder} is one of those compared: its own summary would be lost")
    subjects = _read(inputs)
    names = ", ".join(path.stem or str(path) for path in inputs)
    goal = ResultFlags(ttft=ttft, tpot=tpot, e2e=e2e, attainment=attainment).goal()
    made, runs = report(subjects, title or f"Load on {names}", goal, allow_different)
    for path, subject in zip(inputs, subjects, strict=True):
        for part in subject.parts:
            if part.search is not None:  # this document lies elsewhere than the runs
                part.search.folder = os.path.relpath(path / part.search.folder, folder)
    written = write(folder, made, runs)
    show(made, json)
    if not json:
        for pair in made.comparisons:
            _print(made, pair)
        for line in made.warnings:
            out.print(line, style="yellow", markup=False, highlight=False)
    told = ", ".join(str(path) for path in written)
    errors.print(f"written: {told}", style="dim", markup=False)


def _read(inputs: Sequence[Path]) -> list[Subject]:
    from baton.bench.report.subject import read_subject

    subjects = []
    with Progress("items") as shown:
        for done, path in enumerate(inputs):
            shown(done, len(inputs), "reading runs")
            subjects.append(read_subject(path))
        shown(len(inputs), len(inputs), "reading runs")
    return subjects


def _print(made: Document, pair: Comparison) -> None:
    from baton.bench.report.forms import DIFFERENCE
    from baton.bench.report.forms import show as form

    rows = []
    for row in pair.rows:
        signed = DIFFERENCE[row.form]
        doubt = ""
        if row.interval is not None:
            doubt = f"{form(row.interval.low, signed)} to {form(row.interval.high, signed)}"
        rows.append(
            (
                row.label,
                form(row.base, row.form),
                form(row.other, row.form),
                form(row.difference, signed),
                doubt,
                row.verdict,
            )
        )
    base, other = made.runs[pair.base].name, made.runs[pair.other].name
    heads = ("", "base", "other", "difference", "95% interval", "other is")
    table(f"{other}, less {base}", heads, rows)
