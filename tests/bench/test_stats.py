"""Intervals cover what they say they cover, and known values come out."""

from __future__ import annotations

import numpy as np
import pytest

from baton.bench.stats import (
    effective,
    enough,
    falling,
    mean_difference,
    percentile_difference,
    percentile_interval,
    share_difference,
    trend,
    wilson,
)


@pytest.mark.parametrize(
    "good, total, low, high",
    # Newcombe, Stat. Med. 17:857, 1998, table I
    [
        (81, 263, 0.2553, 0.3662),
        (15, 148, 0.0624, 0.1605),
        (0, 20, 0.0, 0.1611),
        (1, 29, 0.0061, 0.1718),
    ],
)
def test_wilson_gives_published_values(good: int, total: int, low: float, high: float) -> None:
    found = wilson(good, total)
    assert (found.low, found.high) == (pytest.approx(low, abs=2e-4), pytest.approx(high, abs=2e-4))


def test_newcombe_gives_his_published_example() -> None:
    # 56/70 against 48/80, method 10 without continuity correction: 0.0524 to 0.3339
    found = share_difference(48, 80, 56, 70)
    assert found.low == pytest.approx(0.0524, abs=1e-4)
    assert found.high == pytest.approx(0.3339, abs=1e-4)


def test_the_interval_of_a_percentile_covers_it_in_95_of_100() -> None:
    generator = np.random.default_rng(1)
    truth = -np.log(1 - 0.9)  # p90 of the exponential distribution
    covered = 0
    for _ in range(1000):
        found = percentile_interval(generator.exponential(1, 200), 90)
        covered += (found.low or 0) <= truth <= (found.high or np.inf)
    assert 940 <= covered <= 985


def test_a_percentile_that_few_samples_bound_has_no_upper_end() -> None:
    found = percentile_interval(np.arange(50.0), 99)
    assert found.low is not None
    assert found.high is None
    assert percentile_interval([1.0], 50).low is None


def test_the_difference_of_percentiles_covers_it() -> None:
    generator = np.random.default_rng(2)
    truth = 0.5 * -np.log(1 - 0.9)
    covered = false_alarms = 0
    for _ in range(400):
        a, b, c = (generator.exponential(scale, 300) for scale in (1.0, 1.5, 1.0))
        found, same = percentile_difference(a, b, 90), percentile_difference(a, c, 90)
        assert found is not None
        assert same is not None
        covered += (found.low or 0) <= truth <= (found.high or 0)
        false_alarms += not (same.low or 0) <= 0 <= (same.high or 0)
    assert covered >= 0.92 * 400
    assert false_alarms <= 0.08 * 400
    assert percentile_difference([], [1.0], 50) is None


def test_intervals_of_samples_that_follow_one_another() -> None:
    """A level that moves slowly, as a queue's does: intervals that count every sample for itself
    miss the truth in seven of ten such series, and find differences between equal things."""
    generator = np.random.default_rng(5)

    def wandering() -> list[float]:
        level, out = 0.0, []
        for _ in range(1000):
            level = 0.95 * level + generator.normal()
            out.append(level)
        return out

    false_alarms = misses = 0
    for _ in range(200):
        a, b = wandering(), wandering()
        found, own = percentile_difference(a, b, 50), percentile_interval(a, 50)
        assert found is not None
        false_alarms += not (found.low or 0) <= 0 <= (found.high or 0)
        misses += not (own.low or 0) <= 0 <= (own.high or 0)
    assert false_alarms <= 0.15 * 200, false_alarms
    assert misses <= 0.15 * 200, misses


def test_the_difference_of_means() -> None:
    found = mean_difference([1.0, 2.0, 3.0], [4.0, 5.0, 6.0])
    assert found is not None
    half = 1.959964 * (1 / 3 + 1 / 3) ** 0.5
    assert found.low == pytest.approx(3 - half)
    assert found.high == pytest.approx(3 + half)
    assert mean_difference([1.0], [1.0, 2.0]) is None


def test_outcomes_that_come_in_runs_count_for_less() -> None:
    generator = np.random.default_rng(3)
    apart = [bool(x) for x in generator.random(1000) < 0.9]
    together = sorted(apart)
    assert effective(apart) > 400
    assert effective(together) < 50
    assert effective([True] * 100) == 100
    assert effective([]) == 0


def test_trend_of_a_line_and_of_noise() -> None:
    at = np.arange(10.0)
    line = trend(at, 2 * at + np.array([0.1, -0.1] * 5))
    assert line is not None
    assert line.slope == pytest.approx(2, abs=0.02)
    assert line.rise == pytest.approx(2, rel=0.05)
    assert line.t > 100
    assert trend([1, 1, 1], [1, 2, 3]) is None
    generator = np.random.default_rng(4)
    noise = [trend(at, generator.normal(size=10)) for _ in range(2000)]
    # one-sided 1% at eight degrees of freedom
    assert 8 <= sum(line is not None and line.t > 2.896 for line in noise) <= 35


def test_the_falling_fit_pools_what_rises() -> None:
    assert falling([3, 1, 2, 0], [1, 1, 1, 1]) == [3, 1.5, 1.5, 0]
    assert falling([1, 2], [3, 1]) == [1.25, 1.25]
    assert falling([], []) == []
    assert falling([1, 2, 3], [1, 1, 1]) == [2, 2, 2]


def test_when_a_percentile_has_enough_samples() -> None:
    assert [enough(n, 99) for n in (999, 1000)] == [False, True]
    assert [enough(n, 50) for n in (19, 20)] == [False, True]
