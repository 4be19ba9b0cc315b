"""Child processes that live as long as their standard input: both ends of it."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import threading

import msgspec

from baton.config.options import EngineOptions
from baton.core import env


def spawn(module: str, *arguments: str, options: EngineOptions) -> subprocess.Popen[bytes]:
    """`python -m MODULE ARGUMENTS`, the options as a line of JSON on its standard input."""
    process = subprocess.Popen(
        [sys.executable, "-m", module, *arguments],
        stdin=subprocess.PIPE,
        env=env.child_python(),
        start_new_session=True,  # Ctrl-C reaches the parent only, which decides
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


def read_options(folder: str) -> EngineOptions:
    """The options that `spawn` wrote. From now on this process ends when its parent does, and
    takes `folder` along, which a parent that was killed could not remove."""
    options = msgspec.json.decode(sys.stdin.buffer.readline(), type=EngineOptions)

    def watch() -> None:
        while os.read(0, 1):  # not sys.stdin: a thread in it may not be there at exit
            pass
        shutil.rmtree(folder, ignore_errors=True)
        os._exit(0)

    threading.Thread(target=watch, name="baton-lifeline", daemon=True).start()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides when to stop
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    return options
