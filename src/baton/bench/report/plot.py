"""Plots as HTML with inline SVG. Marks are stretched to whatever width there is, strokes and
letters are not: so one drawing reads well on a phone, a screen and paper."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape

from baton.bench.report.axis import Axis

#: the drawing's own units along each side
SIDE = 1000
Pair = tuple[float, float]


@dataclass
class Plot:
    """One plot: axes first, then marks in the order they are drawn.

    caption: what it shows, in a sentence. x_name / y_name: quantity and unit.
    low: half as high. bare: without labels on the x axis, which the plot below has.
    """

    caption: str
    x: Axis
    y: Axis
    x_name: str = ""
    y_name: str = ""
    low: bool = False
    bare: bool = False
    _marks: list[str] = field(default_factory=list)
    _legend: list[str] = field(default_factory=list)
    _notes: list[str] = field(default_factory=list)

    def line(self, points: Sequence[Pair], series: int, name: str = "", kind: str = "") -> None:
        """A polyline through values; with a name it is in the legend."""
        if len(points) > 1:
            self._marks.append(f'<path class="line s{series} {kind}" d="{self._path(points)}"/>')
        self._name(series, name, kind)

    def dots(
        self, points: Sequence[Pair], series: int, name: str = "", kind: str = "", tip: str = ""
    ) -> None:
        """Round dots: lines of no length, whose caps keep their shape when stretched."""
        if points:
            path = "".join(f"M{self._at(point)}h0" for point in points)
            title = f"<title>{escape(tip)}</title>" if tip else ""
            self._marks.append(f'<path class="dot s{series} {kind}" d="{path}">{title}</path>')
        self._name(series, name, f"dot {kind}")

    def whisker(self, x: float, low: float, high: float, series: int) -> None:
        """A vertical bar from low to high."""
        path = self._path([(x, low), (x, high)])
        self._marks.append(f'<path class="whisker s{series}" d="{path}"/>')

    def rule(self, *, x: float | None = None, y: float | None = None, text: str = "") -> None:
        """A dashed line across at a value, with a word at its end; left out beyond the axis."""
        if x is not None and self.x.low <= x <= self.x.high:
            place = self.x.place(x)
            points = [(x, self.y.low), (x, self.y.high)]
            side = "left" if place < 0.6 else "right"
            offset = place if side == "left" else 1 - place
            style = f"{side}:{offset:.2%};bottom:.125rem"
        elif y is not None and self.y.low <= y <= self.y.high:
            points = [(self.x.low, y), (self.x.high, y)]
            style = f"left:0;top:{1 - self.y.place(y):.2%}"
        else:
            return
        self._marks.append(f'<path class="rule" d="{self._path(points)}"/>')
        if text:
            self._notes.append(f'<span class="note" style="{style}">{escape(text)}</span>')

    def label(self, x: float, y: float, text: str) -> None:
        """Words beside a point, on the side with room."""
        across = self.x.place(x)
        side, offset = ("left", across) if across < 0.6 else ("right", 1 - across)
        style = f"{side}:{offset:.2%};bottom:{self.y.place(y):.2%}"
        self._notes.append(f'<span class="point {side}" style="{style}">{escape(text)}</span>')

    def html(self) -> str:
        """The figure."""
        grid = "".join(
            f'<path class="grid" d="M0 {self._down(tick)}H{SIDE}"/>' for tick in self.y.ticks
        )
        across = "".join(
            f'<span class="x" style="left:{self.x.place(t):.2%}">{escape(self.x.text(t))}</span>'
            for t in (() if self.bare else self.x.ticks)
        )
        up = "".join(
            f'<span class="y" style="bottom:{self.y.place(t):.2%}">{escape(self.y.text(t))}</span>'
            for t in self.y.ticks
        )
        legend = f'<p class="legend">{"".join(self._legend)}</p>' if self._legend else ""
        size = " low" * self.low + " bare" * self.bare
        return (
            f'<figure class="plot{size}"><figcaption>{escape(self.caption)}</figcaption>{legend}'
            f'<p class="yname">{escape(self.y_name)}</p>'
            f'<div class="area"><svg viewBox="0 0 {SIDE} {SIDE}" preserveAspectRatio="none" '
            f'role="img" aria-label="{escape(self.caption)}">{grid}{"".join(self._marks)}</svg>'
            f"{up}{across}{''.join(self._notes)}</div>"
            f'<p class="xname">{escape(self.x_name)}</p></figure>'
        )

    def _name(self, series: int, name: str, kind: str) -> None:
        if name:
            key = f'<i class="key s{series} {kind}"></i>'
            self._legend.append(f"<span>{key}{escape(name)}</span>")

    def _at(self, point: Pair) -> str:
        return f"{self.x.place(point[0]) * SIDE:.1f} {self._down(point[1])}"

    def _down(self, value: float) -> str:
        return f"{(1 - self.y.place(value)) * SIDE:.1f}"

    def _path(self, points: Sequence[Pair]) -> str:
        return "M" + "L".join(self._at(point) for point in points)
