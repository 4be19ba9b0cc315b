"""Folders that are gone when their owner is, even if it is killed."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time

from baton.core import env

_PATIENCE = 10.0  # seconds in which those that still write to a folder end


class PrivateFolder:
    """A temporary folder that only this user may enter. What is killed cannot tidy up, so a small
    process waits for the end of this one, and removes the folder then.

    Args:
        prefix: first letters of its name.
        parent: private folder of another process to make it in, which removes both.
    """

    def __init__(self, prefix: str, parent: str | None = None) -> None:
        # Mode 0700. The other process may be quicker, hence the errors to ignore.
        self._folder = tempfile.TemporaryDirectory(
            prefix=prefix, dir=parent, ignore_cleanup_errors=True
        )
        self.path = self._folder.name
        self._janitor: subprocess.Popen[bytes] | None = None
        if parent is None:
            self._janitor = subprocess.Popen(
                [sys.executable, "-m", __name__, self.path],
                stdin=subprocess.PIPE,
                env=env.child_python(),
                start_new_session=True,  # signals of a terminal are not for it
            )

    def remove(self) -> None:
        """Remove it with all that is in it. Harmless the second time."""
        self._folder.cleanup()
        if self._janitor is not None:
            assert self._janitor.stdin is not None
            self._janitor.stdin.close()
            if os.path.exists(self.path):  # something still writes to it
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self._janitor.wait(_PATIENCE + 1)
            # A fork of this process holds the pipe, too: the end of input may never come.
            self._janitor.kill()
            self._janitor.wait()


def remove_after(path: str, seconds: float = _PATIENCE) -> None:
    """Remove a folder when standard input ends. Processes that are about to end, too, may still
    write to it, so this is tried for `seconds`."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # the owner may outlive them
    while os.read(0, 4096):
        pass
    deadline = time.monotonic() + seconds
    while os.path.exists(path) and time.monotonic() < deadline:
        shutil.rmtree(path, ignore_errors=True)
        time.sleep(0.05)


if __name__ == "__main__":
    remove_after(sys.argv[1])
