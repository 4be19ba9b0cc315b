"""Passes through graphs and others are counted, and start-up rehearses what will run."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from baton import LLM, SamplingParams
from baton.core.step import Row
from baton.runner.graphs import Replayed, StepGraphs, batch_buckets
from baton.runner.inputs import build_inputs
from baton.runner.probes import Probe
from baton.runner.runner import Runner

BASE: dict[str, Any] = {
    "dtype": "float32",
    "block_size": 16,
    "max_model_len": 128,
    "num_kv_pages": 64,
    "max_num_seqs": 6,
    "skip_tokenizer_init": True,
    "threads": 1,
}
TINY_MTP = str(Path(__file__).parents[1] / "evals" / "tiny")
GREEDY = SamplingParams(max_tokens=6, temperature=0, ignore_eos=True)


class Decodes:
    """In the place of `StepGraphs`: takes decodes, and leaves all else to the runner."""

    def __init__(self, runner: Runner, captured: bool) -> None:
        self.runner, self.captured = runner, captured

    def passes(self, rows: list[int], of: list[Row]) -> list[list[int]]:
        return [[i for i in rows if not of[i].tokens], [i for i in rows if of[i].tokens]]

    def run(self, rows: list[Row]) -> Replayed | None:
        runner = self.runner
        if any(row.tokens for row in rows):
            return None
        inputs = build_inputs(rows, runner.slots, runner.config.page_size)
        context = runner.model.plan(inputs.batch, runner.views)
        hidden = runner.model.forward(inputs.ids, context)
        runner.slots.computed[inputs.slots] += inputs.lengths
        return Replayed(runner.model.logits(hidden[inputs.sample_index]).float())


def test_passes_are_counted_by_how_they_ran(tiny: Callable[[str], str]) -> None:
    with LLM(tiny("llama"), **BASE) as llm:
        expected = llm.generate([[5, 6, 7]], GREEDY)[0].completions[0].token_ids
        before = llm.stats()
        assert before.graph_passes == 0
        assert before.eager_passes == before.steps >= 6
        runner = llm.core.executor.runner
        for captured in (True, False):
            monkey: Any = Decodes(runner, captured)
            runner.graphs = monkey
            before = llm.stats()
            found = llm.generate([[5, 6, 7]], GREEDY)[0].completions[0].token_ids
            after = llm.stats()
            assert found == expected
            decodes = after.steps - before.steps - 1
            assert after.graph_passes - before.graph_passes == (decodes if captured else 0)
            assert after.eager_passes - before.eager_passes == 1 + (0 if captured else decodes)


@pytest.mark.parametrize(
    ("kind", "graphable", "drafts", "graphed"),
    [
        ("cuda", True, False, True),
        ("cuda", True, True, False),
        ("cuda", False, False, False),
        ("cpu", True, False, False),
    ],
)
def test_graphs_are_for_steps_that_they_can_hold(
    kind: str, graphable: bool, drafts: bool, graphed: bool
) -> None:
    runner = Runner.__new__(Runner)
    runner.device = torch.device(kind)
    runner.slots = SimpleNamespace(debug=False)  # type: ignore[assignment]
    model: Any = SimpleNamespace(graphable=graphable, drafts=drafts)
    assert runner._graphed(model) is graphed


@pytest.mark.parametrize("graphed", [True, False])
def test_start_up_rehearses_what_will_run(
    tiny: Callable[[str], str], graphed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    buckets, probes = list[bool](), list[Probe]()
    synthetic = Runner._synthetic

    def note(self: Runner, probe: Probe, model: Any) -> None:
        probes.append(probe)
        synthetic(self, probe, model)

    with LLM(tiny("llama"), **BASE) as llm:
        runner = llm.core.executor.runner
        monkeypatch.setattr(StepGraphs, "run_once", lambda _: buckets.append(True))
        monkeypatch.setattr(Runner, "_synthetic", note)
        monkeypatch.setattr(Runner, "_graphed", lambda *_: graphed)
        runner.rehearse()
    assert buckets == ([True] if graphed else [])
    decodes = [probe.seqs for probe in probes if probe.chunk == 1]
    assert decodes == ([] if graphed else batch_buckets(6)), "decodes of every batch, once"
    assert {probe.chunk for probe in probes} >= {16, 128}


def test_a_rehearsal_with_an_mtp_module_makes_its_guesses(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with LLM(TINY_MTP, **BASE | {"mtp": True}) as llm:
        runner, rows = llm.core.executor.runner, list[int]()
        draft = type(runner.model).draft
        monkeypatch.setattr(
            type(runner.model),
            "draft",
            lambda self, hidden, *rest: rows.append(len(hidden)) or draft(self, hidden, *rest),
        )
        runner.rehearse()
        assert {*batch_buckets(6), 16, 128} <= set(rows)
