"""Clients that leave, clients that do not read, engines that die, and many streams at once."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import time
from typing import Any

import httpx
import pytest

from baton.core.errors import RequestError
from helpers.fake_engine import FakeEngine, FakeStream, Script
from helpers.serving import Running, running, wait_until

TEXT = "/v1/completions"


def test_disconnect_in_a_stream_cancels(server: Running) -> None:
    server.engine.script.hang_after = 3
    with server.http.stream("POST", TEXT, json={"prompt": "abc", "stream": True}) as answer:
        assert next(answer.iter_lines()).startswith("data: ")
    wait_until(lambda: len(server.engine.cancelled) == 1, 2)
    wait_until(lambda: server.engine.running == 0, 2)
    assert server.metric("request_success_total", finished_reason="abort") == 1


@pytest.mark.parametrize("prompt", ["abc", ["a", "b", "c"]])
def test_disconnect_while_waiting_cancels(server: Running, prompt: Any) -> None:
    server.engine.script.hang_after = 1
    with pytest.raises(httpx.ReadTimeout):
        server.http.post(TEXT, json={"prompt": prompt}, timeout=0.3)
    wait_until(lambda: len(server.engine.cancelled) == len(server.engine.seen), 2)
    wait_until(lambda: server.engine.running == 0, 2)
    assert len(server.engine.seen) == (1 if prompt == "abc" else 3)


def test_finished_requests_are_not_cancelled(server: Running) -> None:
    server.post(TEXT, prompt=["abc", "d"], max_tokens=2)
    server.post(TEXT, prompt="abc", max_tokens=2, stream=True)
    assert server.engine.cancelled == []


@pytest.mark.parametrize("stream", [False, True])
def test_engine_death_ends_every_answer(stream: bool) -> None:
    with running(FakeEngine(script=Script(hang_after=2))) as server:
        threading.Timer(0.3, lambda: server.call(server.engine.die)).start()
        answer = server.post(TEXT, prompt=["abc", "d"], stream=stream)
        if stream:
            assert answer.status_code == 200
            last = answer.text.strip().split("\n\n")[-1]
            assert json.loads(last.removeprefix("data: "))["error"]["code"] == "unavailable"
        else:
            assert answer.status_code == 503
        assert server.post(TEXT, prompt="x").status_code == 503


class SlowToAccept(FakeEngine):
    """Takes half a second to accept a request, and refuses long ones sooner."""

    async def submit(self, prompt: Any, *args: Any, **kw: Any) -> FakeStream:
        await asyncio.sleep(0.05 if len(prompt) > 4 else 0.5)
        if len(prompt) > 4:
            raise RequestError("too long", param="prompt")
        return await super().submit(prompt, *args, **kw)


def test_prompts_are_submitted_together_or_not_at_all() -> None:
    engine = SlowToAccept()
    with running(engine) as server:
        begin = time.monotonic()
        answer = server.post(TEXT, prompt=["a", "b", "c", "d"], max_tokens=1)
        assert time.monotonic() - begin < 1.5
        assert [c["text"] for c in answer.json()["choices"]] == ["a", "b", "c", "d"]
        assert server.post(TEXT, prompt=["a", "refused", "b"]).status_code == 400
        wait_until(lambda: engine.running == 0, 2)
        with pytest.raises(httpx.ReadTimeout):
            server.http.post(TEXT, json={"prompt": ["a", "b"]}, timeout=0.2)
        wait_until(lambda: engine.running == 0, 2)


def test_keepalive_comments_while_the_prompt_is_computed() -> None:
    engine = FakeEngine(script=Script(first_delay=0.5))
    with running(engine, keepalive_interval="100ms") as server:
        answer = server.post(TEXT, prompt="ab", max_tokens=1, stream=True)
        assert 2 <= answer.text.count(": keep-alive\n\n") <= 5
        assert answer.text.endswith("data: [DONE]\n\n")
        stream = server.client.completions.create(model="fake", prompt="ab", stream=True)
        assert len(list(stream)) == 16


def test_slow_reader_blocks_nobody() -> None:
    engine = FakeEngine(max_model_len=1 << 20)
    with running(engine) as server:
        host, port = server.url.removeprefix("http://").split(":")
        body = json.dumps({"prompt": "abc" * 100, "max_tokens": 100_000, "stream": True}).encode()
        raw = socket.create_connection((host, int(port)))
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        head = f"POST {TEXT} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
        raw.sendall(head.encode() + body)
        wait_until(lambda: engine.running == 1)
        time.sleep(0.3)
        start = time.monotonic()
        assert server.post(TEXT, prompt="x", max_tokens=20, stream=True).status_code == 200
        assert time.monotonic() - start < 1.0
        assert engine.running == 1
        raw.close()
        wait_until(lambda: engine.running == 0)
        wait_until(lambda: len(engine.cancelled) == 1)


def test_two_hundred_streams(server: Running) -> None:
    server.engine.script.token_delay = 0.01

    async def one(client: httpx.AsyncClient, i: int) -> str:
        body = {"prompt": f"{i:03d}", "max_tokens": 30, "stream": True}
        text = ""
        async with client.stream("POST", TEXT, json=body) as answer:
            async for line in answer.aiter_lines():
                if line.startswith("data: {"):
                    text += json.loads(line[6:])["choices"][0]["text"]
        return text

    async def main() -> list[str]:
        limits = httpx.Limits(max_connections=200)
        async with httpx.AsyncClient(base_url=server.url, limits=limits, timeout=30) as client:
            return await asyncio.gather(*(one(client, i) for i in range(200)))

    assert asyncio.run(main()) == [f"{i:03d}" * 10 for i in range(200)]
    assert server.engine.running == 0
    assert server.engine.cancelled == []
