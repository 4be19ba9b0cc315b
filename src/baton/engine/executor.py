"""Runs each plan on every rank. Rank 0 lives in the engine process; the others are workers that
receive the same plan bytes, so no rank ever decides anything.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import msgspec
import zmq

from baton.config.fingerprint import Fingerprint
from baton.config.options import EngineOptions
from baton.core.errors import Unavailable
from baton.core.log import get_logger
from baton.core.step import StepPlan, StepResult
from baton.engine.threads import in_daemon
from baton.runner.probes import Probe
from baton.runner.runner import Runner, Ticket

log = get_logger("executor")
T = TypeVar("T")

#: Message kinds to workers; the payload follows in the next frame.
PLAN, POISON, PROBE, STOP = b"plan", b"poison", b"probe", b"stop"


class Ranks:
    """The worker processes of ranks 1 and up, and the private folder they meet in."""

    def __init__(
        self, options: EngineOptions, tokenizer: str, size: int, parent: str | None
    ) -> None:
        self.size = size
        prefix = "baton-ranks-" if parent is None else "ranks-"
        self.folder = tempfile.TemporaryDirectory(prefix=prefix, dir=parent)  # mode 0700
        self._context = zmq.Context()
        self._workers: list[subprocess.Popen[bytes]] = []
        self._plans: list[zmq.Socket[bytes]] = []
        self._replies = self._context.socket(zmq.PULL)
        self._replies.bind(f"ipc://{self.folder.name}/replies")
        payload = msgspec.json.encode(options)
        for rank in range(1, size):
            socket = self._context.socket(zmq.PUSH)
            socket.bind(f"ipc://{self.folder.name}/{rank}")
            self._plans.append(socket)
            self._workers.append(
                _spawn([str(rank), str(size), self.folder.name, tokenizer], payload)
            )

    @property
    def rendezvous(self) -> str:
        """torch.distributed init method: a file in the private folder, so no port is needed."""
        return f"file://{self.folder.name}/rendezvous"

    def await_ready(self, ours: Fingerprint, timeout: float = 600.0) -> None:
        """Block until every worker has loaded, and compare fingerprints."""
        deadline = time.monotonic() + timeout
        waiting = set(range(1, self.size))
        while waiting:
            self.check()
            if time.monotonic() > deadline:
                raise Unavailable(f"ranks {sorted(waiting)} did not load within {timeout:.0f} s")
            if self._replies.poll(200):
                rank, fingerprint = json.loads(self._replies.recv())
                ours.require(Fingerprint.from_dict(fingerprint))
                waiting.discard(rank)

    def while_alive(self, work: Callable[[], T]) -> T:
        """Result of `work`, which meets the other ranks; Unavailable once one of them has ended,
        for which `work` itself might wait for ever."""
        future = in_daemon(work)
        while True:
            try:
                return future.result(0.2)
            except TimeoutError:
                if future.done():
                    raise
                self.check()
            except Exception:
                time.sleep(0.1)  # a dead peer shows as a failed collective a moment earlier
                self.check()
                raise

    def send(self, kind: bytes, payload: bytes) -> None:
        """Queue a message for every worker; Unavailable if one has ended."""
        for socket in self._plans:
            while not socket.poll(
                200, zmq.POLLOUT
            ):  # nobody at the other end, not even to queue for
                self.check()
            socket.send_multipart([kind, payload])

    def check(self) -> None:
        """Raise Unavailable if a worker has ended."""
        for rank, worker in enumerate(self._workers, start=1):
            if worker.poll() is not None:
                how = how_it_ended(worker)
                raise Unavailable(f"rank {rank} ended with {how}; see its log above")

    def close(self) -> None:
        """Ask workers to stop, then make sure that they did. Harmless the second time."""
        if self._context.closed:
            return
        for socket in self._plans:
            with contextlib.suppress(zmq.ZMQError):
                socket.send_multipart([STOP, b""], zmq.NOBLOCK)
        for worker in self._workers:
            if worker.stdin is not None:
                worker.stdin.close()
            try:
                worker.wait(5)
            except subprocess.TimeoutExpired:
                worker.kill()
                worker.wait()
        self._context.destroy(linger=0)
        self.folder.cleanup()


def _spawn(arguments: list[str], payload: bytes) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "baton.engine.worker", *arguments]
    env = dict(os.environ, PYTHONPATH=package_path())
    worker = subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        env=env,
        start_new_session=True,  # Ctrl-C reaches rank 0 only, which decides
    )
    assert worker.stdin is not None
    with contextlib.suppress(BrokenPipeError):  # it has ended already: check() will say so
        worker.stdin.write(payload + b"\n")
        worker.stdin.flush()  # stays open: its end tells the worker that the engine is gone
    return worker


def how_it_ended(process: subprocess.Popen[bytes]) -> str:
    """`"signal SIGKILL"` or `"exit code 1"`."""
    code = process.poll()
    if code is None:
        return "still running"
    return f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"


def package_path() -> str:
    """PYTHONPATH with which a child finds the same `baton` as this process."""
    root = str(Path(__file__).resolve().parents[2])
    inherited = [p for p in sys.path if p and Path(p).is_dir()]
    return os.pathsep.join([root, *inherited])


class Executor:
    """One rank 0 runner and its workers, seen as one device."""

    def __init__(self, runner: Runner, ranks: Ranks | None, on_close: Callable[[], None]) -> None:
        self.runner = runner
        self._ranks = ranks
        self._on_close = on_close

    def launch(self, plan: StepPlan) -> Ticket:
        """Start a step on every rank."""
        if self._ranks is not None:
            self._ranks.send(PLAN, msgspec.msgpack.encode(plan))
        return self.runner.launch(plan)

    def collect(self, ticket: Ticket) -> StepResult:
        """Wait for a step; Unavailable if a rank died, so that nothing waits for ever."""
        while True:
            try:
                return self.runner.collect(ticket, None if self._ranks is None else 1.0)
            except TimeoutError:
                assert self._ranks is not None
                self._ranks.check()
            except Exception:
                if self._ranks is not None:
                    time.sleep(0.1)  # a dead peer shows as a failed collective a moment earlier
                    self._ranks.check()
                raise

    def poison(self, pages: list[int]) -> None:
        """Debug: poison freed pages on every rank."""
        if self._ranks is not None:
            self._ranks.send(POISON, msgspec.msgpack.encode(pages))
        self.runner.poison_pages(pages)

    def probe(self, probe: Probe) -> float:
        """Seconds of a synthetic step on all ranks."""
        if self._ranks is not None:
            body = msgspec.msgpack.encode((probe.seqs, probe.chunk, probe.context))
            self._ranks.send(PROBE, body)
            return self._ranks.while_alive(lambda: self.runner.probe(probe))
        return self.runner.probe(probe)

    def check(self) -> None:
        """Unavailable if a rank has died."""
        if self._ranks is not None:
            self._ranks.check()

    def close(self) -> None:
        """Stop all ranks; frees the device."""
        if self._ranks is not None:
            self._ranks.close()
        self.runner.close()
        self._on_close()
