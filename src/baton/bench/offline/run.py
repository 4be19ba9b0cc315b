"""An engine measurement with a live progress bar, saved after every point."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from baton.bench.offline.engine import Document, Settings, measure
from baton.bench.offline.points import Point
from baton.bench.offline.table import write_document
from baton.config.options import EngineOptions


def run(
    options: EngineOptions,
    points: Sequence[Point],
    settings: Settings,
    console: Console,
    file: Path | None,
) -> Document:
    """Measure, with one line and one write of `file` for the start and for each point."""
    columns = (TextColumn("bench"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console) as bar:
        task = bar.add_task("bench", total=len(points) + 1)

        def report(document: Document, line: str) -> None:
            bar.console.print(line, markup=False, highlight=False, soft_wrap=True)
            bar.advance(task)
            if file is not None:
                write_document(file, document)

        document = measure(options, points, settings, report)
    if settings.traces is not None and document["device"]["type"] != "cuda":
        console.print("--profile needs CUDA: no trace was made", style="yellow")
    return document
