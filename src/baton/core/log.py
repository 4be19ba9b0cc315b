"""One logger for the package; plain lines on standard error, never a prompt or a key in them."""

from __future__ import annotations

import logging
import sys

from baton.core import env
from baton.core.errors import ConfigError


def get_logger(name: str) -> logging.Logger:
    """Logger `baton.<name>`; the first call configures the package's handler."""
    root = logging.getLogger("baton")
    if not root.handlers:
        handler = logging.StreamHandler(sys.stderr)
        handler.setFormatter(
            logging.Formatter("%(asctime)s %(levelname)-7s %(name)s  %(message)s", "%H:%M:%S")
        )
        root.addHandler(handler)
        try:
            root.setLevel(env.LOG_LEVEL.get().upper())
        except ConfigError as error:  # modules make loggers: importing them must not fail for this
            root.setLevel(logging.INFO)
            root.warning("%s", error)
        root.propagate = False
    return root.getChild(name)
