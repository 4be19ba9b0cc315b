"""The cost model: fitting, refining, and chunks that respect what it predicts."""

from __future__ import annotations

import math
import random

import pytest

from baton.scheduler.budget import NOTHING, Budget, Cut, Share
from baton.scheduler.cost import BytesModel, CostModel, Features, pairs

TRUTH = (2e-3, 3e-5, 4e-10, 2e-8, 1e-5, 8e-8)


def seconds_of(features: Features, truth: tuple[float, ...] = TRUTH) -> float:
    return sum(k * x for k, x in zip(truth, features.vector(), strict=True))


def start_up(truth: tuple[float, ...] = TRUTH, noise: float = 0.0) -> list[tuple[Features, float]]:
    rng = random.Random(0)
    shapes = [
        Features(chunk, pairs(chunk, context), 0, 1, context)
        for chunk in (16, 256, 2048)
        for context in (0, 8_000, 100_000)
    ]
    shapes += [Features(n, 0, n * c, n) for n in (1, 16, 128) for c in (100, 50_000)]
    return [(s, seconds_of(s, truth) * (1 + rng.uniform(-noise, noise))) for s in shapes]


def test_fit_recovers_a_step_time() -> None:
    cost = CostModel()
    cost.fit(start_up(noise=0.05))
    for shape in (
        Features(64, 0, 64 * 20_000, 64),
        Features(1024 + 32, pairs(1024, 60_000), 32 * 5_000, 33, 60_000),
        Features(4096, pairs(4096, 400_000), 0, 1, 400_000),
        Features(64, pairs(64, 400_000), 0, 1, 400_000),
    ):
        assert cost.predict(shape) == pytest.approx(seconds_of(shape), rel=0.15)
    assert min(cost.coefficients) >= 0.0


def test_a_feature_that_helps_is_not_negative() -> None:
    cost = CostModel()
    cost.fit([(Features(n, 0, 0, 1), 1e-2 / n) for n in (1, 2, 4, 8)])
    assert min(cost.coefficients) >= 0.0


def test_online_samples_move_decode_but_keep_long_context() -> None:
    cost = CostModel()
    cost.fit(start_up())
    slower = (4e-3, 3e-5, 4e-10, 4e-8, 2e-5, 8e-8)
    rng = random.Random(1)
    for _ in range(3000):
        n = rng.randint(1, 128)
        shape = Features(n, 0, n * rng.randint(100, 20_000), n)
        cost.observe(shape, seconds_of(shape, slower) * rng.uniform(0.95, 1.05))
    decode = Features(64, 0, 64 * 10_000, 64)
    assert cost.predict(decode) == pytest.approx(seconds_of(decode, slower), rel=0.1)
    prefill = Features(2048, pairs(2048, 300_000), 0, 1, 300_000)
    assert cost.predict(prefill) == pytest.approx(seconds_of(prefill), rel=0.25)


def test_without_any_fit_measurements_win_at_once() -> None:
    cost = CostModel()
    for _ in range(16):
        cost.observe(Features(512, pairs(512, 0), 0, 1), 1.0)
    assert cost.predict(Features(512, pairs(512, 0), 0, 1)) == pytest.approx(1.0, rel=0.1)
    cost.observe(Features(1, 0, 10, 1), 0.0)  # a clock that did not move is no sample


def test_longest_chunk_is_where_time_runs_out() -> None:
    rng = random.Random(2)
    for _ in range(500):
        cost = CostModel(coefficients=tuple(rng.choice([0.0, rng.random()]) for _ in range(6)))
        seconds, context = rng.uniform(-1, 100), rng.randrange(1000)
        size = cost.chunk_within(seconds, context)
        if size == math.inf:
            assert cost.added(10**6, context) <= seconds
        elif size > 0:
            _, b, c, _, e, f = cost.coefficients
            used = e + b * size + c * size * (context + size / 2) + f * context
            assert used == pytest.approx(seconds)


def random_budget(rng: random.Random) -> tuple[Budget, CostModel, int, int, int, float]:
    cost = CostModel(
        BytesModel(
            per_token=rng.choice([0, 50, 1000]),
            per_context_token=rng.choice([0, 1, 100]),
            base=rng.choice([0, 10_000]),
            most_context=rng.choice([math.inf, 40_000, 1000]),
        ),
        coefficients=(
            1e-3,
            rng.choice([1e-5, 1e-3]),
            rng.choice([0, 1e-9, 1e-6]),
            1e-8,
            1e-5,
            rng.choice([0, 1e-7]),
        ),
    )
    tokens, longest = rng.randrange(256), rng.randrange(50_000)
    memory, seconds = rng.choice([0, 10**5, 10**6, 10**9]), rng.choice([-1, 1e-2, 0.1, math.inf])
    left = Share(rng.randint(1, 4096), seconds)
    budget = Budget(cost, 16, 1, left, tokens, longest, memory)
    return budget, cost, tokens, longest, memory, seconds


