"""Typed environment flags. Nothing else in the package reads `os.environ`."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Generic, TypeVar

from baton.core.errors import ConfigError

T = TypeVar("T")


class Flag(Generic[T]):
    """One environment variable with a type, a default (or what makes it, when it is asked for)
    and a sentence of help."""

    def __init__(
        self, name: str, default: T | Callable[[], T], parse: Callable[[str], T], help: str
    ) -> None:
        self.name, self.default, self.parse, self.help = name, default, parse, help

    def get(self) -> T:
        """Value now.

        Raises:
            ConfigError: it cannot be parsed; the message names the variable.
        """
        raw = os.environ.get(self.name)
        try:
            if raw is not None:
                return self.parse(raw)
            return self.default() if callable(self.default) else self.default
        except ValueError as error:
            given = "" if raw is None else f"={raw!r}"
            raise ConfigError(f"environment variable {self.name}{given}: {error}") from None


def _bool(raw: str) -> bool:
    value = raw.strip().lower()
    if value in {"1", "true", "yes", "on"}:
        return True
    if value in {"", "0", "false", "no", "off"}:
        return False
    raise ValueError("expected 0 or 1")


def _default_cache() -> Path:
    base = os.environ.get("XDG_CACHE_HOME")
    try:
        return (Path(base) if base else Path.home() / ".cache") / "baton"
    except RuntimeError:
        raise ValueError("there is no home folder for a cache: set it to a folder") from None


def _level(raw: str) -> str:
    value = raw.strip().lower()
    if value not in {"debug", "info", "warning", "error", "critical"}:
        raise ValueError("expected debug, info, warning or error")
    return value


DEBUG = Flag(
    "BATON_DEBUG", False, _bool, "show tracebacks; poison unused device rows, check integrity"
)
CACHE = Flag("BATON_CACHE", _default_cache, Path, "folder for downloaded and extracted models")
LOG_LEVEL = Flag("BATON_LOG_LEVEL", "info", _level, "debug, info, warning or error")
API_KEY = Flag("BATON_API_KEY", "", str, "API key the server asks for (same as --api-key)")

ALL: tuple[Flag[bool] | Flag[Path] | Flag[str], ...] = (DEBUG, CACHE, LOG_LEVEL, API_KEY)


def default(name: str, value: str) -> None:
    """Set a library's variable for this process unless its user has."""
    os.environ.setdefault(name, value)


def child(**extra: str) -> dict[str, str]:
    """This process's environment with `extra` set, for a child process."""
    return {**os.environ, **extra}


def child_python() -> dict[str, str]:
    """`child()` for a Python that must find what this process finds, and the same `baton`."""
    root = str(Path(__file__).resolve().parents[2])
    inherited = [path for path in sys.path if path and Path(path).is_dir()]
    return child(PYTHONPATH=os.pathsep.join([root, *inherited]))
