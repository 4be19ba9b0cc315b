"""Where values lie on an axis, and which of them are written beside it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from baton.bench.report.forms import show


@dataclass(frozen=True)
class Axis:
    """From values to places between 0 and 1.

    low / high: values at the ends. log: equal ratios are equally far apart. form: of its numbers.
    ticks: values that are written.
    """

    low: float
    high: float
    log: bool
    form: str
    ticks: tuple[float, ...]

    def place(self, value: float) -> float:
        """0 at `low`, 1 at `high`; values beyond are put at the end."""
        value = min(max(value, self.low), self.high)
        if self.log:
            return math.log(value / self.low) / math.log(self.high / self.low)
        return (value - self.low) / (self.high - self.low)

    def text(self, value: float) -> str:
        """A tick's label."""
        return show(value, self.form)


def linear(values: Iterable[float], form: str, most: int = 5, tight: bool = False) -> Axis:
    """From 0 to a round number above all values; tight: to the highest of them."""
    top = max((_drawn(value) for value in values if value > 0), default=1.0)
    step = _round_step(top / most)
    ticks = [i * step for i in range(math.ceil(top / step - 1e-9) + 1)]
    if not tight:
        return Axis(0.0, ticks[-1], False, form, tuple(ticks))
    return Axis(0.0, top, False, form, tuple(tick for tick in ticks if tick <= top))


def shares() -> Axis:
    """0 to 100%."""
    return Axis(0.0, 1.0, False, "whole", (0.0, 0.25, 0.5, 0.75, 1.0))


def logarithmic(values: Iterable[float], form: str, most: int = 5) -> Axis:
    """A little beyond the positive values at both ends. Ticks are 1, 2 and 5 times powers of ten,
    fewer of them where those are more than `most`, equal steps where they are fewer than three."""
    positive = [_drawn(value) for value in values if value > 0]
    low, high = (min(positive), max(positive)) if positive else (1.0, 1.0)
    if high < low * 2:
        low, high = low / 1.5, high * 1.5
    margin = (high / low) ** 0.04
    low, high = low / margin, high * margin
    for mantissas in ((1, 2, 5), (1, 3), (1,)):
        ticks = _round_values(low, high, mantissas)
        if len(ticks) <= most:
            break
    if len(ticks) < 3:
        step = _round_step((high - low) / most)
        ticks = [k * step for k in range(math.ceil(low / step), math.floor(high / step) + 1)]
    stride = math.ceil(len(ticks) / most) if ticks else 1
    return Axis(low, high, True, form, tuple(ticks[::stride]))


def _drawn(value: float) -> float:
    """A positive value as far as an axis reaches: beyond, its arithmetic would overflow."""
    return min(max(float(value), 1e-100), 1e100)


def _round_values(low: float, high: float, mantissas: Sequence[int]) -> list[float]:
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    values = (m * 10.0**power for power in powers for m in mantissas)
    return [value for value in values if low <= value <= high]


def _round_step(least: float) -> float:
    """The smallest of 1, 2, 2.5 and 5 times a power of ten that is no less."""
    power = 10.0 ** math.floor(math.log10(least))
    return next(m * power for m in (1, 2, 2.5, 5, 10) if m * power >= least * (1 - 1e-9))
