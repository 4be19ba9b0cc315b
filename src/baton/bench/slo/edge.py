"""Where a criterion stops being met: the highest load that meets it and the lowest that does not.

Everything here is a function of the levels measured so far, so the order in which they were
measured, or an interruption between them, does not matter.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Literal

import msgspec

from baton.bench.slo.level import SUCCESS, Level, Verdict
from baton.bench.stats import falling

#: a drop of the share by so much between the two ends of an edge is a cliff
CLIFF = 0.2


class Edge(msgspec.Struct, kw_only=True):
    """One criterion's boundary.

    meets / fails: loads next to the boundary, None where no such load was seen.
    sure_meets / sure_fails: the nearest loads whose own interval leaves no doubt.
    state: "found"; "above": met at every load offered; "below": failed at every one; "open": the
        limit of runs came first.
    cliff: how steeply it falls, in words, where it does.
    """

    criterion: str
    meets: float | None = None
    fails: float | None = None
    sure_meets: float | None = None
    sure_fails: float | None = None
    state: Literal["found", "above", "below", "open"] = "open"
    cliff: str | None = None


def verdicts(levels: Sequence[Level], criterion: str, target: float) -> dict[float, Verdict]:
    """Of each valid level, by load. Where a level's own interval includes the target, the closest
    never-rising curve through all levels decides."""
    usable = sorted((level for level in levels if level.valid), key=lambda level: level.load)
    fit = falling(
        [0.0 if level.saturated else level.share(criterion) for level in usable],
        [level.weight(criterion) for level in usable],
    )
    decided: dict[float, Verdict] = {}
    for level, share in zip(usable, fit, strict=True):
        own = level.verdict(criterion, target)
        decided[level.load] = ("meets" if share >= target else "fails") if own == "unclear" else own
    return decided


def edge(levels: Sequence[Level], criterion: str, target: float) -> Edge:
    """The boundary as far as it is known; its state is the search's to set."""
    decided = verdicts(levels, criterion, target)
    own = {level.load: level.verdict(criterion, target) for level in levels if level.valid}
    fails = min((load for load, word in decided.items() if word == "fails"), default=None)
    meets = _highest(decided, fails)
    sure_fails = min((load for load, word in own.items() if word == "fails"), default=None)
    return Edge(
        criterion=criterion,
        meets=meets,
        fails=fails,
        sure_meets=_highest(own, fails),
        sure_fails=sure_fails,
    )


def _highest(words: Mapping[float, Verdict], below: float | None) -> float | None:
    return max(
        (x for x, word in words.items() if word == "meets" and (below is None or x < below)),
        default=None,
    )


def conflicts(levels: Sequence[Level], criterion: str, target: float) -> list[tuple[float, float]]:
    """Pairs (a, b) of neighbouring loads, a below b, of which a fails and b meets without doubt:
    the curve is not the falling one that a search takes it for."""
    known = sorted((level for level in levels if level.valid), key=lambda level: level.load)
    sure = [
        (level.load, word)
        for level in known
        if (word := level.verdict(criterion, target)) != "unclear"
    ]
    return [
        (a, b) for (a, left), (b, right) in pairwise(sure) if left == "fails" and right == "meets"
    ]


def cliff(found: Edge, levels: Mapping[float, Level], unit: str, steep: float) -> str | None:
    """A warning where the share falls off at a found edge, else None.

    Args:
        steep: widest ratio of the two loads at which a fall counts as one.
    """
    if found.meets is None or found.fails is None or found.criterion == SUCCESS:
        return None
    if found.fails > found.meets * steep and found.fails - found.meets > 1:
        return None
    low, high = levels[found.meets], levels[found.fails]
    before, after = low.share(found.criterion), high.share(found.criterion)
    beyond = high.interval(found.criterion).high
    disjoint = beyond is not None and low.interval(found.criterion).above(beyond)
    if high.saturated:
        return (
            f"cliff: from {found.fails:g} {unit} on the server falls behind without end "
            f"({high.saturated})"
        )
    if before - after >= CLIFF and disjoint:
        return (
            f"cliff: {before:.1%} of requests meet it at {found.meets:g} {unit}, "
            f"{after:.1%} at {found.fails:g}"
        )
    return None
