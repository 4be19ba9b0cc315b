"""Server-sent events, and noticing that a client has gone."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from typing import Any, TypeVar

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from baton.server.errors import to_api_error

T = TypeVar("T")
encode = msgspec.json.Encoder().encode

DONE = b"data: [DONE]\n\n"
_PING = b": keep-alive\n\n"


async def until_disconnect(receive: Receive, work: Coroutine[Any, Any, T]) -> T | None:
    """Result of `work`, or None (and `work` cancelled) when the client goes away first."""
    task = asyncio.create_task(work)
    gone = asyncio.create_task(_disconnected(receive))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        return None
    finally:
        gone.cancel()
        if not task.done():
            task.cancel()
            await asyncio.wait({task})


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStream(Response):
    """Sends `events` (each already `data: ...`) as they come.

    `close` is awaited on every path, also when the client disconnects. An exception becomes one
    error event, after which the stream ends without `[DONE]`. After `keepalive` seconds of
    silence a comment is sent.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        events: AsyncIterator[bytes],
        close: Callable[[], Awaitable[None]],
        keepalive: float,
        headers: dict[str, str],
    ) -> None:
        fixed = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        super().__init__(None, headers=fixed | headers)
        del self.headers["content-length"]
        self._events, self._close, self._keepalive = events, close, keepalive
        self._sent = time.monotonic()
        self._sending = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run as an ASGI application."""
        start = {"type": "http.response.start", "status": 200, "headers": self.raw_headers}
        pings = asyncio.create_task(self._ping(send))
        try:
            await send(start)
            await until_disconnect(receive, self._send_all(send))
        finally:
            pings.cancel()
            await self._close()

    async def _send_all(self, send: Send) -> None:
        try:
            async for chunk in self._events:
                await self._send(send, chunk)
        except Exception as error:
            await self._send(send, b"data: " + encode(to_api_error(error).body()) + b"\n\n")
        await self._send(send, b"", more=False)

    async def _send(self, send: Send, chunk: bytes, more: bool = True) -> None:
        self._sending = True
        await send({"type": "http.response.body", "body": chunk, "more_body": more})
        self._sent, self._sending = time.monotonic(), False

    async def _ping(self, send: Send) -> None:
        while True:
            await asyncio.sleep(self._keepalive)
            if not self._sending and time.monotonic() - self._sent >= self._keepalive:
                await self._send(send, _PING)
