"""How long a client may take to send a request: uvicorn itself waits for ever."""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

#: bytes per second that a request's body may take its time for
SLOWEST = 16384
_TOO_SLOW = b"HTTP/1.1 408 Request Timeout\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"


class _Patient(HttpToolsProtocol):
    """uvicorn's connection, which is closed when a request takes longer to come than `seconds`, and
    the time that its bytes take at the slowest rate allowed. The first one counts from the
    connection on, later ones from their first byte: before it, uvicorn's keep-alive counts.

    Waiting for an answer and reading it do not count, however long they take.
    """

    seconds: float
    _timer: asyncio.TimerHandle | None = None
    _begun = 0.0
    _received = 0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._begin()

    def connection_lost(self, exc: Exception | None) -> None:
        self._end()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        self._received += len(data)
        super().data_received(data)

    def on_message_begin(self) -> None:
        if self._timer is None:
            self._begin()
        super().on_message_begin()

    def on_message_complete(self) -> None:
        self._end()
        super().on_message_complete()

    def on_response_complete(self) -> None:
        if self._timer is not None:  # the next request waited for this answer
            self._end()
            self._begin()
        super().on_response_complete()

    def _begin(self) -> None:
        self._begun, self._received = self.loop.time(), 0
        self._timer = self.loop.call_later(self.seconds, self._look)

    def _end(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _look(self) -> None:
        if self._answering():
            self._begin()
            return
        left = self._begun + self.seconds + self._received / SLOWEST - self.loop.time()
        if left > 0:
            self._timer = self.loop.call_later(left, self._look)
            return
        self._timer = None
        if self.cycle is None or self.cycle.response_complete or not self.cycle.response_started:
            self.transport.write(_TOO_SLOW)
        self.transport.close()

    def _answering(self) -> bool:
        """Whether an earlier request is being answered: this one may wait for that."""
        earlier = self.cycle is not None and not self.cycle.more_body
        busy = earlier and not self.cycle.response_complete
        return busy or bool(self.pipeline) or self.flow.read_paused


def patient(seconds: float) -> type[Any]:
    """The class of connections for uvicorn, with that much patience."""
    return type("Patient", (_Patient,), {"seconds": seconds})
