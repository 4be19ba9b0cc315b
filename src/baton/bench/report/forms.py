"""Numbers as people read them. A form is a name, so that a page can say how it wrote a number and
a test can write it again."""

from __future__ import annotations

from collections.abc import Callable

#: shown for what cannot be known
NONE = "–"


def three(value: float) -> str:
    """Three significant digits, thousands apart, without an exponent."""
    size = abs(float(f"{value:.3g}"))  # 99.96 is written like 100
    if size >= 1000:
        return f"{value:,.0f}"
    for limit, digits in ((100, 0), (10, 1), (1, 2), (0.1, 3)):
        if size >= limit:
            return f"{value:.{digits}f}"
    return f"{value:.4f}".rstrip("0").rstrip(".") if value else "0"


def _time(seconds: float) -> str:
    if 0 < abs(seconds) < 1e-4:
        return f"{three(seconds * 1e6)} µs"
    return f"{three(seconds)} s" if abs(seconds) >= 0.9995 else f"{three(seconds * 1e3)} ms"


def _short_time(seconds: float) -> str:
    if seconds == 0:
        return "0"
    if seconds >= 1:
        return f"{seconds:g} s"
    return f"{seconds * 1e3:g} ms" if seconds >= 1e-3 else f"{seconds * 1e6:g} µs"


def _signed(form: Callable[[float], str]) -> Callable[[float], str]:
    # a minus sign as wide as the plus, so that columns of differences line up
    return lambda value: ("+" if value > 0 else "−" if value < 0 else "±") + form(abs(value))


FORMS: dict[str, Callable[[float], str]] = {
    "time": _time,
    "count": lambda value: f"{value:,.0f}",
    "rate": three,
    "share": lambda value: f"{value * 100:.1f}%",
    "tick": _short_time,
    "whole": lambda value: f"{value * 100:.0f}%",
    "load": lambda value: f"{value:g}",
    "points": _signed(lambda value: f"{value * 100:.1f} points"),
    "percent": _signed(lambda value: f"{value * 100:.1f}%"),
    "time+": _signed(_time),
    "rate+": _signed(three),
}
#: of a difference of values of a form
DIFFERENCE = {"time": "time+", "rate": "rate+", "share": "points"}


def show(value: float | None, form: str) -> str:
    """A number in a form; a dash for none."""
    return NONE if value is None else FORMS[form](float(value))
