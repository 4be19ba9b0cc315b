"""One progress bar for downloads and loads, on standard error."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Literal, TextIO

from baton.core.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from rich.progress import Progress as RichProgress
    from rich.progress import TaskID

#: `progress(done, total, what)`; total 0 means unknown
ProgressFn = Callable[[int, int, str], None]


def no_progress(done: int, total: int, what: str) -> None:
    """A ProgressFn that shows nothing."""


class Progress:
    """A ProgressFn that draws a bar on a terminal; elsewhere one line when a `what` starts and one
    when it ends. Use it as a context manager; several `what` may follow one another.

    Args:
        unit: what is counted; bytes are shown with their unit and a rate.
        stream: where to draw, standard error unless given.
    """

    def __init__(
        self, unit: Literal["bytes", "items"] = "bytes", stream: TextIO | None = None
    ) -> None:
        self._unit = unit
        self._stream = stream or sys.stderr
        self._started: dict[str, float] = {}
        self._ended: set[str] = set()
        self._bar: RichProgress | None = None
        self._tasks: dict[str, TaskID] = {}

    def __enter__(self) -> Progress:
        if self._stream.isatty():
            self._bar = _bar(self._unit, self._stream)
            self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def __call__(self, done: int, total: int, what: str) -> None:
        """Show that `done` of `total` units of `what` are finished."""
        if self._bar is not None:
            if what not in self._tasks:
                self._tasks[what] = self._bar.add_task(what, total=total or None)
            self._bar.update(self._tasks[what], completed=done, total=total or None)
            return
        if what not in self._started:
            self._started[what] = time.monotonic()
            self._line(f"{what}: {self._amount(total)}" if total else f"{what}...")
        if total and done >= total and what not in self._ended:
            self._ended.add(what)
            self._line(f"{what}: done in {format_seconds(time.monotonic() - self._started[what])}")

    def _amount(self, count: int) -> str:
        return format_bytes(count) if self._unit == "bytes" else str(count)

    def _line(self, text: str) -> None:
        print(text, file=self._stream, flush=True)


def _bar(unit: str, stream: TextIO) -> RichProgress:
    """Rich is imported only where a bar is drawn: it costs a tenth of a second."""
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        MofNCompleteColumn,
        TextColumn,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )
    from rich.progress import Progress as RichProgress

    columns = (
        (DownloadColumn(binary_units=True), TransferSpeedColumn())
        if unit == "bytes"
        else (MofNCompleteColumn(),)
    )
    return RichProgress(
        TextColumn("{task.description}"),
        BarColumn(),
        *columns,
        TimeRemainingColumn(),
        console=Console(file=stream),
    )
