"""Worker processes: started once for a run, given shares, watched."""

from __future__ import annotations

import contextlib
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection, wait

import msgspec

from baton.bench.load.worker import Finished, Share
from baton.bench.record import Record
from baton.core import env

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
        self._dead: set[Connection] = set()
        self._processes: dict[Connection, subprocess.Popen[bytes]] = {}

    def __enter__(self) -> Team:
        for _ in range(self.size):
            # not `multiprocessing`: its children run the caller's main module again
            ours, theirs = socket.socketpair()
            command = [sys.executable, "-m", "baton.bench.load", str(theirs.fileno())]
            process = subprocess.Popen(command, pass_fds=[theirs.fileno()], env=env.child_python())
            theirs.close()
            self._processes[Connection(ours.detach())] = process
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        for pipe in self._processes:
            self._tell(pipe, None)
            pipe.close()
        for process in self._processes.values():
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(0.0 if kind else PATIENCE)
            if process.poll() is None:
                process.kill()
                process.wait()

    def work(
        self, shares: Sequence[Share], on_lines: OnLines, stop: Callable[[], bool]
    ) -> list[Finished]:
        """Have every worker do its share, all from the same moment; returns when all have.

        A worker that dies is told in `lost`; its requests that were not reported are missing.
        Ctrl-C stops the others in order, hands on what they have, and is raised again.
        """
        busy = set(self._processes) - self._dead
        for pipe, share in zip(self._processes, shares, strict=True):
            self._tell(pipe, share)
        for pipe in list(busy):
            self._hear(pipe, on_lines)  # it is ready, or dead
        busy -= self._dead
        start = time.monotonic() + LEAD
        for pipe in busy:
            self._tell(pipe, start)
        try:
            return self._collect(busy, on_lines, stop)
        except KeyboardInterrupt:
            self._collect(busy, on_lines, lambda: True)
            raise

    def _collect(
        self, busy: set[Connection], on_lines: OnLines, stop: Callable[[], bool]
    ) -> list[Finished]:
        done: list[Finished] = []
        stopped = False
        while busy:
            if not stopped and stop():
                stopped = True
                for pipe in busy:
                    self._tell(pipe, "stop")
            told = wait(list(busy), timeout=0.2)
            for pipe in [pipe for pipe in busy if pipe in told]:
                message = self._hear(pipe, on_lines)
                if isinstance(message, Finished):
                    done.append(message)
                    busy.remove(pipe)
            busy -= self._dead
        return done

    def _tell(self, pipe: Connection, message: object) -> None:
        with contextlib.suppress(OSError):  # it died: `_hear` finds out and says so
            pipe.send(message)

    def _hear(self, pipe: Connection, on_lines: OnLines) -> object:
        """One message, records and counts handed on; None when the worker has died."""
        try:
            message: object = pipe.recv()
        except (EOFError, OSError):
            self._dead.add(pipe)
            code = self._processes[pipe].wait(PATIENCE)
            self.lost.append(
                f"a worker process ended with {code}: requests of its share are missing"
            )
            return None
        if isinstance(message, int):
            self._in_flight[pipe] = message
            self._on_in_flight(sum(self._in_flight.values()))
        elif isinstance(message, bytes):
            on_lines(message, [_decode(line) for line in message.splitlines()])
        return message
