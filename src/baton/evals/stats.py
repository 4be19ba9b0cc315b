"""How sure a share is, and a difference of two shares of the same queries.

Queries about one context are answered from the same cache and resemble one another, so contexts
are what is independent. Intervals are two-sided, at 95%.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from statistics import NormalDist
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

CONFIDENCE = 0.95
Z = NormalDist().inv_cdf((1 + CONFIDENCE) / 2)
POWER = 0.8  #: chance to see a difference that is there, in `queries_for`


class Interval(NamedTuple):
    """Both ends."""

    low: float
    high: float


@dataclass(frozen=True)
class Paired:
    """Two runs of the same queries.

    n: queries. contexts: that they are about. a, b: share that is right. difference: b less a.
    lost, won: queries that only a, or only b, has right. interval: of the difference. method: by
    which the interval was found. p: of McNemar's exact test, as if queries were independent.
    """

    n: int
    contexts: int
    a: float
    b: float
    difference: float
    lost: int
    won: int
    interval: Interval
    method: str
    p: float

    @property
    def worse(self) -> bool:
        """The interval lies below 0."""
        return self.interval.high < 0


def wilson(good: float, total: float) -> Interval:
    """Of a share `good / total` (Wilson, J. Am. Stat. Assoc. 22, 1927); 0 to 1 of nothing."""
    if total <= 0:
        return Interval(0.0, 1.0)
    share, scale = good / total, 1 + Z * Z / total
    centre = (share + Z * Z / (2 * total)) / scale
    half = Z / scale * math.sqrt(share * (1 - share) / total + Z * Z / (4 * total * total))
    return Interval(max(0.0, centre - half), min(1.0, centre + half))


def paired(a: Sequence[bool], b: Sequence[bool], contexts: Sequence[object]) -> Paired:
    """Compare two runs of the same queries.

    The interval is Tango's score interval for paired shares (Stat. Med. 17, 1998), which holds for
    few and for no discordant pairs, of as many queries as the given ones are worth: `n` divided by
    the variance of the difference over contexts relative to what independent queries would give
    (the design effect of cluster samples; Kish, Survey Sampling, 1965; never less than 1).

    Args:
        contexts: of each query, any name of its context.
    """
    x, y = np.asarray(a, bool), np.asarray(b, bool)
    n = len(x)
    lost, won = int((x & ~y).sum()), int((~x & y).sum())
    names = {name: i for i, name in enumerate(dict.fromkeys(contexts))}
    effect = design_effect(
        y.astype(float) - x, np.array([names[context] for context in contexts], int)
    )
    interval = tango(lost / effect, won / effect, n / effect)
    method = "Tango" if effect == 1 else f"Tango, design effect {effect:.2f}"
    share = (float(x.mean()), float(y.mean())) if n else (0.0, 0.0)
    return Paired(
        n, len(names), *share, (won - lost) / n if n else 0.0, lost, won, interval, method,
        mcnemar(lost, won),
    )  # fmt: skip


def design_effect(values: NDArray[np.float64], cluster: NDArray[np.int64]) -> float:
    """Variance of the mean of `values` in clusters over that of independent values; at least 1,
    and 1 where there are too few clusters with anything in them to tell."""
    n, groups = len(values), int(cluster.max(initial=-1)) + 1
    variance = float(values.var())
    if groups < 2 or groups == n or variance == 0:
        return 1.0
    sums = np.bincount(cluster, values - values.mean(), groups)
    clustered = float((sums**2).sum()) * groups / (groups - 1)
    return max(1.0, clustered / (n * variance))


def tango(lost: float, won: float, total: float) -> Interval:
    """Score interval of `(won - lost) / total` for pairs of which `lost + won` are discordant.

    The ends solve `(won - lost - total d)^2 = z^2 total (2 q + d (1 - d))`, with q the likeliest
    share of pairs lost if the difference is d, the larger root of Tango's quadratic. Counts may be
    fractions.
    """
    if total <= 0:
        return Interval(-1.0, 1.0)

    def excess(d: float) -> float:
        linear = -lost - won + (2 * total - won + lost) * d  # of q, with 2 total q^2 + ... = 0
        constant = -lost * d * (1 - d)
        root = math.sqrt(max(0.0, linear * linear - 8 * total * constant))
        q = (root - linear) / (4 * total)
        variance = total * max(0.0, 2 * q + d * (1 - d))
        miss = won - lost - total * d
        return miss * miss - Z * Z * variance

    middle = (won - lost) / total
    return Interval(_root(excess, middle, -1.0), _root(excess, middle, 1.0))


def _root(excess: Callable[[float], float], inside: float, outside: float) -> float:
    """Where `excess` turns positive between a point inside the interval and the end of the range;
    that end if it never does."""
    if excess(outside) <= 0:
        return outside
    for _ in range(60):
        middle = (inside + outside) / 2
        inside, outside = (middle, outside) if excess(middle) <= 0 else (inside, middle)
    return inside


def mcnemar(lost: int, won: int) -> float:
    """Two-sided chance of so uneven a split of discordant pairs if both runs were equally good
    (the exact binomial test)."""
    n = lost + won
    tail: int = sum(math.comb(n, k) for k in range(min(lost, won) + 1))
    return min(1.0, float(Fraction(2 * tail, 1 << n)))  # 2**n is beyond a float's range


def queries_for(difference: float, discordant: float) -> int:
    """Independent queries after which a true difference is seen with a chance of 80% at 95%
    confidence, if such a share of pairs is discordant (Miettinen, Biometrics 24, 1968).

    Args:
        difference: of the two shares, above 0; the share of discordant pairs is at least that.
    """
    share = max(discordant, difference)
    power = NormalDist().inv_cdf(POWER)
    spread = Z * math.sqrt(share) + power * math.sqrt(max(0.0, share - difference**2))
    return math.ceil((spread / difference) ** 2)
