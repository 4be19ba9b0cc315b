"""The command `baton`. Nothing here imports torch before a command needs it."""

from baton.cli.app import main

__all__ = ["main"]
