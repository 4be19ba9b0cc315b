"""A live line about a load run: how far, how fast, how late so far."""

from __future__ import annotations

import statistics
import time
from collections import deque

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from baton.bench.metrics import tpot, ttft
from baton.bench.record import Record

#: requests that the latencies shown are the medians of
RECENT = 200
#: seconds between lines where there is no terminal
QUIET = 10.0


class LoadProgress:
    """Shows a run on `console`: a bar on a terminal, a line now and then elsewhere. Its methods are
    what `run_load` calls. Use it as a context manager."""

    def __init__(self, console: Console, what: str, total: int) -> None:
        self._console, self._what, self._total = console, what, total
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=20),
            MofNCompleteColumn(),
            TextColumn("{task.fields[note]}"),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            console=console,
            disable=not console.is_terminal,
        )
        self._task = self._bar.add_task(what, total=total, note="")
        self._begin = self._said = time.monotonic()
        self._done = self._failed = self._in_flight = 0
        self._ttft: deque[float] = deque(maxlen=RECENT)
        self._tpot: deque[float] = deque(maxlen=RECENT)

    def __enter__(self) -> LoadProgress:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def records(self, records: list[Record]) -> None:
        """Requests have ended."""
        for record in records:
            self._done += 1
            self._failed += record.status != "ok"
            for value, recent in ((ttft(record), self._ttft), (tpot(record), self._tpot)):
                if value is not None:
                    recent.append(value)
        self._show()

    def in_flight(self, count: int) -> None:
        """So many requests are on the way."""
        self._in_flight = count
        self._show()

    def _show(self) -> None:
        self._bar.update(self._task, completed=self._done, note=self._note())
        now = time.monotonic()
        if not self._console.is_terminal and now - self._said > QUIET:
            self._said = now
            self._console.print(
                f"{self._what}: {self._done}/{self._total}, {self._note()}",
                highlight=False,
                soft_wrap=True,
            )

    def _note(self) -> str:
        rate = self._done / max(time.monotonic() - self._begin, 1e-9)
        parts = [f"{rate:.1f}/s", f"{self._in_flight} in flight"]
        for name, recent in (("TTFT", self._ttft), ("TPOT", self._tpot)):
            if recent:
                parts.append(f"{name} {statistics.median(recent) * 1000:,.0f} ms")
        return ", ".join([*parts, f"{self._failed} failed"] if self._failed else parts)
