"""Child processes that live no longer than the process that started them: both ends of it.

Two things see to that. A thread of the child waits for the end of its standard input, wherever
Python runs. It can do nothing while the child is stopped, or while a library keeps Python's lock;
so on Linux the kernel is asked to kill the child when its parent dies.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import runpy
import signal
import subprocess
import sys
import threading

import msgspec

from baton.config.options import EngineOptions
from baton.core import env
from baton.engine.threads import in_lasting

#: option of prctl(2), from <linux/prctl.h>
_PR_SET_PDEATHSIG = 1


def spawn(module: str, *arguments: str, options: EngineOptions) -> subprocess.Popen[bytes]:
    """`python -m MODULE ARGUMENTS` that dies with this process, the options as a line of JSON on
    its standard input."""
    command = [sys.executable, "-m", __name__, str(os.getpid()), module, *arguments]
    # To the kernel, a child's parent is the thread that started it.
    process = in_lasting(
        lambda: subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            env=env.child_python(),
            start_new_session=True,  # Ctrl-C reaches the parent only, which decides
        )
    )
    assert process.stdin is not None
    with contextlib.suppress(BrokenPipeError):  # dead already, as its owner will notice
        process.stdin.write(msgspec.json.encode(options) + b"\n")
        process.stdin.flush()  # stays open: its end tells the child that the parent is gone
    return process


def how_it_ended(process: subprocess.Popen[bytes]) -> str:
    """`"signal SIGKILL"` or `"exit code 1"`."""
    code = process.poll()
    if code is None:
        return "still running"
    return f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"


def read_options() -> EngineOptions:
    """The options that `spawn` wrote. From now on this process ends when its standard input does.

    Signals that a terminal or a supervisor sends to all processes are ignored from now on.
    """
    line = sys.stdin.buffer.readline()
    if not line.endswith(b"\n"):
        os._exit(0)  # the parent died before it could say anything

    def watch() -> None:
        while os.read(0, 1):  # not sys.stdin: a thread in it may not be there at exit
            pass
        os._exit(0)

    threading.Thread(target=watch, name="baton-lifeline", daemon=True).start()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides when to stop
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    return msgspec.json.decode(line, type=EngineOptions)


def die_with(parent: int) -> None:
    """On Linux, have this process killed as soon as the thread that started it ends, whatever it is
    doing then; end now if that has happened. Does nothing elsewhere.

    Args:
        parent: process that this one was started by.
    """
    if sys.platform == "linux":
        kill = ctypes.c_ulong(signal.SIGKILL)  # also ends what is stopped
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, kill, *[ctypes.c_ulong(0)] * 3)
        if os.getppid() != parent:  # it died before the call
            os._exit(0)


def main() -> None:
    """`python -m baton.engine.lifeline PARENT MODULE ARGUMENTS`: what `spawn` starts. Before
    MODULE, since what it imports takes seconds."""
    die_with(int(sys.argv[1]))
    module = sys.argv[2]
    del sys.argv[1:3]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
