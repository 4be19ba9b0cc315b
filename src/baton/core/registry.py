"""Names mapped to lazily imported classes that can say why they do not fit."""

from __future__ import annotations

import difflib
import importlib
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from baton.core.errors import ConfigError

T = TypeVar("T")


@dataclass(frozen=True)
class Selection(Generic[T]):
    """What a registry chose and why it did not choose the others."""

    name: str
    value: T
    rejected: dict[str, list[str]]


class Registry(Generic[T]):
    """`name -> "module:attribute"`, imported on first use, in order of preference.

    Entries with a `why_not(need) -> list[str]` static or class method are asked whether they can
    serve a need; an empty list means yes, otherwise each string is one reason against.
    """

    def __init__(self, kind: str, entries: dict[str, str]) -> None:
        self.kind = kind
        self._entries = dict(entries)

    def names(self) -> list[str]:
        """Every registered name, best first."""
        return list(self._entries)

    def add(self, name: str, target: str) -> None:
        """Register `target` ("module:attribute") under `name`; a second one is an error."""
        if name in self._entries:
            raise ConfigError(f"{self.kind} {name!r} is registered twice")
        self._entries[name] = target

    def get(self, name: str) -> T:
        """The entry called `name`; ConfigError with the nearest name when there is none."""
        target = self._entries.get(name)
        if target is None:
            near = difflib.get_close_matches(name, self._entries, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise ConfigError(f"unknown {self.kind} {name!r}: one of {sorted(self._entries)}{hint}")
        module, _, attribute = target.partition(":")
        value: T = getattr(importlib.import_module(module), attribute)
        return value

    def select(self, need: Any, name: str = "auto") -> Selection[T]:
        """The first entry with nothing against `need`, or the named one if it fits."""
        rejected: dict[str, list[str]] = {}
        for candidate in self.names() if name == "auto" else [name]:
            value = self.get(candidate)
            reasons: list[str] = value.why_not(need)  # type: ignore[attr-defined]
            if not reasons:
                return Selection(candidate, value, rejected)
            rejected[candidate] = reasons
        lines = "; ".join(f"{k}: {', '.join(v)}" for k, v in rejected.items())
        raise ConfigError(f"no {self.kind} fits ({lines})")
