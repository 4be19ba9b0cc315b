"""Random mixes on tight engines: every request must get the tokens it gets alone.

BATON_TEST_MIXES says how many mixes to run (300; a long run takes 2000 or more).
"""

from __future__ import annotations

import os

import pytest

from baton.config.engine import EngineConfig
from baton.core.request import FinishReason, TokenOutput
from baton.core.step import StepPlan
from baton.kv.manager import KVManager
from baton.scheduler import queue
from baton.scheduler.cost import BytesModel, CostModel, Features
from baton.scheduler.planner import LEAST
from baton.scheduler.scheduler import Scheduler
from helpers.configs import make_config, make_model
from helpers.fake_runner import FakeRunner, alone
from helpers.mixes import Mix, Run, drive, make_mix

MIXES = int(os.environ.get("BATON_TEST_MIXES", "300"))
GROUP = 25
DEEP: list[int] = []  # chunks of each mix that went by layers


def run_mix(mix: Mix) -> tuple[Run, Scheduler, EngineConfig]:
    config = make_config(**mix.config, model=make_model(num_layers=1 + mix.seed % 4))
    kv = KVManager(
        config.num_pages, config.page_size, b"test", config.prefix_caching, track_freed=True
    )
    bytes_model = BytesModel(per_token=20, per_context_token=5)
    scheduler = Scheduler(config, kv, CostModel(bytes_model))
    scheduler._planner.patience = 3
    layers = config.model.num_layers
    runner = FakeRunner(config.max_num_seqs, kv, mix.seed % 3 * 5e-4 + 1e-4, layers)
    left = dict(mix.failures)

    def launch(plan: StepPlan) -> None:
        check_budget(plan, scheduler, config)
        for index, owner in enumerate(scheduler.rows(plan.step)):
            if owner.request_id in left:
                left[owner.request_id] -= 1
                if left[owner.request_id] < 0:
                    runner.errors[index] = "injected"
        runner.launch(plan)

    run = drive(mix, scheduler, launch, runner.collect)
    DEEP.append(runner.deep_chunks)
    assert kv.used == 0, "pages leaked"
    assert len(scheduler._seats.free) == scheduler._seats.num_slots, "slots leaked"
    return run, scheduler, config


def check_budget(plan: StepPlan, scheduler: Scheduler, config: EngineConfig) -> None:
    """Seconds and bytes as predicted now stay in their limits, but for a floor of one page or one
    layer. A chunk that goes by layers runs apart, so its bytes and tokens are its own."""
    draft, cost = scheduler._in_flight[-1][1], scheduler._cost
    assert cost.predict(draft.features) <= scheduler.stats().longest_step + 1e-9
    whole = [row for row in plan.rows if row.layers is None]
    deep = [row for row in plan.rows if row.layers is not None]
    assert sum(len(row.ids) for row in whole) <= config.max_num_batched_tokens
    chunks = sum(len(row.ids) for row in whole)
    if chunks > config.page_size:
        longest = max(row.start + row.length for row in whole)
        tokens = sum(row.length for row in whole)
        assert cost.bytes.predict(tokens, longest) <= config.step_memory
    for row in deep:
        assert row.length <= config.max_num_batched_tokens
        assert cost.bytes.predict(row.length, row.start + row.length) <= config.step_memory
    floor = chunks <= config.page_size and all(b - a == 1 for a, b in (r.layers for r in deep))
    if draft.decodes and not floor:
        decodes = Features(draft.decodes, 0.0, draft.context, draft.decodes)
        least = cost.predict(decodes) + LEAST * config.step_time
        assert cost.predict(draft.features) <= max(config.step_time, least) + 1e-9


def check_outputs(mix: Mix, run: Run, config: EngineConfig) -> None:
    room = config.num_pages * config.page_size + 1
    for _, request in mix.requests:
        name = request.request_id
        if name in run.refused:
            assert name not in run.outputs
            continue
        want = alone(request, config.model.eos_token_ids, min(config.max_model_len, room))
        got, outputs = run.tokens(name), run.outputs.get(name, [])
        if name in run.aborted or any(out.error for out in outputs):
            assert got == want[: len(got)], f"mix {mix.seed}, {name}"
            assert name in run.aborted or outputs[-1].finish_reason is FinishReason.ERROR
            continue
        assert got == want, f"mix {mix.seed}, {name}"
        assert [out.finish_reason is not None for out in outputs[:-1]] == [False] * (len(got) - 1)
        check_last(outputs[-1], want, config)
        if request.sampling.prompt_logprobs is not None:
            entries = outputs[0].prompt_logprobs
            assert entries is not None
            assert entries[0] is None
            chosen = [(e.chosen.token_id, -e.chosen.logprob) for e in entries[1:] if e]
            assert chosen == [(token, i) for i, token in enumerate(request.prompt[1:])]


def check_last(last: TokenOutput, want: list[int], config: EngineConfig) -> None:
    assert last.finish_reason in (FinishReason.STOP, FinishReason.LENGTH)
    if last.stop_reason is not None:
        assert last.finish_reason is FinishReason.STOP
        assert last.stop_reason == want[-1]
    assert last.timing is not None


@pytest.fixture(autouse=True)
def _short_lanes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lanes that end where the mixes' prompts lie."""
    monkeypatch.setattr(queue, "LANES", (8, 32, 80))


@pytest.mark.parametrize("first", range(0, MIXES, GROUP))
def test_mix(first: int) -> None:
    for seed in range(first, min(MIXES, first + GROUP)):
        mix = make_mix(seed)
        run, _, config = run_mix(mix)
        check_outputs(mix, run, config)


def test_mixes_hold_chunks_that_go_by_layers() -> None:
    for seed in range(40):
        run_mix(make_mix(seed))
    assert sum(DEEP[-40:]) > 5
