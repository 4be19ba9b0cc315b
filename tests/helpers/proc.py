"""Processes of this machine, by /proc."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from pathlib import Path


def gone(pid: int) -> bool:
    """Whether a process has ended, waited for or not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] in "ZX"
    except OSError:
        return True


def children(parent: int, what: str) -> list[int]:
    """Processes that `parent` started whose command line holds `what`."""
    found = []
    for status in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            owner = int(status.read_text().rsplit(")", 1)[1].split()[1])
            if owner == parent and what in status.with_name("cmdline").read_text():
                found.append(int(status.parent.name))
    return found


def await_true(condition: Callable[[], bool], what: str, seconds: float = 15.0) -> None:
    """Return when `condition()` holds; fail, saying `what`, when it does not in time."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.02)
