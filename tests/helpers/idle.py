"""`spawn("helpers.idle", HOW, FILE)`: a child that makes FILE when it has read its options; then it
waits, or keeps Python's lock for good (HOW: stuck)."""

from __future__ import annotations

import ctypes
import sys
import time
from pathlib import Path

from baton.engine.lifeline import read_options

if __name__ == "__main__":
    read_options()
    Path(sys.argv[2]).touch()
    if sys.argv[1] == "stuck":
        ctypes.PyDLL(None).sleep(600)  # PyDLL, unlike CDLL, does not give the lock away
    time.sleep(600)
