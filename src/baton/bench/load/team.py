"""Worker processes: started once for a run, given shares, watched."""

from __future__ import annotations

import contextlib
import multiprocessing
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection, wait
from types import TracebackType

import msgspec

from baton.bench.load import worker
from baton.bench.load.worker import Finished, Share
from baton.bench.record import Record

#: seconds between "all are ready" and the first send
LEAD = 0.05
#: seconds that workers have to end when asked
PATIENCE = 10.0

OnLines = Callable[[bytes, list[Record]], None]
_decode = msgspec.json.Decoder(Record).decode


class Team:
    """`size` processes. Use it as a context manager. `on_in_flight` is told how many requests are
    on the way, a few times a second."""

    def __init__(self, size: int, on_in_flight: Callable[[int], None] = lambda _: None) -> None:
        self.size = size
        self._on_in_flight = on_in_flight
        self._in_flight: dict[Connection, int] = {}
        #: what to tell of workers that died
        self.lost: list[str] = []
        self._pipes: list[Connection] = []
        self._processes: list[multiprocessing.process.BaseProcess] = []

    def __enter__(self) -> Team:
        spawn = multiprocessing.get_context("spawn")
        for number in range(self.size):
            ours, theirs = spawn.Pipe()
            process = spawn.Process(
                target=worker.main, args=(theirs,), name=f"load-{number}", daemon=True
            )
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for pipe in self._pipes:
            self._tell(pipe, None)
            pipe.close()
        for process in self._processes:
            process.join(0.0 if kind else PATIENCE)
            if process.is_alive():
                process.kill()
                process.join()

    def work(
        self, shares: Sequence[Share], on_lines: OnLines, stop: Callable[[], bool]
    ) -> list[Finished]:
        """Have every worker do its share, all from the same moment; returns when all have.

        A worker that dies is told in `lost`; its requests that were not reported are missing.
        Ctrl-C stops the others in order, hands on what they have, and is raised again.
        """
        open_ends = dict(zip(self._pipes, self._processes, strict=True))
        for pipe, share in zip(self._pipes, shares, strict=True):
            self._tell(pipe, share)
        for pipe in list(open_ends):
            if self._hear(pipe, open_ends, on_lines) != "ready":
                open_ends.pop(pipe, None)
        start = time.monotonic() + LEAD
        for pipe in open_ends:
            self._tell(pipe, start)
        try:
            return self._collect(open_ends, on_lines, stop)
        except KeyboardInterrupt:
            self._collect(open_ends, on_lines, lambda: True)
            raise

    def _collect(
        self,
        open_ends: dict[Connection, multiprocessing.process.BaseProcess],
        on_lines: OnLines,
        stop: Callable[[], bool],
    ) -> list[Finished]:
        done: list[Finished] = []
        stopped = False
        while open_ends:
            if not stopped and stop():
                stopped = True
                for pipe in open_ends:
                    self._tell(pipe, "stop")
            told = wait(list(open_ends), timeout=0.2)
            for pipe in [pipe for pipe in open_ends if pipe in told]:
                message = self._hear(pipe, open_ends, on_lines)
                if isinstance(message, Finished):
                    done.append(message)
                    del open_ends[pipe]
        return done

    def _tell(self, pipe: Connection, message: object) -> None:
        with contextlib.suppress(OSError):  # it died: `_hear` finds out and says so
            pipe.send(message)

    def _hear(
        self,
        pipe: Connection,
        open_ends: dict[Connection, multiprocessing.process.BaseProcess],
        on_lines: OnLines,
    ) -> object:
        """One message, records and counts handed on; None when the worker has died."""
        try:
            message: object = pipe.recv()
        except (EOFError, OSError):
            process = open_ends.pop(pipe)
            process.join(1.0)
            self.lost.append(
                f"worker {process.name} ended with {process.exitcode}: requests of its share are "
                "missing"
            )
            return None
        if isinstance(message, int):
            self._in_flight[pipe] = message
            self._on_in_flight(sum(self._in_flight.values()))
        elif isinstance(message, bytes):
            on_lines(message, [_decode(line) for line in message.splitlines()])
        return message
