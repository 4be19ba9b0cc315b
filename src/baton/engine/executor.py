"""Runs each plan on every rank. Rank 0 lives in the engine process; the others are workers that
receive the same plan bytes, so no rank ever decides anything.
"""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Callable
from typing import Any, TypeVar

import msgspec
import zmq

from baton.config.fingerprint import Fingerprint
from baton.config.options import EngineOptions
from baton.core.errors import Unavailable
from baton.core.log import get_logger
from baton.core.step import StepPlan, StepResult
from baton.engine.folder import PrivateFolder
from baton.engine.lifeline import how_it_ended, spawn
from baton.engine.threads import in_daemon
from baton.runner.probes import Probe
from baton.runner.runner import Runner, Ticket

log = get_logger("executor")
T = TypeVar("T")

#: Message kinds to workers; the payload follows in the next frame.
PLAN, POISON, PROBE = b"plan", b"poison", b"probe"


class Ranks:
    """The worker processes of ranks 1 and up, and the private folder they meet in.

        rank 0                                worker
          PUSH  RANK     ---- ipc ---->  PULL   plans, in order
          PULL  replies  <--- ipc -----  PUSH   "joining", then its fingerprint

    Rank 0 connects to a worker's socket, since a bound one without a peer would block `send`: a
    message for a worker that has ended waits in vain instead, and `check` finds it.

    Args:
        tokenizer: digest of the tokenizer, "" without one.
        parent: the private folder to make this one in, when not the system's.
    """

    def __init__(
        self, options: EngineOptions, tokenizer: str, size: int, parent: str | None = None
    ) -> None:
        self.size = size
        # A short name, since the path of a socket may have 107 characters only.
        self.folder = PrivateFolder("baton-ranks-" if parent is None else "r-", parent)
        self._context = zmq.Context()
        self._workers: list[subprocess.Popen[bytes]] = []
        self._plans: list[zmq.Socket[bytes]] = []
        self._replies = self._context.socket(zmq.PULL)
        self._replies.bind(f"ipc://{self.folder.path}/replies")
        for rank in range(1, size):
            socket = self._context.socket(zmq.PUSH)
            socket.set_hwm(0)
            socket.connect(f"ipc://{self.folder.path}/{rank}")
            self._plans.append(socket)
            place = (str(rank), str(size), self.folder.path, tokenizer)
            self._workers.append(spawn("baton.engine.worker", *place, options=options))

    @property
    def rendezvous(self) -> str:
        """torch.distributed init method: a file in the private folder, so no port is needed."""
        return f"file://{self.folder.path}/rendezvous"

    def meet(self, join: Callable[[], T]) -> T:
        """`join()`, which waits for every rank, once all workers are about to call theirs."""
        self._gather()
        return self.while_alive(join)

    def while_alive(self, work: Callable[[], T]) -> T:
        """Result of `work`, which needs the other ranks; Unavailable when one of them ends, for
        which `work` itself might wait for ever."""
        future = in_daemon(work)
        while True:
            try:
                return future.result(0.2)
            except TimeoutError:
                if future.done():
                    raise
                self.check()
            except Exception:
                self.check(patience=0.1)
                raise

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

    def check(self, patience: float = 0.0) -> None:
        """Raise Unavailable if a worker has ended, or does within `patience` seconds: a dead peer
        shows as a failed collective a moment earlier."""
        time.sleep(patience)
        for rank, worker in enumerate(self._workers, start=1):
            if worker.poll() is not None:
                how = how_it_ended(worker)
                raise Unavailable(f"rank {rank} ended with {how}; see its log above")

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
        self.folder.remove()


class Executor:
    """One rank 0 runner and its workers, seen as one device."""

    def __init__(self, runner: Runner, ranks: Ranks | None, on_close: Callable[[], None]) -> None:
        self.runner = runner
        self._ranks = ranks
        self._on_close = on_close
        self._closed = False

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
                self._ranks.check(patience=0.1)
                problem = f"{type(error).__name__}: {error}"
                raise Unavailable(f"a step failed on rank 0: {problem}") from error

    def check(self) -> None:
        """Raise Unavailable if a rank has died."""
        if self._ranks is not None:
            self._ranks.check()

    @property
    def passes(self) -> tuple[int, int]:
        """Passes of steps through CUDA graphs, and those launched kernel by kernel, on rank 0."""
        return self.runner.graph_passes, self.runner.eager_passes

    def poison(self, pages: list[int]) -> None:
        """Debug: poison freed pages on every rank."""
        if self._ranks is not None:
            self._ranks.send(POISON, msgspec.msgpack.encode(pages))
        self.runner.poison_pages(pages)

    def probe(self, probe: Probe) -> float:
        """Seconds of a synthetic step on all ranks."""
        if self._ranks is not None:
            self._ranks.send(PROBE, msgspec.msgpack.encode(probe))
            return self._ranks.while_alive(lambda: self.runner.probe(probe))
        return self.runner.probe(probe)

    def close(self) -> None:
        """Stop all ranks; frees the device. Harmless the second time."""
        if self._closed:
            return
        self._closed = True
        if self._ranks is not None:
            self._ranks.close()
        self.runner.close()
        self._on_close()
