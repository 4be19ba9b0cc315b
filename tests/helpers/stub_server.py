"""A small OpenAI-like server that behaves, or misbehaves, as a prompt's first token says."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from typing import Any

GOOD, EARLY, CUT, NO_USAGE, ERROR_EVENT, FULL, ODD, GARBAGE, NO_DONE, ABORTED = range(1000, 1010)


class Stub:
    """Serves /v1/models, /v1/completions and /v1/chat/completions; keeps the bodies it got."""

    def __init__(self, delay: float = 0.0) -> None:
        self.bodies: list[dict[str, Any]] = []
        self.headers: list[str] = []
        self.delay = delay
        self.running = self.most = 0
        self.url = ""

    @contextlib.asynccontextmanager
    async def serving(self, port: int = 0) -> AsyncIterator[Stub]:
        server = await asyncio.start_server(self._connection, "127.0.0.1", port)
        self.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        async with server:
            yield self

    async def _connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            head = (await reader.readuntil(b"\r\n\r\n")).decode()
            self.headers.append(head)
            length = next(
                (int(x.split(":")[1]) for x in head.split("\r\n") if "content-length" in x.lower()),
                0,
            )
            body = json.loads(await reader.readexactly(length)) if length else {}
            if head.startswith("GET"):
                self._whole(writer, 200, {"data": [{"id": "stub-model"}]})
            else:
                self.bodies.append(body)
                self.running += 1
                self.most = max(self.most, self.running)
                await self._answer(writer, body)
                self.running -= 1
            await writer.drain()
        writer.close()

    def _whole(self, writer: asyncio.StreamWriter, status: int, body: Any) -> None:
        text = json.dumps(body).encode()
        head = f"HTTP/1.1 {status} X\r\nContent-Length: {len(text)}\r\nConnection: close\r\n\r\n"
        writer.write(head.encode() + text)

    async def _answer(self, writer: asyncio.StreamWriter, body: dict[str, Any]) -> None:
        prompt = body.get("prompt") or [GOOD]
        mode = prompt[0]
        if mode == FULL:
            self._whole(writer, 429, {"error": {"message": "queue is full", "code": 429}})
            return
        writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\nConnection: close\r\n\r\n")
        count = body.get("max_tokens") or 3
        for i in range(count):
            await asyncio.sleep(self.delay)
            if i == count // 2 and mode in (EARLY, CUT, ERROR_EVENT, ODD, GARBAGE):
                self._break(writer, mode)
                return
            reason = "length" if i == count - 1 else None
            if reason and mode == ABORTED:
                reason = "abort"
            choice = {"index": 0, "text": f" t{i}", "delta": {"content": f" t{i}"}}
            _chunk(writer, f"data: {json.dumps({'choices': [choice | {'finish_reason': reason}]})}")
            await writer.drain()
        if mode != NO_USAGE:
            usage = {"prompt_tokens": len(prompt), "completion_tokens": count}
            usage["prompt_tokens_details"] = {"cached_tokens": len(prompt) // 2}  # type: ignore[assignment]
            _chunk(writer, f": comment\n\ndata: {json.dumps({'choices': [], 'usage': usage})}")
        if mode != NO_DONE:
            _chunk(writer, "data: [DONE]")
        writer.write(b"0\r\n\r\n")

    def _break(self, writer: asyncio.StreamWriter, mode: int) -> None:
        if mode == ERROR_EVENT:
            _chunk(writer, 'data: {"error": {"message": "row is not finite"}}')
        if mode == ODD:
            _chunk(writer, 'data: {"choices": ["what"]}')
        if mode == GARBAGE:
            _chunk(writer, "data: {not json")
        if mode != CUT:  # CUT: the chunked body stops in the middle
            writer.write(b"0\r\n\r\n")


def _chunk(writer: asyncio.StreamWriter, text: str) -> None:
    data = (text + "\n\n").encode()
    writer.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")
