"""How long a client may take to send a request: uvicorn itself waits for ever."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

#: bytes per second that a request's body may take its time for
SLOWEST = 16384
_TOO_SLOW = b"HTTP/1.1 408 Request Timeout\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"


class _Patient(HttpToolsProtocol):
    """uvicorn's connection, which is closed when a request takes longer to come than `seconds` from
    its first byte on, and the time that its body takes at the slowest rate allowed. Before its
    first byte, uvicorn's keep-alive counts, on a new connection too.

    Waiting for an answer and reading it do not count, however long they take. No request is
    answered twice: some have their answer before their body has come.
    """

    seconds: float
    _timer: asyncio.TimerHandle | None = None  # while a request comes
    _begun = 0.0
    _received = 0
    _coming: RequestResponseCycle | None = None  # of what comes, once its head is there

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._asked = deque[RequestResponseCycle]()  # not answered yet
        self._rest()

    def connection_lost(self, exc: Exception | None) -> None:
        self._end()
        for cycle in self._asked:  # uvicorn tells the last one only
            cycle.disconnected = True
            cycle.message_event.set()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)  # which ends the keep-alive, whatever has come
        self._rest()

    def on_message_begin(self) -> None:
        self._received = 0
        self._begin()
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        super().on_headers_complete()
        self._coming = self.cycle
        self._asked.append(self.cycle)

    def on_body(self, body: bytes) -> None:
        self._received += len(body)
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._end()
        self._coming = None
        super().on_message_complete()

    def on_response_complete(self) -> None:
        self._asked.popleft()
        super().on_response_complete()
        if self._timer is not None and not self._answered():  # the next one waited for this answer
            self._unset_keepalive_if_required()
            self._begin()

    def send_400_response(self, msg: str) -> None:
        self._end()
        first = self._asked[0] if self._asked else None
        others = first is not None and (first.response_started or first is not self._coming)
        if others or self._answered():
            self.transport.close()  # it would be another's answer, in the middle of it, or a second
        else:
            super().send_400_response(msg)

    def _rest(self) -> None:
        """Let the keep-alive count, unless a request comes or waits for its answer."""
        coming = self._timer is not None and not self._answered()
        counting = self.timeout_keep_alive_task is not None
        if not (self._asked or coming or counting or self.transport.is_closing()):
            self.timeout_keep_alive_task = self.loop.call_later(
                self.timeout_keep_alive, self.timeout_keep_alive_handler
            )

    def _begin(self) -> None:
        self._end()
        self._begun = self.loop.time()
        self._timer = self.loop.call_later(self.seconds, self._look)

    def _end(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _look(self) -> None:
        if self._waiting():
            self._begin()
            return
        left = self._begun + self.seconds + self._received / SLOWEST - self.loop.time()
        if left > 0:
            self._timer = self.loop.call_later(left, self._look)
            return
        self._timer = None
        if not (self._answered() or self.transport.is_closing()):
            self.transport.write(_TOO_SLOW)
        self.transport.close()

    def _waiting(self) -> bool:
        """Whether what comes may take its time: an earlier request is being answered, or the server
        reads slowly."""
        earlier = bool(self._asked) and self._asked[0] is not self._coming
        return earlier or self.flow.read_paused

    def _answered(self) -> bool:
        """Whether the request that comes has its answer, or the start of one."""
        return self._coming is not None and self._coming.response_started


def patient(seconds: float) -> type[Any]:
    """The class of connections for uvicorn, with that much patience."""
    return type("Patient", (_Patient,), {"seconds": seconds})
