"""`serve()` as a process: start, busy ports, drain, second signal, broken engines."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from helpers.serving import wait_until

HELPER = Path(__file__).parents[1] / "helpers" / "serve_fake.py"
TEXT = "/v1/completions"


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


class Process:
    """A server process; `url` is known once it says that it is ready."""

    def __init__(self, **given: Any) -> None:
        self.process = subprocess.Popen(
            [sys.executable, str(HELPER), json.dumps(given)],
            stderr=subprocess.PIPE,
            text=True,
            env=os.environ | {"BATON_LOG_LEVEL": "info"},
        )
        self.lines: list[str] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.lines.append(line)

    @property
    def log(self) -> str:
        return "".join(self.lines)

    def ready(self) -> str:
        wait_until(lambda: "ready on" in self.log or self.process.poll() is not None, 20)
        found = re.search(r"ready on (http\S+)", self.log)
        assert found, self.log
        return found[1]

    def wait(self, seconds: float = 10) -> int:
        code = self.process.wait(seconds)
        self._reader.join(5)
        return code

    def signal(self, number: int = signal.SIGTERM) -> None:
        self.process.send_signal(number)


@pytest.fixture
def processes() -> Iterator[list[Process]]:
    """Processes to end after the test."""
    started: list[Process] = []
    yield started
    for process in started:
        process.process.kill()
        process.wait()


def test_drain_lets_streams_finish(processes: list[Process]) -> None:
    script = {"token_delay": 0.1}
    server = Process(server={"port": 0, "api_key": "s3cret"}, script=script)
    processes.append(server)
    url = server.ready()
    assert re.search(r"model fake  fingerprint f1e2d3c4b5a69788\n", server.log)
    headers = {"Authorization": "Bearer s3cret"}
    body = {"prompt": "hidden words", "max_tokens": 12, "stream": True}
    with (
        httpx.Client(base_url=url, headers=headers) as client,
        client.stream("POST", TEXT, json=body) as answer,
    ):
        lines = answer.iter_lines()
        next(lines)
        server.signal()
        with httpx.Client(base_url=url, headers=headers) as other:
            wait_until(lambda: other.get("/health").status_code == 503)
            assert other.get("/health").json()["status"] == "draining"
            assert other.get("/health/live").status_code == 200
            refused = other.post(TEXT, json=body)
            assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
        rest = list(lines)
    assert rest[-2:] == ["data: [DONE]", ""]
    assert sum('"text"' in line for line in rest) == 11
    assert server.wait() == 0
    assert "s3cret" not in server.log
    assert "hidden" not in server.log


def test_drain_timeout_ends_with_an_error_event(processes: list[Process]) -> None:
    options = {"port": 0, "drain_timeout": "500ms", "access_log": True}
    server = Process(server=options, script={"hang_after": 1})
    processes.append(server)
    with httpx.stream(
        "POST", server.ready() + TEXT, json={"prompt": "abc", "stream": True}
    ) as answer:
        lines = answer.iter_lines()
        next(lines)
        server.signal(signal.SIGINT)
        start = time.monotonic()
        rest = "".join(lines)
    assert "unavailable" in rest
    assert "[DONE]" not in rest
    assert server.wait() == 0
    assert time.monotonic() - start < 3
    assert '"POST /v1/completions HTTP/1.1" 200' in server.log


def test_second_signal_ends_at_once(processes: list[Process]) -> None:
    server = Process(server={"port": 0}, script={"hang_after": 1})
    processes.append(server)
    with httpx.stream("POST", server.ready() + TEXT, json={"prompt": "abc", "stream": True}) as a:
        next(a.iter_lines())
        server.signal()
        wait_until(lambda: "draining" in server.log)
        server.signal()
        start = time.monotonic()
        assert server.wait() == 128 + signal.SIGTERM
        assert time.monotonic() - start < 2


def test_http_answers_while_the_engine_starts(processes: list[Process]) -> None:
    port = free_port()
    server = Process(server={"port": port}, start_delay=1.5)
    processes.append(server)

    def health() -> httpx.Response | None:
        try:
            return httpx.get(f"http://127.0.0.1:{port}/health")
        except httpx.TransportError:
            return None

    wait_until(lambda: health() is not None, 20)
    answer = health()
    assert answer is not None
    assert (answer.status_code, answer.json()["status"]) == (503, "starting")
    for path in ("/v1/models", "/health/live", "/metrics"):
        expected = 503 if path == "/v1/models" else 200
        assert httpx.get(f"http://127.0.0.1:{port}{path}").status_code == expected
    assert server.ready() == f"http://127.0.0.1:{port}"
    assert httpx.get(f"http://127.0.0.1:{port}/v1/models").json()["data"][0]["id"] == "fake"
    busy = Process(server={"port": port}, start_delay=60)
    processes.append(busy)
    assert busy.wait(20) == 1
    assert f"cannot listen on 127.0.0.1:{port}: another program uses this port" in busy.log
    server.signal()
    assert server.wait() == 0


def test_signal_while_starting(processes: list[Process]) -> None:
    port = free_port()
    server = Process(server={"port": port}, start_delay=60)
    processes.append(server)

    def listening() -> bool:
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", port)) == 0

    wait_until(listening, 20)
    time.sleep(0.3)
    server.signal()
    assert server.wait() == 0


def test_engine_that_cannot_start(processes: list[Process]) -> None:
    server = Process(server={"port": 0}, broken=True)
    processes.append(server)
    assert server.wait(20) == 1
    assert "model.safetensors: truncated" in server.log
