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
from baton.scheduler.cost import BytesModel, CostModel
from baton.scheduler.scheduler import Scheduler
from helpers.configs import make_config
from helpers.fake_runner import FakeRunner, alone
from helpers.mixes import Mix, Run, drive, make_mix

MIXES = int(os.environ.get("BATON_TEST_MIXES", "300"))
GROUP = 25


def run_mix(mix: Mix) -> tuple[Run, Scheduler, EngineConfig]:
    config = make_config(**mix.config)
    kv = KVManager(
        config.num_pages, config.page_size, b"test", config.prefix_caching, track_freed=True
    )
    bytes_model = BytesModel(per_token=20, per_context_token=5)
    scheduler = Scheduler(config, kv, CostModel(bytes_model))
    scheduler._planner.patience = 3
    runner = FakeRunner(config.max_num_seqs, kv)
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
    assert kv.used == 0, "pages leaked"
    assert len(scheduler._seats.free) == scheduler._seats.num_slots, "slots leaked"
    return run, scheduler, config


def check_budget(plan: StepPlan, scheduler: Scheduler, config: EngineConfig) -> None:
    """Seconds and bytes as predicted now stay in their limits, but for a floor of one page."""
    assert sum(len(row.tokens) for row in plan.rows) <= config.max_num_batched_tokens
    chunks = [row.length for row in plan.rows if row.tokens]
    if sum(chunks) <= config.page_size:
        return
    draft, cost = scheduler._in_flight[-1][1], scheduler._cost
    longest = max(row.start + row.length for row in plan.rows)
    assert cost.bytes.predict(plan.num_tokens, longest) <= config.step_memory
    if draft.decodes:
        assert cost.predict(draft.features) <= config.step_time + 1e-9


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
