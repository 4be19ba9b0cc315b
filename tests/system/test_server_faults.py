"""Signals at bad moments: nothing hangs, nothing is left behind."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest

from baton.engine.async_engine import MAX_RESTARTS
from helpers.proc import await_true, children, gone
from helpers.served import served
from helpers.tiny import save_tiny

FLAGS = ("--skip-tokenizer-init", "--dtype=float32", "--num-kv-pages=64", "--threads=1")


@pytest.mark.parametrize("stopped", [False, True])
def test_a_killed_server_takes_everything_along(
    tiny: Callable[[str], str],
    tmp_path_factory: pytest.TempPathFactory,
    monkeypatch: pytest.MonkeyPatch,
    stopped: bool,
) -> None:
    tmp_path = tmp_path_factory.mktemp("t")  # sockets bear no long path
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    with served(tiny("llama"), *FLAGS, "-tp", "2") as server:
        engine = server.engine_pid()
        (rank,) = children(engine, "baton.engine.worker")
        (janitor,) = children(server.process.pid, "baton.engine.folder")
        assert list(tmp_path.glob("baton-*"))
        try:
            for pid in (rank, engine):
                os.kill(pid, signal.SIGSTOP if stopped else signal.SIGCONT)
            server.process.kill()
            await_true(lambda: gone(engine), "the engine process is left")
            await_true(lambda: gone(rank), "the process of a rank is left")
            await_true(lambda: gone(janitor), "a process that should tidy up is left")
            assert list(tmp_path.glob("baton-*")) == []
        finally:
            for pid in (rank, engine):
                if not gone(pid):
                    os.kill(pid, signal.SIGKILL)


def test_an_engine_that_is_dead_for_good_ends_the_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed, it would be started again, but not as another model."""
    monkeypatch.setenv("BATON_DEBUG", "0")  # one line instead of a traceback
    folder = str(save_tiny("llama", tmp_path))
    lines: list[str] = []
    with served(folder, *FLAGS) as server:
        save_tiny("llama", tmp_path, seed=1)
        body = {"prompt": [5, 6], "max_tokens": 900, "stream": True, "ignore_eos": True}
        with httpx.stream("POST", f"{server.url}/v1/completions", json=body) as response:
            for line in response.iter_lines():
                if not lines:
                    os.kill(server.engine_pid(), signal.SIGKILL)
                lines.append(line)
        assert server.process.wait(60) == 1
        last = server.log().strip().splitlines()[-1]
    assert "the engine process died (signal SIGKILL)" in lines[-2]
    assert "[DONE]" not in "".join(lines)
    assert last.startswith("baton: the engine process died (signal SIGKILL); it does not start")
    assert "weights" in last


@pytest.mark.slow
def test_an_engine_that_dies_again_and_again_ends_the_server(
    tiny: Callable[[str], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BATON_DEBUG", "0")
    with served(tiny("llama"), *FLAGS) as server:
        for _ in range(MAX_RESTARTS):
            os.kill(server.engine_pid(), signal.SIGKILL)
            await_true(lambda: not httpx.get(f"{server.url}/health").is_success, "it was killed")
            server.await_ready()
        os.kill(server.engine_pid(), signal.SIGKILL)
        assert server.process.wait(20) == 1
        last = server.log().strip().splitlines()[-1]
    assert last.startswith("baton: the engine process died (signal SIGKILL), and has been started")


def test_a_second_signal_ends_even_with_a_stuck_engine(tiny: Callable[[str], str]) -> None:
    with served(tiny("llama"), *FLAGS) as server:
        engine = server.engine_pid()
        os.kill(engine, signal.SIGSTOP)
        server.process.send_signal(signal.SIGTERM)
        time.sleep(0.5)
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(10) == 128 + signal.SIGTERM
        assert gone(engine)
