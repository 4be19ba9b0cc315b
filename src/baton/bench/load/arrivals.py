"""When an open loop sends: gaps drawn from a gamma distribution, at a rate that may change."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from baton.bench.record import Load
from baton.core.errors import ConfigError

RAMPS = "linear:FROM:TO, exp:FROM:TO or steps:A,B,C (requests per second)"


def arrival_times(load: Load, count: int, seed: int = 0) -> list[float]:
    """`count` times in seconds from the first, which is 0.

    Gaps have the mean 1 / rate and a coefficient of variation of 1 / sqrt(burstiness). A ramp
    stretches time so that the rate at each moment is the ramp's; its steps take equal time.

    Raises:
        ConfigError: no rate, or one that makes no sense.
    """
    if not 0 < load.burstiness < math.inf:
        raise ConfigError(f"burstiness must be above 0 and finite, got {load.burstiness:g}")
    draw = np.random.default_rng([seed, 1])
    gaps = draw.gamma(load.burstiness, 1 / load.burstiness, max(count - 1, 0))
    # in units of the mean gap: how many requests should have come by then
    due = np.concatenate([[0.0], np.cumsum(gaps)])[:count]
    if load.ramp is not None:
        return [float(t) for t in _inverse(load.ramp, count)(due)]
    if load.rate is None or not 0 < load.rate < math.inf:
        raise ConfigError(f"an open loop needs a rate above 0, got {load.rate}")
    return [float(t) for t in due / load.rate]


def _inverse(ramp: str, count: int) -> Callable[[np.ndarray], np.ndarray]:
    """Time as a function of how many requests should have come by then."""
    kind, *numbers = ramp.replace(",", ":").split(":")
    try:
        rates = [float(number) for number in numbers]
    except ValueError:
        rates = []
    two = kind in ("linear", "exp") and len(rates) == 2
    if not (two or (kind == "steps" and rates)) or not all(0 < r < math.inf for r in rates):
        raise ConfigError(f"ramp {ramp!r}: write {RAMPS}, rates above 0")
    first, last = rates[0], rates[-1]
    if kind == "steps":
        step = count / sum(rates)  # seconds of each
        ends = np.cumsum(np.array(rates) * step)
        times = step * np.arange(len(rates) + 1)
        known = np.concatenate([[0.0], ends])
        # beyond the expected end, on at the last rate
        return lambda due: np.where(
            due > ends[-1], times[-1] + (due - ends[-1]) / last, np.interp(due, known, times)
        )
    if first == last:
        return lambda due: due / first
    if kind == "exp":
        # integral of first * exp(k t) with k = log(last / first) / span
        span = count * math.log(last / first) / (last - first)
        k = math.log(last / first) / span
        low = 1e-9  # a falling rate leaves a last request at infinity
        return lambda due: np.log(np.maximum(1 + due * k / first, low)) / k
    span = 2 * count / (first + last)
    slope = (last - first) / span
    return lambda due: (np.sqrt(np.maximum(first**2 + 2 * slope * due, 0.0)) - first) / slope
