"""The stub's HTTP side: one protocol object for each connection."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import httptools
import msgspec

from baton.bench.stub.answer import Answer, Request, clock
from baton.bench.stub.profile import Profile
from baton.bench.stub.state import State

#: connections that may wait to be accepted
BACKLOG = 8192
_request = msgspec.json.Decoder(Request)


async def start(profile: Profile, port: int = 0) -> tuple[asyncio.Server, str]:
    """A listening server and its URL; port 0 takes a free one."""
    state = State(profile)
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: Connection(state), "127.0.0.1", port, backlog=BACKLOG)
    return server, f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"


class Connection(asyncio.Protocol):
    """One client's connection; it is the `Client` of its answers."""

    def __init__(self, state: State) -> None:
        self._state = state
        self._transport: asyncio.Transport | None = None
        self._parser = httptools.HttpRequestParser(self)
        self._url, self._headers, self._body = b"", {}, []  # type: ignore[var-annotated]
        self._begun = 0.0
        self._answer: Answer | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is no subclass

    def data_received(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError:
            self.drop()

    def connection_lost(self, exc: Exception | None) -> None:
        if self._answer is not None:
            self._state.ended(self._answer)

    # the parser calls these

    def on_message_begin(self) -> None:
        self._begun = clock()

    def on_url(self, url: bytes) -> None:
        self._url, self._headers, self._body = url, {}, []

    def on_header(self, name: bytes, value: bytes) -> None:
        self._headers[name.decode("latin-1").lower()] = value.decode("latin-1")

    def on_body(self, data: bytes) -> None:
        self._body.append(data)

    def on_message_complete(self) -> None:
        path = self._url.decode("latin-1").partition("?")[0]
        if path in ("/v1/completions", "/v1/chat/completions"):
            self._complete(b"".join(self._body))
        elif path == "/v1/models":
            profile = self._state.profile
            card = {"id": profile.model, "object": "model", "max_model_len": profile.max_model_len}
            self.whole(200, {"object": "list", "data": [card]})
        elif path == "/stats":
            self.whole(200, self._state.stats())
        elif path == "/reset_prefix_cache":
            self._state.reset_cache()
            self.whole(200, {})
        elif path == "/health":
            self.whole(200, {"status": "ready"})
        else:
            self.whole(404, {"error": {"message": f"no page {path}"}})

    def _complete(self, body: bytes) -> None:
        state, number = self._state, self._state.number
        fault = state.profile.fault(number)
        state.number += 1
        state.last = {"headers": self._headers, "path": self._url.decode("latin-1")}
        if len(body) < 4096:
            state.last["body"] = body.decode(errors="replace")
        if fault == "refuse":
            return self.drop()
        if fault == "status":
            return self.whole(500, {"error": {"message": "a planted failure"}})
        if fault == "full":
            return self.whole(429, {"error": {"message": "queue is full"}})
        if fault == "html":
            return self._send(200, b"<html>an odd proxy</html>", b"text/html")
        try:
            request = _request.decode(body)
            prompt = state.prompt(request)
        except (msgspec.MsgspecError, ValueError) as error:
            return self.whole(400, {"error": {"message": str(error)}})
        self._answer = Answer(state, self, request, prompt, fault, self._begun)
        state.submit(self._answer)

    # answers call these

    def start(self) -> None:
        self._write(
            b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n"
            b"Transfer-Encoding: chunked\r\n\r\n"
        )

    def event(self, data: bytes) -> None:
        self._write(b"%x\r\n%b\r\n" % (len(data), data))

    def end(self) -> None:
        self._write(b"0\r\n\r\n")
        self._answer = None

    def whole(self, status: int, body: Any) -> None:
        self._send(status, msgspec.json.encode(body), b"application/json")
        self._answer = None

    def drop(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    def _send(self, status: int, body: bytes, kind: bytes) -> None:
        head = b"HTTP/1.1 %d Stub\r\nContent-Type: %b\r\nContent-Length: %d\r\n\r\n"
        self._write(head % (status, kind, len(body)) + body)

    def _write(self, data: bytes) -> None:
        if self._transport is not None:
            self._transport.write(data)
