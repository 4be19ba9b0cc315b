"""Signals at bad moments: nothing hangs, nothing is left behind."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable

import pytest

from helpers.proc import await_true, children, gone
from helpers.served import served

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


def test_a_second_signal_ends_even_with_a_stuck_engine(tiny: Callable[[str], str]) -> None:
    with served(tiny("llama"), *FLAGS) as server:
        engine = server.engine_pid()
        os.kill(engine, signal.SIGSTOP)
        server.process.send_signal(signal.SIGTERM)
        time.sleep(0.5)
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(10) == 128 + signal.SIGTERM
        assert gone(engine)
