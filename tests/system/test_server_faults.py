"""Signals at bad moments: nothing hangs, nothing is left behind."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from helpers.served import served

FLAGS = ("--skip-tokenizer-init", "--dtype=float32", "--num-kv-pages=64", "--threads=1")


def gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z"
    except OSError:
        return True


def test_a_killed_server_takes_everything_along(
    tiny: Callable[[str], str],
    tmp_path_factory: pytest.TempPathFactory,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tmp_path = tmp_path_factory.mktemp("t")  # sockets bear no long path
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    with served(tiny("llama"), *FLAGS, "-tp", "2") as server:
        engine = server.engine_pid()
        assert list(tmp_path.glob("baton-*"))
        server.process.kill()
        deadline = time.monotonic() + 10
        while not gone(engine) or list(tmp_path.glob("baton-*")):
            assert time.monotonic() < deadline, list(tmp_path.iterdir())
            time.sleep(0.05)


def test_a_second_signal_ends_even_with_a_stuck_engine(tiny: Callable[[str], str]) -> None:
    with served(tiny("llama"), *FLAGS) as server:
        engine = server.engine_pid()
        os.kill(engine, signal.SIGSTOP)
        server.process.send_signal(signal.SIGTERM)
        time.sleep(0.5)
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(10) == 128 + signal.SIGTERM
        assert gone(engine)
