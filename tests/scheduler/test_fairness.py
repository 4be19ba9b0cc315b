"""Long prompts and short ones share time, memory and lanes."""

from __future__ import annotations

from typing import Any

import pytest

from baton.scheduler.cost import BytesModel, CostModel
from helpers.configs import make_model
from helpers.scheduling import answer, ask, make, step

LONG = 100_000


def long_config(**changes: Any) -> dict[str, Any]:
    return {
        "num_pages": 20_000,
        "max_model_len": LONG + 1000,
        "max_num_seqs": 16,
        "max_num_batched_tokens": 2048,
        "step_time": 0.05,
    } | changes


@pytest.mark.parametrize("layers", [1, 10])
def test_a_long_prompt_and_a_stream_of_short_ones_both_advance(layers: int) -> None:
    cost = CostModel(coefficients=(1e-3, 5e-5, 1e-10, 1e-8, 1e-5, 1e-7))
    truth = CostModel(coefficients=cost.coefficients)
    scheduler = make(cost, **long_config(model=make_model(num_layers=layers)))
    scheduler.add(ask("long", LONG))
    born: dict[str, int] = {}
    waits, gaps, last_long, turn = [], [], 0, 0
    while scheduler._queue.get("long") or scheduler._seats.running["long"].prefilling:
        if turn % 2 == 0:
            born[f"s{turn}"] = turn
            scheduler.add(ask(f"s{turn}", 200, first=turn, cache_salt=str(turn)))
        plan = scheduler.plan()
        assert plan is not None
        draft = scheduler._in_flight[-1][1]
        predicted = truth.predict(draft.features)
        prefill = sum(row.length for row in plan.rows if row.tokens)
        assert draft.decodes == 0 or prefill <= 16 or predicted <= 0.051
        if any(owner.request_id == "long" for owner in scheduler.rows(plan.step)):
            gaps.append(turn - last_long)
            last_long = turn
        outputs = scheduler.commit(answer(plan, seconds=predicted))
        for out in outputs:
            if out.request_id in born:
                waits.append(turn - born.pop(out.request_id))
        turn += 1
    assert max(waits) <= 3, "a short prompt stood behind the long one"
    assert max(gaps) <= 4, "the long prompt starved"
    assert turn < 500


def test_a_floor_of_one_page_still_serves_every_lane() -> None:
    """No time is left beside the decodes: one page per step goes to each lane in turn."""
    scheduler = make(**long_config(step_time=0.0))
    scheduler.add(ask("decode", 10, sampling={"max_tokens": 900}))
    step(scheduler)
    scheduler.add(ask("long", LONG))
    for number in range(6):
        scheduler.add(ask(f"s{number}", 200, first=number, cache_salt=str(number)))
    served = []
    for _ in range(20):
        plan = scheduler.plan()
        assert plan is not None
        chunks = [
            (owner.request_id, owner.length)
            for row, owner in zip(plan.rows, scheduler.rows(plan.step), strict=True)
            if row.tokens
        ]
        assert len(chunks) == 1
        assert chunks[0][1] <= 16
        served.append(chunks[0][0] == "long")
        scheduler.commit(answer(plan))
    assert 9 <= sum(served) <= 11


def test_one_partly_computed_prompt_per_lane() -> None:
    scheduler = make(**long_config(num_pages=50_000))
    for number in range(4):
        scheduler.add(ask(f"l{number}", LONG, first=number, cache_salt=str(number)))
        scheduler.add(ask(f"m{number}", 20_000, first=number, cache_salt=str(number)))
    for _ in range(30):
        step(scheduler)
        partial = [s.lane for s in scheduler._seats.running.values() if s.prefilling]
        assert len(partial) <= 2


def test_a_request_that_never_fits_beside_others_gets_its_turn() -> None:
    scheduler = make(num_pages=40, max_num_seqs=4, prefix_caching=False)
    scheduler._planner.patience = 8
    scheduler.add(ask("s-1", 100, sampling={"max_tokens": 10}))
    step(scheduler)
    scheduler.add(ask("big", 620, sampling={"max_tokens": 10}))
    done = False
    for turn in range(200):
        if turn % 3 == 0:
            scheduler.add(ask(f"s{turn}", 100, sampling={"max_tokens": 10}))
        done = done or any(out.request_id == "big" for out in step(scheduler)[1])
    assert done


def test_memory_bounds_a_chunk() -> None:
    bytes_model = BytesModel(per_token=1000, per_context_token=5)
    scheduler = make(CostModel(bytes_model), **long_config(step_memory=1_000_000))
    scheduler.add(ask("long", LONG))
    sizes = []
    while scheduler._queue or scheduler._seats.running["long"].prefilling:
        plan, _ = step(scheduler)
        sizes.append(plan.rows[0].length)
        longest = plan.rows[0].start + sizes[-1]
        assert sizes[-1] <= 16 or bytes_model.predict(sizes[-1], longest) <= 1_000_000
    assert sizes[0] > 900
    assert sizes[0] > sizes[len(sizes) // 2]
