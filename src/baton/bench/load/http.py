"""HTTP/1.1 for a load client: thousands of streams in one process, bytes stamped on arrival.

General HTTP clients spend more on an event than the event is worth here, and some lose their pace
on bodies of megabytes. This one does POST with a body known in advance, nothing else.
"""

from __future__ import annotations

import asyncio
import contextlib
import ssl
import time
from collections.abc import Callable
from typing import Protocol, cast
from urllib.parse import urlsplit

import httptools

from baton.bench.sse import ServerError, api_base

clock = time.monotonic


class Silent(ServerError):
    """The server took too long."""


class Answer(Protocol):
    """Who reads an answer. Nothing it does may raise but ServerError, which ends the request."""

    def on_status(self, status: int, reason: str) -> None:
        """The head has come."""

    def on_body(self, data: bytes, now: float) -> None:
        """Part of the body has come, at `now` on the monotonic clock."""


class Inbox:
    """Stamps what arrives and has it parsed once every socket that has data has been read: an event
    must not wait for the parsing of another before its time is taken."""

    def __init__(self) -> None:
        self._got: list[tuple[Connection, bytes, float]] = []

    def put(self, connection: Connection, data: bytes, now: float) -> None:
        """Bytes have come."""
        if not self._got:
            asyncio.get_running_loop().call_soon(self._parse)
        self._got.append((connection, data, now))

    def _parse(self) -> None:
        got, self._got = self._got, []
        for connection, data, now in got:
            connection.parse(data, now)


class Connection(asyncio.Protocol):
    """One connection; one request at a time."""

    def __init__(self, inbox: Inbox, on_closed: Callable[[Connection], None]) -> None:
        self._inbox, self._on_closed = inbox, on_closed
        self._transport: asyncio.Transport | None = None
        self._answer: Answer | None = None
        self._done: asyncio.Future[None] | None = None
        self._parser: httptools.HttpResponseParser | None = None
        self._until_close, self._reusable = True, False
        self._reason = ""
        self._now = self._last = 0.0
        #: bytes of an answer have come, so the request must not be sent again
        self.answered = False
        self.open = True

    async def request(self, head: bytes, body: bytes, answer: Answer) -> None:
        """Send and read to the end of the answer.

        Raises:
            ServerError: the connection or the answer broke, or `answer` found it bad.
        """
        assert self._transport is not None, "connection_made() comes first"
        assert self._done is None, "one request at a time"
        self._answer, self.answered = answer, False
        self._until_close, self._reusable = True, False
        self._parser = httptools.HttpResponseParser(self)
        self._done = asyncio.get_running_loop().create_future()
        self._last = clock()
        try:
            self._transport.writelines((head, body))
            await self._done
        except RuntimeError as error:  # uvloop's word for a connection that was just closed
            self.abort()
            raise ServerError(f"the connection was closed ({error})") from None
        except BaseException:
            self.abort()
            raise
        finally:
            self._done = self._answer = None
        if not self._reusable:
            self.abort()

    @property
    def silence(self) -> float:
        """When bytes last came, or the request was sent, on the monotonic clock."""
        return self._last

    def fail(self, error: ServerError) -> None:
        """End the request in flight with an error."""
        if self._done is not None and not self._done.done():
            self._done.set_exception(error)

    def abort(self) -> None:
        """Close at once."""
        self.open = False
        if self._transport is not None:
            self._transport.abort()

    # asyncio calls these

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is no subclass

    def data_received(self, data: bytes) -> None:
        self._last = clock()
        self._inbox.put(self, data, self._last)

    def parse(self, data: bytes, now: float) -> None:
        """Read bytes that came at `now`."""
        if self._parser is None or self._done is None:
            return self.abort()  # nobody asked for them
        self._now = now
        self.answered = True
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            # what a callback raises comes wrapped
            cause = error.__context__
            ours = cause if isinstance(cause, ServerError) else None
            self.fail(ours or ServerError(f"not an HTTP answer: {error}"))

    def connection_lost(self, exc: Exception | None) -> None:
        self.open = False
        self._on_closed(self)
        if self._done is None or self._done.done():
            return
        if exc is None and self.answered and self._until_close:
            self._done.set_result(None)
            return
        told = f" ({exc})" if exc is not None and str(exc) else ""
        where = "in the middle of the answer" if self.answered else "without an answer"
        self.fail(ServerError(f"the server closed the connection {where}{told}"))

    # the parser calls these

    def on_header(self, name: bytes, value: bytes) -> None:
        if name.lower() in (b"content-length", b"transfer-encoding"):
            self._until_close = False

    def on_headers_complete(self) -> None:
        assert self._parser is not None
        assert self._answer is not None
        self._answer.on_status(self._parser.get_status_code(), self._reason)

    def on_status(self, reason: bytes) -> None:
        self._reason = reason.decode("latin-1")

    def on_body(self, data: bytes) -> None:
        if self._answer is not None:
            self._answer.on_body(data, self._now)

    def on_message_complete(self) -> None:
        assert self._parser is not None
        self._reusable = self._parser.should_keep_alive()  # only now does it know
        if self._done is not None and not self._done.done():
            self._done.set_result(None)


class Pool:
    """Connections to one server, kept open between requests."""

    def __init__(self, url: str, api_key: dict[str, str], connect_timeout: float = 30.0) -> None:
        parts = urlsplit(api_base(url))
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ServerError(f"{url!r} is not the URL of a server: expected http://HOST:PORT")
        self._host, self._tls = parts.hostname, parts.scheme == "https"
        self._port = parts.port or (443 if self._tls else 80)
        self._timeout = connect_timeout
        self._lines = f"Host: {parts.netloc.rpartition('@')[2]}\r\n" + "".join(
            f"{name}: {value}\r\n" for name, value in api_key.items()
        )
        self._base = parts.path
        self._inbox = Inbox()
        self._idle: list[Connection] = []
        self._all: set[Connection] = set()
        self._ssl = ssl.create_default_context() if self._tls else None

    def head(self, path: str, length: int) -> bytes:
        """The head of a POST of `length` bytes of JSON."""
        return (
            f"POST {self._base}{path} HTTP/1.1\r\n{self._lines}Content-Type: application/json\r\n"
            f"Accept: text/event-stream\r\nContent-Length: {length}\r\n\r\n"
        ).encode("latin-1")

    async def take(self, fresh: bool = False) -> tuple[Connection, bool]:
        """A connection, and whether it was used before.

        Raises:
            ServerError: the server does not take it.
        """
        while self._idle and not fresh:
            connection = self._idle.pop()
            if connection.open:
                return connection, True
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(self._timeout):
                _, made = await loop.create_connection(
                    lambda: Connection(self._inbox, self._all.discard),
                    self._host,
                    self._port,
                    ssl=self._ssl,
                )
        except TimeoutError:
            raise ServerError(f"no connection within {self._timeout:g} s") from None
        except OSError as error:
            raise ServerError(f"no connection: {error.strerror or error}") from None
        self._all.add(made)
        return made, False

    async def open(self, count: int) -> None:
        """Have `count` connections ready, or as many as the server takes."""
        with contextlib.suppress(ServerError):  # a request that finds none will say so
            for connection in [(await self.take(fresh=True))[0] for _ in range(count)]:
                self.give(connection)

    def give(self, connection: Connection) -> None:
        """Take it back once its request is over."""
        if connection.open:
            self._idle.append(connection)

    def close(self) -> None:
        """Close every connection."""
        for connection in list(self._all):
            connection.abort()
