"""Random request mixes on the real runner: every answer equals the one the request gets alone.

Integrity is checked after every step, and debug mode poisons freed pages and unused slots, so a
page freed too early, a wrong position or a token read twice shows as a failure here.
`BATON_FUZZ_MIXES=2000 pytest tests/engine/test_fuzz.py` runs the offline suite.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable
from dataclasses import replace

import pytest

from baton.config.engine import EngineConfig
from baton.config.options import EngineOptions
from baton.core.forward import Model
from baton.core.request import FinishReason, Request
from baton.core.step import StepPlan, StepResult
from baton.engine.build import build_rank, prepare
from baton.kv.format import make_views
from baton.kv.manager import KVManager
from baton.runner.runner import Runner, Ticket
from baton.scheduler.cost import CostModel, Features
from baton.scheduler.scheduler import Scheduler
from helpers.mixes import Mix, drive, make_mix

MIXES = int(os.environ.get("BATON_FUZZ_MIXES", "240"))
PARTS = 12
FAMILIES = ["llama", "qwen3_moe", "hy_v3", "deepseek_v3"]
VOCAB = 320
DEEP: list[int] = []  # rows of each mix that passed some layers only


class SlowCost(CostModel):
    """Thinks that a token takes 0.3 ms whatever it sees, so that prompts of tens of tokens take
    longer than a step and pass it by layers."""

    def __init__(self) -> None:
        super().__init__(coefficients=(0.0, 3e-4, 0.0, 0.0, 0.0, 0.0))

    def observe(self, features: Features, seconds: float) -> None:
        pass


class Rig:
    """One tiny model; a fresh runner, pool and scheduler for each mix."""

    def __init__(self, folder: str) -> None:
        options = EngineOptions.of(
            folder,
            dtype="float64",
            max_model_len=512,
            num_kv_pages=64,
            skip_tokenizer_init=True,
            threads=1,
        )
        built = build_rank(prepare(options), 0, 1, "", tokenizer="")
        self.model: Model = built.runner.model
        self.config: EngineConfig = built.config
        built.runner.close()
        self.deep = 0

    def start(self, config: EngineConfig) -> tuple[Scheduler, Runner]:
        """A new engine under `config`."""
        views = make_views(
            self.model.kv_shapes,
            config.num_pages + 1,
            config.page_size,
            "float64",
            "float64",
            "cpu",
        )
        kv = KVManager(
            config.num_pages, config.page_size, b"fuzz", config.prefix_caching, track_freed=True
        )
        cost = SlowCost() if config.step_time < 0.1 else CostModel()
        return Scheduler(config, kv, cost), Runner(config, self.model, views)

    def run(self, mix: Mix, config: EngineConfig) -> tuple[Scheduler, dict[str, list[int]]]:
        """Tokens of every request that was neither refused nor aborted, with their reasons."""
        scheduler, runner = self.start(config)
        tickets: deque[Ticket] = deque()
        self.deep = 0

        def launch(plan: StepPlan) -> None:
            self.deep += sum(row.layers is not None for row in plan.rows)
            freed = scheduler.kv.drain_freed()
            if freed:
                runner.poison_pages(freed)
            tickets.append(runner.launch(plan))

        def collect() -> StepResult:
            return runner.collect(tickets.popleft())

        try:
            run = drive(mix, scheduler, launch, collect)
        finally:
            runner.close()
        found: dict[str, list[int]] = {}
        for _, request in mix.requests:
            name = request.request_id
            if name in run.refused or name in run.aborted:
                continue
            last = run.outputs[name][-1]
            assert last.finish_reason in (FinishReason.STOP, FinishReason.LENGTH), (name, last)
            found[name] = run.tokens(name)
        return scheduler, found

    def reference(self, request: Request, config: EngineConfig) -> list[int]:
        """The request alone: whole prompt in one chunk, no cache, no look-ahead."""
        single = Mix(0, [(0, request)], [], {}, {}, False)
        roomy = replace(
            config,
            num_pages=64,
            page_size=16,
            prefix_caching=False,
            max_num_batched_tokens=2048,
            max_num_seqs=1,
        )
        return self.run(single, roomy)[1][request.request_id]


@pytest.fixture(scope="module")
def rigs(tiny: Callable[[str], str]) -> dict[str, Rig]:
    return {family: Rig(tiny(family)) for family in FAMILIES}


@pytest.mark.parametrize("part", range(PARTS))
def test_mixes(rigs: dict[str, Rig], part: int) -> None:
    for seed in range(part, MIXES, PARTS):
        rig = rigs[FAMILIES[seed // PARTS % len(FAMILIES)]]
        mix = make_mix(seed, VOCAB, plain=True, longest=96)
        config = replace(rig.config, **mix.config)
        scheduler, found = rig.run(mix, config)
        DEEP.append(rig.deep)
        for name, tokens in found.items():
            expected = rig.reference(mix.request(name), config)
            assert tokens == expected, f"mix {seed}, request {name}"
        assert scheduler.kv.used == 0, f"mix {seed} leaked pages"
        assert not scheduler.has_work()


def test_some_chunks_went_by_layers() -> None:
    if not DEEP:
        pytest.skip("counts what the mixes before it did, and none ran")
    assert sum(DEEP) > len(DEEP) // 4
