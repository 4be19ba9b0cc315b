"""Runs each plan on every rank. Rank 0 lives in the engine process; the others are workers that
receive the same plan bytes, so no rank ever decides anything.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

import msgspec
import zmq

from baton.config.fingerprint import Fingerprint
from baton.config.options import EngineOptions
from baton.core import env
from baton.core.errors import Unavailable
from baton.core.log import get_logger
from baton.core.step import StepPlan, StepResult
from baton.runner.probes import Probe
from baton.runner.runner import Runner, Ticket

log = get_logger("executor")

#: Message kinds to workers; the payload follows in the next frame.
PLAN, POISON, PROBE = b"plan", b"poison", b"probe"


class Ranks:
    """The worker processes of ranks 1 and up, and the private folder they meet in.

        rank 0                                worker
          PUSH  RANK     ---- ipc ---->  PULL   plans, in order
          PULL  replies  <--- ipc -----  PUSH   "joining", then its fingerprint

    Rank 0 connects to a worker's socket, since a bound one without a peer would block `send`: a
    message for a worker that has ended waits in vain instead, and `check` finds it.
    """

    def __init__(self, options: EngineOptions, tokenizer: str, size: int) -> None:
        self.size = size
        self.folder = tempfile.TemporaryDirectory(prefix="baton-ranks-")  # mode 0700
        self._context = zmq.Context()
        self._workers: list[subprocess.Popen[bytes]] = []
        self._plans: list[zmq.Socket[bytes]] = []
        self._replies = self._context.socket(zmq.PULL)
        self._replies.bind(f"ipc://{self.folder.name}/replies")
        payload = msgspec.json.encode(options)
        for rank in range(1, size):
            socket = self._context.socket(zmq.PUSH)
            socket.set_hwm(0)
            socket.connect(f"ipc://{self.folder.name}/{rank}")
            self._plans.append(socket)
            self._workers.append(
                _spawn([str(rank), str(size), self.folder.name, tokenizer], payload)
            )

    @property
    def rendezvous(self) -> str:
        """torch.distributed init method: a file in the private folder, so no port is needed."""
        return f"file://{self.folder.name}/rendezvous"

    def await_joining(self) -> None:
        """Block until every worker is about to join the group, which nobody can leave alive."""
        self._gather()

    def await_ready(self, ours: Fingerprint) -> None:
        """Block until every worker has loaded, and compare fingerprints."""
        for theirs in self._gather().values():
            ours.require(Fingerprint.from_dict(theirs))

    def _gather(self, timeout: float = 600.0) -> dict[int, Any]:
        """The next reply of every worker, by rank; Unavailable if one ends or is late."""
        deadline = time.monotonic() + timeout
        found: dict[int, Any] = {}
        while len(found) < len(self._workers):
            self.check()
            if time.monotonic() > deadline:
                late = sorted({*range(1, self.size)} - found.keys())
                raise Unavailable(f"ranks {late} did not load within {timeout:.0f} s")
            if self._replies.poll(200):
                rank, reply = json.loads(self._replies.recv())
                found[rank] = reply
        return found

    def send(self, kind: bytes, payload: bytes) -> None:
        """Queue a message for every worker; never blocks."""
        for socket in self._plans:
            socket.send_multipart([kind, payload])

    def check(self) -> None:
        """Raise Unavailable if a worker has ended."""
        for rank, worker in enumerate(self._workers, start=1):
            code = worker.poll()
            if code is not None:
                raise Unavailable(f"rank {rank} ended with exit code {code}; see its log above")

    def close(self) -> None:
        """End the workers: they live as long as their standard input."""
        for worker in self._workers:
            assert worker.stdin is not None
            worker.stdin.close()
        for worker in self._workers:
            try:
                worker.wait(5)
            except subprocess.TimeoutExpired:
                worker.kill()
                worker.wait()
        self._context.destroy(linger=0)
        self.folder.cleanup()


def _spawn(arguments: list[str], payload: bytes) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "baton.engine.worker", *arguments]
    worker = subprocess.Popen(command, stdin=subprocess.PIPE, env=env.child_python())
    assert worker.stdin is not None
    worker.stdin.write(payload + b"\n")
    worker.stdin.flush()  # stays open: its end tells the worker that the engine is gone
    return worker


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
        """Wait for a step.

        Raises:
            Unavailable: a rank died, or failed in this step: its peers may wait for it inside a
                collective, or have gone on without it, so no later step can be trusted.
        """
        if self._ranks is None:
            return self.runner.collect(ticket)
        while True:
            try:
                return self.runner.collect(ticket, 1.0)
            except TimeoutError:
                self._ranks.check()
            except Exception as error:
                time.sleep(0.1)  # a dead peer shows as a failed collective a moment earlier
                self._ranks.check()
                problem = f"{type(error).__name__}: {error}"
                raise Unavailable(f"a step failed on rank 0: {problem}") from error

    def check(self) -> None:
        """Raise Unavailable if a rank has died."""
        if self._ranks is not None:
            self._ranks.check()

    def poison(self, pages: list[int]) -> None:
        """Debug: poison freed pages on every rank."""
        if self._ranks is not None:
            self._ranks.send(POISON, msgspec.msgpack.encode(pages))
        self.runner.poison_pages(pages)

    def probe(self, probe: Probe) -> float:
        """Seconds of a synthetic step on all ranks."""
        if self._ranks is not None:
            self._ranks.send(PROBE, msgspec.msgpack.encode(probe))
        return self.runner.probe(probe)

    def close(self) -> None:
        """Stop all ranks; frees the device."""
        if self._ranks is not None:
            self._ranks.close()
        self.runner.close()
        self._on_close()
