"""A real `baton serve` in a process of its own, on a free port, ended by its own id."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx

from helpers.proc import children


@dataclass
class Served:
    """A running server; `log()` is what it has printed so far."""

    url: str
    process: subprocess.Popen[bytes]
    path: Path

    def log(self) -> str:
        return self.path.read_text(encoding="utf-8", errors="replace")

    def metric(self, name: str) -> float:
        """Value of the first sample of a metric, `baton:` put in front."""
        text = httpx.get(f"{self.url}/metrics").text
        found = re.search(rf"^baton:{name}(?:{{[^}}]*}})? (\S+)$", text, re.MULTILINE)
        assert found is not None, f"no metric {name} in\n{text}"
        return float(found.group(1))

    def engine_pid(self) -> int:
        """The engine process: the server's child that runs `baton.engine.process`."""
        found = children(self.process.pid, "baton.engine.process")
        assert found, "the server has no engine process"
        return found[0]

    def await_url(self, seconds: float = 60.0) -> None:
        """Read the port that the server chose from what it prints first."""
        begin = time.monotonic()
        while not (found := re.search(r"http://127\.0\.0\.1:\d+", self.log())):
            assert self.process.poll() is None, self.log()
            assert time.monotonic() - begin < seconds, self.log()
            time.sleep(0.05)
        self.url = found.group()

    def await_ready(self, seconds: float = 120.0) -> None:
        begin = time.monotonic()
        while time.monotonic() - begin < seconds:
            assert self.process.poll() is None, self.log()
            with contextlib.suppress(httpx.HTTPError):
                if httpx.get(f"{self.url}/health").is_success:
                    return
            time.sleep(0.1)
        raise AssertionError(f"not ready after {seconds} s\n{self.log()}")


@contextlib.contextmanager
def served(model: str, *flags: str) -> Iterator[Served]:
    """`baton serve MODEL --port FREE FLAGS`, ready."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "log"
        with open(path, "wb") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", "baton.cli", "serve", model, "--port", "0", *flags],
                stdout=log,
                stderr=subprocess.STDOUT,
                env=dict(os.environ, PYTHONPATH=os.pathsep.join(sys.path), BATON_LOG_LEVEL="info"),
            )
        server = Served("", process, path)
        try:
            server.await_url()
            server.await_ready()
            yield server
        finally:
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
                try:
                    process.wait(30)
                except subprocess.TimeoutExpired:
                    process.kill()
                    process.wait()
