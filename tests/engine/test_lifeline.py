"""No child outlives its parent, whatever either of them is doing; none dies before it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from baton.config.options import EngineOptions
from baton.engine.folder import PrivateFolder
from baton.engine.lifeline import spawn
from baton.engine.threads import in_daemon
from helpers.proc import await_true, children, gone

OPTIONS = EngineOptions.of("none")
OWNER = """
import sys, time
from baton.config.options import EngineOptions
from baton.engine.folder import PrivateFolder
from baton.engine.lifeline import spawn
folder = PrivateFolder("baton-test-")
child = spawn("helpers.idle", *sys.argv[1:], options=EngineOptions.of("none"))
print(child.pid, folder.path, flush=True)
time.sleep(600)
"""
linux = pytest.mark.skipif(sys.platform != "linux", reason="what the kernel does is Linux's")


@pytest.fixture
def started() -> Iterator[list[subprocess.Popen[bytes]]]:
    """Processes to end after the test, and those that their lines name."""
    processes: list[subprocess.Popen[bytes]] = []
    yield processes
    for process in processes:
        process.kill()
        process.communicate()


def owner(started: list[subprocess.Popen[bytes]], how: str, ready: Path) -> tuple[int, Path]:
    """A process with a child and a folder; the child, when it is ready, and the folder."""
    process = subprocess.Popen(
        [sys.executable, "-c", OWNER, how, str(ready)],
        stdout=subprocess.PIPE,
        env=dict(os.environ, PYTHONPATH=os.pathsep.join(sys.path)),
    )
    started.append(process)
    assert process.stdout is not None
    child, folder = process.stdout.readline().split()
    await_true(ready.exists, "the child is not ready")
    return int(child), Path(os.fsdecode(folder))


@linux
@pytest.mark.parametrize("how", ["waits", "stopped", "stuck"])
def test_a_child_ends_with_its_owner_whatever_it_is_doing(
    started: list[subprocess.Popen[bytes]], tmp_path: Path, how: str
) -> None:
    child, folder = owner(started, how, tmp_path / "ready")
    try:
        if how == "stopped":
            os.kill(child, signal.SIGSTOP)
        time.sleep(0.2)
        assert not gone(child)
        assert folder.is_dir()
        started[0].kill()
        await_true(lambda: gone(child), f"the child ({how}) outlives its owner")
        await_true(lambda: not folder.exists(), "the folder outlives its owner")
    finally:
        if not gone(child):
            os.kill(child, signal.SIGKILL)


@linux
def test_a_child_outlives_the_thread_that_wanted_it(tmp_path: Path) -> None:
    found: list[subprocess.Popen[bytes]] = []
    ready = tmp_path / "ready"

    def start() -> None:
        found.append(spawn("helpers.idle", "waits", str(ready), options=OPTIONS))
        await_true(ready.exists, "the child is not ready")

    thread = threading.Thread(target=start)
    thread.start()
    thread.join()
    (child,) = found
    try:
        with pytest.raises(subprocess.TimeoutExpired):
            child.wait(1)
    finally:
        child.kill()
        child.communicate()


@linux
def test_a_child_whose_owner_died_before_it_could_say_so_ends() -> None:
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    command = [
        sys.executable,
        "-m",
        "baton.engine.lifeline",
        str(dead.pid),
        "helpers.idle",
        "waits",
        "none",
    ]
    env = dict(os.environ, PYTHONPATH=os.pathsep.join(sys.path))
    with subprocess.Popen(command, stdin=subprocess.PIPE, env=env) as child:
        assert child.wait(10) == 0, "standard input is open: only the parent's number tells"


def test_a_child_that_is_told_nothing_ends_quietly() -> None:
    command = [
        sys.executable,
        "-m",
        "baton.engine.lifeline",
        str(os.getpid()),
        "helpers.idle",
        "waits",
        "none",
    ]
    env = dict(os.environ, PYTHONPATH=os.pathsep.join(sys.path))
    done = subprocess.run(command, input=b'{"mod', capture_output=True, env=env, timeout=20)
    assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")


def test_a_fork_of_this_process_can_start_children() -> None:
    """The thread that starts them is not there in a fork."""
    code = (
        "import os\nfrom baton.engine.threads import in_lasting\n"
        "assert in_lasting(lambda: 5) == 5\n"
        "if not (pid := os.fork()):\n    os._exit(in_lasting(lambda: 7))\n"
        "assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7\n"
    )
    env = dict(os.environ, PYTHONPATH=os.pathsep.join(sys.path))
    subprocess.run([sys.executable, "-c", code], env=env, timeout=20, check=True)


def test_a_folder_that_is_removed_leaves_no_process() -> None:
    folder = PrivateFolder("baton-test-")
    (Path(folder.path) / "x").touch()
    inner = PrivateFolder("r-", folder.path)
    assert Path(folder.path).stat().st_mode & 0o777 == 0o700
    assert len(children(os.getpid(), folder.path)) == 1
    inner.remove()
    assert not Path(inner.path).exists()
    for _ in range(2):
        folder.remove()
    assert not Path(folder.path).exists()
    assert children(os.getpid(), folder.path) == []


def test_a_folder_is_removed_though_a_fork_holds_the_pipe_of_its_janitor() -> None:
    folder = PrivateFolder("baton-test-")
    assert folder._janitor is not None
    assert folder._janitor.stdin is not None
    held = os.dup(folder._janitor.stdin.fileno())  # as a fork would
    try:
        in_daemon(folder.remove).result(30)
        assert not Path(folder.path).exists()
        assert children(os.getpid(), folder.path) == []
    finally:
        os.close(held)
