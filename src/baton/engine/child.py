"""One engine process and its two sockets, seen from the API process."""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
import sys
import tempfile
from typing import Any

import msgspec
import zmq
import zmq.asyncio

from baton.config.options import EngineOptions
from baton.core.errors import Unavailable
from baton.engine.executor import how_it_ended, package_path
from baton.engine.messages import EngineInfo, Fatal, FromEngine, Stop, ToEngine
from baton.engine.threads import in_daemon_async


class EngineChild:
    """Spawns on construction; `receive()` yields None once the process is gone."""

    def __init__(self, options: bytes) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="baton-engine-")  # mode 0700
        self._context = zmq.asyncio.Context()
        self._outbox = self._context.socket(zmq.PUSH)
        self._inbox = self._context.socket(zmq.PULL)
        for socket, name in ((self._outbox, "requests"), (self._inbox, "outputs")):
            socket.set_hwm(0)  # nothing accepted is dropped; admission bounds what can queue
            socket.bind(f"ipc://{self._folder.name}/{name}")
        self._decoder = msgspec.msgpack.Decoder(FromEngine)
        self._encoder = msgspec.msgpack.Encoder()
        self._process = subprocess.Popen(
            [sys.executable, "-m", "baton.engine.process", self._folder.name],
            stdin=subprocess.PIPE,
            env=dict(os.environ, PYTHONPATH=package_path()),
            start_new_session=True,  # Ctrl-C reaches the server only, which then drains
        )
        self._death = in_daemon_async(self._process.wait)
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it has ended already: receive() will say so
            self._process.stdin.write(options + b"\n")
            self._process.stdin.flush()  # stays open: its end tells the engine that we are gone

    @property
    def pid(self) -> int:
        """Process id."""
        return self._process.pid

    async def send(self, message: ToEngine) -> None:
        """Queue a message; never blocks."""
        await self._outbox.send(self._encoder.encode(message))

    async def receive(self) -> FromEngine | None:
        """The next message; None when the process has ended and everything it said was read."""
        receive = asyncio.ensure_future(self._inbox.recv())
        both: set[asyncio.Future[Any]] = {receive, self._death}
        await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
        if not receive.done():
            # The process is gone; give what it sent last a moment to arrive.
            await asyncio.wait({receive}, timeout=0.2)
        if receive.done():
            return self._decoder.decode(receive.result())
        receive.cancel()
        return None

    def how_it_ended(self) -> str:
        """`"signal SIGKILL"` or `"exit code 1"`."""
        return how_it_ended(self._process)

    async def stop(self, patience: float = 10.0) -> None:
        """Ask the process to end, then insist; at once if this is cancelled."""
        try:
            if self._process.poll() is None:
                await self.send(Stop())
                await asyncio.wait({self._death}, timeout=patience)
        finally:
            self.kill()

    def kill(self) -> None:
        """End the process now, whatever it is doing. Harmless when it has ended."""
        if self._process.poll() is None:
            self._process.kill()
        self._context.destroy(linger=0)
        self._folder.cleanup()


async def launch(options: EngineOptions) -> tuple[EngineChild, EngineInfo]:
    """Start an engine process and wait for its first message.

    Raises:
        Unavailable: it ended without one.
        ConfigError, ModelError, FingerprintMismatch: it says that it cannot start.
    """
    child = EngineChild(msgspec.json.encode(options))
    try:
        message = await child.receive()
    except BaseException:
        child.kill()
        raise
    if isinstance(message, EngineInfo):
        return child, message
    child.kill()
    if not isinstance(message, Fatal):
        raise Unavailable(f"the engine process ended while starting ({child.how_it_ended()})")
    raise message.error()