def test_chunks_stay_within_every_budget_but_for_the_floor() -> None:
    rng = random.Random(3)
    largest = 0
    for _ in range(3000):
        budget, cost, tokens, longest, memory, seconds = random_budget(rng)
        start, remaining = rng.randrange(0, 100_000), rng.randint(1, 20_000)
        share = Share(budget.left.tokens, budget.left.seconds)
        size, layers = budget.chunk(start, remaining, share)
        assert layers == 1
        assert 0 < size <= min(remaining, budget.left.tokens)

        def within(
            size: int,
            cost: CostModel = cost,
            start: int = start,
            now: tuple[int, int] = (tokens, longest),
            limits: tuple[float, float] = (memory + 1e-6, seconds + 1e-12),
        ) -> bool:
            used = cost.bytes.predict(now[0] + size, max(now[1], start + size))
            return used <= limits[0] and cost.added(size, start) <= limits[1]

        if not within(size):
            assert size <= 16, "only the floor of one page may exceed a budget"
        elif size < remaining and size + 16 <= budget.left.tokens:
            assert not within(min(remaining, size + 16)), "a larger chunk would have fitted"
            largest = max(largest, size)
        if size < remaining and size > 16:
            assert (start + size) % 16 == 0
    assert largest > 100


def test_only_the_first_chunk_of_a_step_gets_the_floor() -> None:
    cost = CostModel()
    budget = Budget(cost, 16, 1, Share(100, 0.0), 0, 0, 10**9)
    share = budget.share(2, 1)
    assert budget.chunk(8, 50, share) == Cut(8, 1)
    budget.spend(8, Cut(8, 1), share)
    assert budget.chunk(0, 50, budget.share(2, 0)) == NOTHING
    assert budget.left.tokens == 92


def test_every_lane_keeps_a_share() -> None:
    budget = Budget(CostModel(), 16, 1, Share(800, 8.0), 0, 0, 10**9)
    assert (budget.share(4, 3).tokens, budget.share(4, 3).seconds) == (500, 5.0)
    assert (budget.share(4, 0).tokens, budget.share(1, 0).tokens) == (800, 800)
    free = Budget(CostModel(), 16, 1, Share(800, math.inf), 0, 0, 10**9)
    assert free.share(4, 3).seconds == math.inf


def by_time(step: float, layers: int = 10, **changes: bool) -> Budget:
    """1 ms a token, 2 us a token behind; `step` seconds, 4096 tokens, no bound on bytes."""
    cost = CostModel(coefficients=(0.0, 1e-3, 0.0, 0.0, 0.0, 2e-6))
    return Budget(cost, 16, layers, Share(4096, step), 0, 0, 10**9, **changes)


def test_a_chunk_that_takes_too_long_goes_by_layers() -> None:
    budget = by_time(0.1)
    share = budget.share(1, 0)
    assert budget.chunk(0, 50, share) == Cut(50, 10), "fits"
    # 200 ms for 200 tokens: 5 of 10 layers in 100 ms
    assert budget.chunk(0, 200, share) == Cut(200, 5)
    # one layer of all 5,000 takes 500 ms: cut to what passes one layer in 100 ms, whole pages
    assert budget.chunk(0, 5000, share) == Cut(992, 1)
    # behind 10,000 tokens every piece costs 20 ms more, however short
    assert budget.chunk(10_000, 5000, share) == Cut(976, 1)
    assert by_time(math.inf).chunk(0, 5000, Share(4096, math.inf)) == Cut(4096, 10)
    assert by_time(0.1, layers=1).chunk(0, 200, share) == Cut(96, 1), "nothing to go by"


def test_one_chunk_at_a_time_goes_by_layers() -> None:
    budget = by_time(0.1, under_way=True)
    assert budget.chunk(0, 200, budget.share(1, 0)) == Cut(96, 10)
    budget = by_time(0.1)
    share = budget.share(1, 0)
    budget.spend(0, Cut(200, 3), share)
    assert budget.left.seconds == pytest.approx(0.04)
    assert budget.left.tokens == 4096, "it runs apart from the other rows"
    assert budget.chunk(0, 200, budget.share(1, 0)) == Cut(32, 10)


def test_layers_of_a_chunk_under_way_fill_the_time() -> None:
    budget = by_time(0.1)
    assert budget.layers(0, 200, 5, Share(0, 0.1)) == 5
    assert budget.layers(0, 200, 5, Share(0, 0.045)) == 2
    assert budget.layers(0, 200, 5, Share(0, math.inf)) == 5
    assert budget.layers(0, 200, 5, Share(0, -1.0)) == 1, "the first chunk of a step advances"
    budget.spend(0, Cut(16, 10), Share(16, 0.1))
    assert budget.layers(0, 200, 5, Share(0, -1.0)) == 0
