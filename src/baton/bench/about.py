"""What a figure was measured on: code, packages, process. Nothing here needs a device."""

from __future__ import annotations

import os
import platform
import resource
import subprocess
import sys
import time
from importlib import metadata
from pathlib import Path

PACKAGES = ("torch", "triton", "transformers", "numpy")

_LOADED = time.monotonic()


def commit() -> str | None:
    """Commit of this code, with "+dirty" for local changes; None outside its own checkout."""
    here = Path(__file__)
    if not _git(here, "ls-files", "--error-unmatch", here.name):
        return None  # installed somewhere: the folder above may be another project's checkout
    head = _git(here, "rev-parse", "HEAD")
    if not head:
        return None
    return head + ("+dirty" if _git(here, "status", "--porcelain", "--", ":/src") else "")


def _git(file: Path, *arguments: str) -> str:
    try:
        done = subprocess.run(
            ["git", *arguments], cwd=file.parent, capture_output=True, text=True, timeout=20
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def versions() -> dict[str, str | None]:
    """Python and the packages that decide speed; None where one is not installed."""
    found: dict[str, str | None] = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = None
    return found


def process_start() -> float:
    """When this process started, on the clock of `time.monotonic()`; elsewhere than on Linux, when
    this module was loaded."""
    try:
        # field 22: clock ticks since boot; the command's name before it may hold spaces
        fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
        started = int(fields[19]) / os.sysconf("SC_CLK_TCK")
        return time.monotonic() - (time.clock_gettime(time.CLOCK_BOOTTIME) - started)
    except (OSError, AttributeError, ValueError, IndexError):
        return _LOADED


def host_peak() -> int:
    """Most resident bytes of this process so far."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
