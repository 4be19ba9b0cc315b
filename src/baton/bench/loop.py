"""The event loop of processes that time things."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable


def loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """uvloop where it runs, else asyncio's own (None)."""
    if sys.platform == "win32":
        return None
    import uvloop

    return uvloop.new_event_loop
