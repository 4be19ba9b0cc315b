"""One engine process and its two sockets, seen from the API process."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import zmq
import zmq.asyncio

from baton.config.options import EngineOptions
from baton.core.errors import Unavailable
from baton.engine.folder import PrivateFolder
from baton.engine.lifeline import how_it_ended, spawn
from baton.engine.messages import EngineInfo, Fatal, FromEngine, Stop, ToEngine
from baton.engine.threads import in_daemon_async


class EngineChild:
    """Spawns on construction; `ready()` comes next, and `stop()` on every path."""

    def __init__(self, options: EngineOptions) -> None:
        self._folder = PrivateFolder("baton-engine-")
        self._context = zmq.asyncio.Context()
        # Connected, not bound, so that a message to a process that is not there (yet, or any
        # more) is queued: a bound socket without a peer would block.
        self._outbox: Any = self._context.socket(zmq.PUSH, zmq.Socket)  # type: ignore[arg-type]
        self._inbox = self._context.socket(zmq.PULL)
        for socket in (self._outbox, self._inbox):
            socket.set_hwm(0)  # nothing accepted is dropped; admission bounds what can queue
        self._outbox.connect(f"ipc://{self._folder.path}/requests")
        self._inbox.bind(f"ipc://{self._folder.path}/outputs")
        self._inbox_now: Any = zmq.Socket.shadow(self._inbox.underlying)
        self._decoder = msgspec.msgpack.Decoder(FromEngine)
        self._encoder = msgspec.msgpack.Encoder()
        self._listens = False
        self._process = spawn("baton.engine.process", self._folder.path, options=options)
        self._death = in_daemon_async(self._process.wait)

    @property
    def pid(self) -> int:
        """Process id."""
        return self._process.pid

    async def ready(self) -> EngineInfo:
        """Wait until the engine has loaded.

        Raises:
            ConfigError, ModelError, FingerprintMismatch, Unavailable: why it will not.
        """
        for message in await self.receive():
            if isinstance(message, EngineInfo):
                return message
            if isinstance(message, Fatal):
                raise message.error()
        raise Unavailable(f"the engine process ended while starting ({self.how_it_ended()})")

    def send(self, message: ToEngine) -> None:
        """Queue a message; never blocks."""
        self._outbox.send(self._encoder.encode(message))

    async def receive(self, most: int = 1) -> list[FromEngine]:
        """The next message and those behind it that are there already, `most` in all; none when
        the process has ended and everything it said was read."""
        receive = asyncio.ensure_future(self._inbox.recv())
        either: set[asyncio.Future[Any]] = {receive, self._death}
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        if not receive.done():
            # The process is gone; give what it sent last a moment to arrive.
            await asyncio.wait({receive}, timeout=0.2)
        if receive.done():
            self._listens = True
            found = [self._decoder.decode(receive.result())]
            while len(found) < most and self._inbox_now.get(zmq.EVENTS) & zmq.POLLIN:
                found.append(self._decoder.decode(self._inbox_now.recv()))
            return found
        receive.cancel()
        return []

    def how_it_ended(self) -> str:
        """`"signal SIGKILL"` or `"exit code 1"`."""
        return how_it_ended(self._process)

    async def stop(self, patience: float = 10.0) -> None:
        """Ask the process to end; insist after `patience` seconds, or at once when cancelled or
        while it is loading: it does not listen then, and has nothing to lose. May be repeated."""
        try:
            if self._listens and self._process.poll() is None:
                self.send(Stop())
                await asyncio.wait({self._death}, timeout=patience)
        finally:
            if self._process.poll() is None:
                self._process.kill()
        await asyncio.wait({self._death})  # not awaited itself: cancelling us must not cancel it
        self._context.destroy(linger=0)
        self._folder.remove()
