"""Bounds that a comparison must keep, from a TOML file.

```toml
[all]                  # every query
loss = 0.005           # exact match may fall by so much, as a share
kl = 0.01              # mean KL to A, nats per answer position
certain = true         # fail also when the interval still allows a greater loss

["task multikey3"]     # or "length 32768", "distance 65536", "note boundary/chunk"
loss = 0.01

[perplexity]           # any text
rise = 0.01            # relative
```
"""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from baton.core.errors import ConfigError
from baton.evals.compare import Comparison, Group

PERPLEXITY = "perplexity"
_KNOWN = {"loss": float, "kl": float, "certain": bool}


@dataclass(frozen=True)
class Breach:
    """A bound that does not hold. found: beyond `bound` by `excess`."""

    where: str
    what: str
    bound: float
    found: float

    @property
    def excess(self) -> float:
        """By how much."""
        return self.found - self.bound

    def text(self) -> str:
        """In a line."""
        if self.what == "kl":
            return (
                f"{self.where}: KL to A is {self.found:.3g} nats, {self.excess:.3g} above the "
                f"bound of {self.bound:.3g}"
            )
        words = {
            "loss": "exact match falls by",
            "certain": "exact match may fall, by its interval, by",
            "rise": "perplexity rises by",
        }
        unit = "%" if self.what == "rise" else " points"
        return (
            f"{self.where}: {words[self.what]} {100 * self.found:.2f}{unit}, "
            f"{100 * self.excess:.2f} above the bound of {100 * self.bound:.2f}"
        )


def read_gate(path: Path) -> dict[str, dict[str, Any]]:
    """Bounds by name of group.

    Raises:
        ConfigError: the file cannot be read, or a bound has no meaning.
    """
    try:
        gate = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"--gate {path}: {error}") from None
    if not gate:
        raise ConfigError(f"--gate {path}: holds no bound")
    for where, bounds in gate.items():
        known = {"rise": float} if where == PERPLEXITY else _KNOWN
        if not isinstance(bounds, dict) or not bounds:
            raise ConfigError(f"--gate {path}: [{where}] must be a table of {', '.join(known)}")
        for what, bound in bounds.items():
            if what not in known:
                raise ConfigError(
                    f"--gate {path}: [{where}] has {what!r}, known are {', '.join(known)}"
                )
            fits = isinstance(bound, bool) if known[what] is bool else _is_number(bound)
            if not fits:
                wanted = "true or false" if known[what] is bool else "a number from 0 on"
                raise ConfigError(f"--gate {path}: [{where}] {what} must be {wanted}")
        if bounds.get("certain") and "loss" not in bounds:
            raise ConfigError(f"--gate {path}: [{where}] certain needs a loss")
    return gate


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and value >= 0


def check(comparison: Comparison, gate: dict[str, dict[str, Any]]) -> list[Breach]:
    """What the comparison breaches.

    Raises:
        ConfigError: a bound is about something that was not measured: it would always hold.
    """
    groups, breaches = comparison.groups(), []
    for where, bounds in gate.items():
        if where == PERPLEXITY:
            if not comparison.texts:
                raise ConfigError("the gate bounds perplexity, and neither side measured any")
            for text in comparison.texts:
                if text.change > bounds["rise"]:
                    name = f"{where} of {text.text} at {text.length}"
                    breaches.append(Breach(name, "rise", bounds["rise"], text.change))
            continue
        if where not in groups:
            raise ConfigError(
                f"the gate bounds {where!r}, which was not measured; there are: "
                f"{', '.join([*groups, PERPLEXITY])}"
            )
        breaches += _group(where, groups[where], bounds)
    return breaches


def _group(where: str, group: Group, bounds: dict[str, Any]) -> list[Breach]:
    found, breaches = group.paired, []
    if "loss" in bounds:
        if -found.difference > bounds["loss"]:
            breaches.append(Breach(where, "loss", bounds["loss"], -found.difference))
        elif bounds.get("certain") and -found.interval.low > bounds["loss"]:
            breaches.append(Breach(where, "certain", bounds["loss"], -found.interval.low))
    if "kl" in bounds:
        if group.kl is None:
            raise ConfigError(f"the gate bounds the KL of {where!r}, and a side has none to tell")
        if group.kl.mean > bounds["kl"]:
            breaches.append(Breach(where, "kl", bounds["kl"], group.kl.mean))
    return breaches
