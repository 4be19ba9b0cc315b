"""How sure a figure is: intervals of shares, percentiles and differences, trends, and a fit that
may only fall.

Intervals are two-sided at 95% unless said otherwise. Nothing here knows what is measured.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import NormalDist
from typing import NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

CONFIDENCE = 0.95
#: fixed, so that the same records always give the same interval
SEED = 20240229
RESAMPLES = 4000

Samples = NDArray[np.float64]


class Interval(msgspec.Struct, frozen=True):
    """Two ends; None where the samples do not bound that side."""

    low: float | None
    high: float | None

    def above(self, value: float) -> bool:
        """Whether all of it is at least the value."""
        return self.low is not None and self.low >= value

    def below(self, value: float) -> bool:
        """Whether all of it is less than the value."""
        return self.high is not None and self.high < value


class Trend(NamedTuple):
    """A least-squares line: units per unit of x, its t statistic, and its rise over the span of x
    as a share of the mean."""

    slope: float
    t: float
    rise: float


def wilson(good: float, total: float, confidence: float = CONFIDENCE) -> Interval:
    """Interval of a share `good / total` (Wilson, J. Am. Stat. Assoc. 22, 1927). Counts may be
    fractions: an effective number of samples. Without samples, 0 to 1."""
    return Interval(*_wilson(good, total, confidence))


def share_difference(good_a: float, total_a: float, good_b: float, total_b: float) -> Interval:
    """Interval of share b less share a of independent samples, from both Wilson intervals
    (Newcombe, Stat. Med. 17, 1998, method 10). Counts may be fractions, as in `wilson`."""
    if not total_a or not total_b:
        return Interval(-1.0, 1.0)
    p, q = good_a / total_a, good_b / total_b
    a_low, a_high = _wilson(good_a, total_a, CONFIDENCE)
    b_low, b_high = _wilson(good_b, total_b, CONFIDENCE)
    return Interval(
        q - p - math.hypot(q - b_low, a_high - p), q - p + math.hypot(b_high - q, p - a_low)
    )


def effective(outcomes: Sequence[bool], batches: int = 10) -> float:
    """Independent samples that outcomes in order of time are worth.

    Requests of one moment meet the same queue, so their outcomes resemble one another, and an
    interval that counts each of them is too narrow. The variance between consecutive batches over
    what independent outcomes would give is the factor by which they count less (never more).
    """
    n = len(outcomes)
    size = n // batches
    share = sum(outcomes) / n if n else 0.0
    if size < 5 or share in (0.0, 1.0):
        return float(n)
    means = np.array(outcomes[: size * batches], dtype=np.float64).reshape(batches, size).mean(1)
    factor = float(means.var(ddof=1)) * size / (share * (1 - share))
    return n / max(1.0, factor)


def enough(n: int, percent: float) -> bool:
    """Whether ten samples or more lie beyond the percentile; with fewer it says little more than
    the maximum does."""
    return n * (100 - percent) >= 1000


def percentile_interval(
    samples: Sequence[float] | Samples, percent: float, confidence: float = CONFIDENCE
) -> Interval:
    """Interval of a percentile between two order statistics, without any assumption about the
    distribution (David and Nagaraja, Order Statistics, 7.1). A side is None when too few samples
    lie beyond it. Samples in order of time count for as many as they are worth."""
    values, worth = _worth(samples, percent)
    n, share = max(1, round(worth)), percent / 100
    tail = (1 - confidence) / 2
    # below[k]: chance that at most k of n samples lie below the true percentile
    below = np.cumsum(_binomial(n, share))
    low = int(np.searchsorted(below, tail, side="right"))
    high = int(np.searchsorted(below, 1 - tail, side="left")) + 1
    scale = len(values) / n
    return Interval(
        float(values[max(1, math.floor(low * scale)) - 1]) if low >= 1 else None,
        float(values[min(len(values), math.ceil(high * scale)) - 1]) if high <= n else None,
    )


def percentile_difference(
    a: Sequence[float] | Samples, b: Sequence[float] | Samples, percent: float
) -> Interval | None:
    """Bootstrap interval of a percentile of b less that of a; None without samples. Samples in
    order of time count for as many as they are worth.

    The k-th smallest of n resampled values is the empirical quantile at a Beta(k, n - k + 1)
    variable, so a resample costs one draw instead of n.
    """
    generator = np.random.default_rng(SEED)

    def resampled(samples: Sequence[float] | Samples) -> Samples:
        values, worth = _worth(samples, percent)
        k = min(worth, max(1.0, worth * percent / 100))
        places = np.ceil(generator.beta(k, worth - k + 1, RESAMPLES) * len(values)) - 1
        drawn: Samples = values[np.clip(places.astype(int), 0, len(values) - 1)]
        return drawn

    if len(a) == 0 or len(b) == 0:
        return None
    return _central(resampled(b) - resampled(a))


def _worth(samples: Sequence[float] | Samples, percent: float) -> tuple[Samples, float]:
    """Samples by size, and how many independent ones they are worth at a percentile."""
    values = np.asarray(samples, dtype=np.float64)
    middle = np.percentile(values, percent)
    return np.sort(values), effective((values <= middle).tolist())


def mean_difference(a: Sequence[float] | Samples, b: Sequence[float] | Samples) -> Interval | None:
    """Interval of the mean of b less that of a, by Welch's standard error and normal ends; None
    with fewer than two samples on a side."""
    x, y = np.asarray(a, dtype=np.float64), np.asarray(b, dtype=np.float64)
    if len(x) < 2 or len(y) < 2:
        return None
    half = _z(CONFIDENCE) * math.sqrt(x.var(ddof=1) / len(x) + y.var(ddof=1) / len(y))
    middle = float(y.mean() - x.mean())
    return Interval(middle - half, middle + half)


def trend(x: Sequence[float] | Samples, y: Sequence[float] | Samples) -> Trend | None:
    """The line through points; None with fewer than three or without spread in x."""
    at, values = np.asarray(x, dtype=np.float64), np.asarray(y, dtype=np.float64)
    n = len(at)
    spread = float(((at - at.mean()) ** 2).sum()) if n else 0.0
    if n < 3 or spread == 0:
        return None
    slope = float(((at - at.mean()) * (values - values.mean())).sum()) / spread
    rest = values - values.mean() - slope * (at - at.mean())
    error = math.sqrt(float((rest**2).sum()) / (n - 2) / spread)
    mean = float(values.mean())
    span = float(at.max() - at.min())
    t = slope / error if error > 0 else math.copysign(math.inf, slope) if slope else 0.0
    return Trend(slope, t, slope * span / mean if mean else 0.0)


def falling(values: Sequence[float], weights: Sequence[float]) -> list[float]:
    """The never-rising sequence closest to the values in weighted least squares, by pooling
    adjacent violators (Barlow et al., 1972)."""
    blocks: list[list[float]] = []  # mean, weight, how many values
    for value, weight in zip(values, weights, strict=True):
        blocks.append([value, weight, 1])
        while len(blocks) > 1 and blocks[-1][0] > blocks[-2][0]:
            mean, total, count = blocks.pop()
            before = blocks[-1]
            both = before[1] + total
            if both > 0:
                before[0] = (before[0] * before[1] + mean * total) / both
            before[1], before[2] = both, before[2] + count
    return [mean for mean, _, count in blocks for _ in range(int(count))]


def _wilson(good: float, total: float, confidence: float) -> tuple[float, float]:
    if total <= 0:
        return 0.0, 1.0
    z = _z(confidence)
    share = good / total
    scale = 1 + z * z / total
    centre = (share + z * z / (2 * total)) / scale
    half = z / scale * math.sqrt(share * (1 - share) / total + z * z / (4 * total * total))
    # at 0 and 1 the ends are exact; rounding must not leave them out
    low = 0.0 if good == 0 else max(0.0, centre - half)
    high = 1.0 if good == total else min(1.0, centre + half)
    return low, high


def _central(values: Samples) -> Interval:
    tail = (1 - CONFIDENCE) / 2
    low, high = np.quantile(values, (tail, 1 - tail))
    return Interval(float(low), float(high))


def _z(confidence: float) -> float:
    return NormalDist().inv_cdf((1 + confidence) / 2)


def _binomial(n: int, share: float) -> Samples:
    """Chances of 0..n successes."""
    if not 0 < share < 1:
        raise ValueError(f"a percentile lies between 0 and 100, got {share * 100}")
    logs = np.concatenate(([0.0], np.cumsum(np.log(np.arange(1, n + 1, dtype=np.float64)))))
    counts = np.arange(n + 1)
    chance = logs[n] - logs - logs[::-1] + counts * math.log(share)
    chances: Samples = np.exp(chance + (n - counts) * math.log1p(-share))
    return chances
