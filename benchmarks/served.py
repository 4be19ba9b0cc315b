"""A server in a process of its own, for scripts that measure over HTTP."""

from __future__ import annotations

import signal
import socket
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import httpx


@contextmanager
def served(command: Sequence[str]) -> Iterator[tuple[str, int]]:
    """`COMMAND --port FREE`, ready: its URL and process id. It is asked to end afterwards.

    Raises:
        SystemExit: it ended before it was ready.
    """
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    server = subprocess.Popen([*command, "--port", str(port)])
    url = f"http://127.0.0.1:{port}"
    try:
        while not _ready(url):
            if server.poll() is not None:
                raise SystemExit("the server ended before it was ready")
            time.sleep(0.2)
        yield url, server.pid
    finally:
        server.send_signal(signal.SIGTERM)
        server.wait(60)


def _ready(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health", timeout=2.0).is_success
    except httpx.HTTPError:
        return False
