"""Layers of two kinds: what Baton computes over pages is what training code computes at once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from baton.attention.backend import ATTENTION, AttentionBackend
from baton.attention.local import LocalAttention
from baton.attention.positions.unrotated import Unrotated
from baton.core.errors import ConfigError, ModelError
from baton.core.forward import ForwardBatch
from baton.core.sampling import SamplingParams
from baton.engine.llm import LLM
from baton.models.registry import parse
from helpers.forward import Driver, load_folder, relative_error
from helpers.trained import some_model
from training.export import config, export
from training.model import Shape
from training.recipes import RECIPES

BLOCK, LENGTH = 16, 96
SHAPE = Shape(
    hidden=48, layers=4, heads=2, nope=16, rope=16, value=24, latent=32, dense=64, experts=4,
    expert=16, top_k=2, window=BLOCK, global_layers=(2,), log_base=32, theta=1e4,
)  # fmt: skip
RECIPE = replace(RECIPES["recall-512k"], shape=SHAPE, context=512)
TOLERANCE = 2e-5


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("local")
    export(some_model(SHAPE), RECIPE, found)
    return found


@pytest.fixture(scope="module")
def ids() -> torch.Tensor:
    torch.manual_seed(3)
    return torch.randint(0, 400, (2, LENGTH))


@pytest.fixture(scope="module")
def expected(ids: torch.Tensor) -> torch.Tensor:
    """`[2, LENGTH, vocab]`, by the training code."""
    model = some_model(SHAPE)
    with torch.no_grad():
        hidden, _, _ = model(ids, torch.float32)
        logits: torch.Tensor = model.head(hidden).view(*ids.shape, -1)
    return logits


@pytest.mark.parametrize("page", [4, 16])
@pytest.mark.parametrize(
    "chunks", [[96], [16] * 6, [15, 2, 30, 1, 40], [40], [1] * 3, [31, 33], [48, 48]]
)
@torch.no_grad()
def test_logits_are_those_of_the_training_code(
    folder: Path, ids: torch.Tensor, expected: torch.Tensor, page: int, chunks: list[int]
) -> None:
    driver = Driver(load_folder(folder), page_size=page)
    found = driver.run("a", ids[0].tolist(), chunks)
    assert relative_error(found, expected[0]) < TOLERANCE


@pytest.mark.parametrize("backend", ["torch", "plain,torch"])
@torch.no_grad()
def test_sequences_share_steps(
    folder: Path,
    ids: torch.Tensor,
    expected: torch.Tensor,
    backend: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A chunk over three blocks beside decodes, in both orders; as libraries pack them, too."""
    monkeypatch.setitem(ATTENTION._entries, "plain", "attention.plain_packed:PlainPacked")
    driver = Driver(load_folder(folder, backend=backend))
    a, b = ids[0].tolist(), ids[1].tolist()
    parts: dict[str, list[torch.Tensor]] = {"a": [], "b": []}
    plan = [({"a": 33}), ({"a": 1, "b": 40}), ({"b": 1, "a": 1}), ({"b": 30, "a": 1}), ({"a": 60})]
    at = {"a": 0, "b": 0}
    for step in plan:
        rows = {n: (a if n == "a" else b)[at[n] : at[n] + size] for n, size in step.items()}
        for name, logits in driver.step(rows).items():
            parts[name].append(logits)
            at[name] += step[name]
    for row, name in enumerate("ab"):
        assert relative_error(torch.cat(parts[name]), expected[row, : at[name]]) < TOLERANCE


def test_both_kinds_of_layers_matter(folder: Path, ids: torch.Tensor) -> None:
    """Otherwise equal logits would say nothing."""
    model = some_model(SHAPE)
    others = [
        replace(SHAPE, window=0), replace(SHAPE, global_layers=(1,)), replace(SHAPE, log_base=64)
    ]  # fmt: skip
    with torch.no_grad():
        mine = model.head(model(ids, torch.float32)[0])
        for shape in others:
            other = some_model(shape)
            other.load_state_dict(model.state_dict())
            theirs = other.head(other(ids, torch.float32)[0])
            assert relative_error(theirs, mine) > 0.01


@pytest.mark.parametrize("options", [{}, {"max_num_batched_tokens": 24}, {"max_num_seqs": 2}])
def test_the_engine_answers_alike_however_it_cuts(
    folder: Path, ids: torch.Tensor, expected: torch.Tensor, options: dict[str, Any]
) -> None:
    prompts = [ids[0, :70].tolist(), ids[0, :90].tolist(), ids[1, :50].tolist()]
    base = {"dtype": "float32", "block_size": 16, "num_kv_pages": 64, "max_model_len": 256}
    greedy = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
    with LLM(str(folder), **base) as llm:
        first = [out.completions[0].token_ids for out in llm.generate(prompts, greedy)]
    with LLM(str(folder), **(base | options)) as llm:
        llm.generate(prompts[0], greedy)
        found = llm.generate(prompts, greedy)
        assert [out.completions[0].token_ids for out in found] == first
        assert found[1].cached_tokens >= 64, "from the prefix cache"
        rows = llm.score(ids[0].tolist(), 80)
    wanted = expected[0, 80:-1].log_softmax(-1)
    torch.testing.assert_close(rows, wanted, atol=1e-4, rtol=0)


def test_decodes_read_positions_on_the_device(folder: Path) -> None:
    """As in a CUDA graph, whose lengths the host does not know."""
    model = load_folder(folder)
    local = model.attentions[1]
    assert isinstance(local, LocalAttention)
    pages = torch.arange(3 * 40).view(3, 40)
    places = torch.tensor([0, 15, 100])
    batch = ForwardBatch([1, 1, 1], [0, 0, 0], places, places, pages)
    seen = local.seen(batch, 4)
    assert seen.positions.tolist() == [0, 15, 100 - 80]
    assert seen.pages[:, 0].tolist() == [0, 40, 80 + 20]
    assert seen.pages.shape[1] * 4 == 2 * BLOCK
    assert batch.positions is places
    assert not model.graph_prompts


def test_scores_of_unrotated_layers_grow_with_the_logarithm() -> None:
    scheme = Unrotated(8, 1024)
    scale = scheme.query_scale(torch.tensor([1022, 1024**2 - 2]))
    torch.testing.assert_close(scale.flatten(), torch.tensor([1.0, 2.0]))
    x = torch.randn(2, 3, 8)
    assert torch.equal(scheme.rotation(torch.tensor([5, 9]))(x), x)


def test_pages_must_divide_blocks(folder: Path) -> None:
    with pytest.raises(ConfigError, match="blocks of 16 tokens"):
        LLM(str(folder), block_size=32)


@pytest.mark.parametrize(
    "change, names",
    [
        ({"global_layers": [9]}, "global_layers"),
        ({"global_layers": None}, "global_layers"),
        ({"score_log_base": 1}, "score_log_base"),
        ({"attention_block": None}, "attention_block"),
    ],
)
def test_senseless_configs_are_refused(change: dict[str, Any], names: str) -> None:
    with pytest.raises(ModelError, match=names):
        parse(config(RECIPE) | change, "config.json")


def test_a_plain_model_has_one_kind(tiny: Callable[[str], str]) -> None:
    model = load_folder(Path(tiny("deepseek_v3")))
    assert len(model.attentions) == 1
    assert model.graph_prompts
    assert isinstance(model.attention.decode, AttentionBackend)
