"""Runs each plan on every rank. Rank 0 lives in the engine process; the others are workers that
receive the same plan bytes, so no rank ever decides anything.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import zmq

from baton.config.fingerprint import Fingerprint
from baton.config.options import EngineOptions
from baton.core.errors import Unavailable
from baton.core.log import get_logger
from baton.core.step import StepPlan, StepResult
from baton.runner.probes import Probe
from baton.runner.runner import Runner, Ticket

log = get_logger("executor")

#: Message kinds to workers; the payload follows in the next frame.
PLAN, POISON, PROBE, STOP = b"plan", b"poison", b"probe", b"stop"


class Ranks:
    """The worker processes of ranks 1 and up, and the private folder they meet in."""

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

    def send(self, kind: bytes, payload: bytes) -> None:
        """Queue a message for every worker."""
        for socket in self._plans:
            socket.send_multipart([kind, payload])

    def check(self) -> None:
        """Raise Unavailable if a worker has ended."""
        for rank, worker in enumerate(self._workers, start=1):
            code = worker.poll()
            if code is not None:
                raise Unavailable(f"rank {rank} ended with exit code {code}; see its log above")

    def close(self) -> None:
        """Ask workers to stop, then make sure that they did."""
        with contextlib.suppress(zmq.ZMQError):
            self.send(STOP, b"")
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
    worker = subprocess.Popen(command, stdin=subprocess.PIPE, env=env)
    assert worker.stdin is not None
    worker.stdin.write(payload + b"\n")
    worker.stdin.flush()  # stays open: its end tells the worker that the engine is gone
    return worker


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
        return self.runner.probe(probe)

    def close(self) -> None:
        """Stop all ranks; frees the device."""
        if self._ranks is not None:
            self._ranks.close()
        self.runner.close()
        self._on_close()
