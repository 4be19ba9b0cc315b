"""A replay with a live progress bar."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from baton.bench.replay import Result, Target, replay
from baton.bench.trace import Job


def run(jobs: Sequence[Job], target: Target, model: str, console: Console) -> list[Result]:
    """Replay `jobs` and show on `console` how many are answered, failed and late."""
    columns = (
        TextColumn("replay"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[note]}"),
        TimeElapsedColumn(),
    )
    failed = tokens = 0
    with Progress(*columns, console=console) as bar:
        task = bar.add_task("replay", total=len(jobs), note="")

        def done(result: Result) -> None:
            nonlocal failed, tokens
            failed += result.error is not None
            tokens += result.tokens
            bar.update(task, advance=1, note=f"{tokens:,} tokens, {failed} failed")

        return asyncio.run(replay(jobs, target, model, done))
