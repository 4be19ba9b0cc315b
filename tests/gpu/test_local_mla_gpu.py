"""Layers that see blocks, on the card: the training code's logits, with graphs and without."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from baton import LLM, SamplingParams
from helpers.trained import some_model
from training.export import export
from training.recipes import RECIPES

RECIPE = RECIPES["recall-512k"]
LENGTH = 2048


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("local")
    export(some_model(RECIPE.shape), RECIPE, found)
    return found


def options(**more: object) -> dict[str, object]:
    base = {"dtype": "bfloat16", "max_model_len": 4096, "num_kv_pages": 256, "max_num_seqs": 16}
    return base | more


@pytest.mark.parametrize("chunk", [2048, 320])
def test_logits_are_the_training_code_s_within_bfloat16(folder: Path, chunk: int) -> None:
    torch.manual_seed(4)
    ids = torch.randint(0, 400, (1, LENGTH))
    model = some_model(RECIPE.shape)
    with torch.no_grad():
        hidden, _, _ = model(ids, torch.float32)
        expected = model.head(hidden).log_softmax(-1)[:-1]
    with LLM(str(folder), **options(max_num_batched_tokens=chunk)) as llm:
        found = llm.score(ids[0].tolist())
    error = (found - expected).norm(dim=1) / expected.norm(dim=1)
    # where two experts tie within bfloat16's rounding another one is chosen
    assert error.median() < 1e-2
    assert error.quantile(0.99) < 5e-2


def test_graphs_answer_as_eager_steps_do(folder: Path) -> None:
    torch.manual_seed(5)
    prompts = [torch.randint(0, 400, (n,)).tolist() for n in (30, 255, 256, 257, 700, 1500)]
    greedy = SamplingParams(temperature=0.0, max_tokens=300, ignore_eos=True)
    found = []
    for eager in (False, True):
        with LLM(str(folder), **options(enforce_eager=eager)) as llm:
            found.append([out.completions[0].token_ids for out in llm.generate(prompts, greedy)])
            assert eager == (llm.stats().graph_passes == 0)
    assert found[0] == found[1]
