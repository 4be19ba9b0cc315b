"""Greedy tokens must not depend on how the engine happened to run them."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest

from baton import LLM, SamplingParams
from helpers.deep import fix_cost, watch_layers

FAMILIES = ["llama", "qwen3_moe", "hy_v3", "deepseek_v3"]
GREEDY = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
SEEDED = SamplingParams(temperature=1.0, top_p=0.9, seed=7, max_tokens=12, ignore_eos=True)
BASE: dict[str, Any] = {
    "dtype": "float64",  # exact ties and near-ties of random weights vanish
    "block_size": 16,
    "max_model_len": 512,
    "num_kv_pages": 256,
    "skip_tokenizer_init": True,
    "threads": 1,
}


def prompts(seed: int, lengths: list[int]) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(3, 320) for _ in range(n)] for n in lengths]


def answers(llm: LLM, batch: list[list[int]], params: SamplingParams = GREEDY) -> list[list[int]]:
    return [out.completions[0].token_ids for out in llm.generate(batch, params)]


@pytest.fixture(scope="module", params=FAMILIES)
def case(
    request: pytest.FixtureRequest, tiny: Callable[[str], str]
) -> tuple[str, list[list[int]], list[list[int]]]:
    """(model folder, prompts, tokens when each runs alone, whole, synchronously, uncached)."""
    model = tiny(request.param)
    batch = prompts(1, [5, 33, 70, 16, 17, 120, 1])
    with LLM(
        model, **BASE, async_scheduling=False, enable_prefix_caching=False, max_num_seqs=1
    ) as llm:
        alone = [answers(llm, [prompt])[0] for prompt in batch]
    assert len({tuple(a) for a in alone}) == len(alone)
    return model, batch, alone


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({}, id="batched, async"),
        pytest.param({"async_scheduling": False}, id="sync"),
        pytest.param({"max_num_batched_tokens": 16}, id="chunked"),
        pytest.param({"max_num_batched_tokens": 8, "async_scheduling": False}, id="chunked, sync"),
        pytest.param(
            {"num_kv_pages": 14, "max_model_len": 200, "enable_prefix_caching": False},
            id="preempted",
        ),
        pytest.param({"num_kv_pages": 14, "max_model_len": 200}, id="preempted, cached"),
        pytest.param({"max_num_seqs": 2}, id="two slots"),
    ],
)
def test_same_tokens(
    case: tuple[str, list[list[int]], list[list[int]]], options: dict[str, Any]
) -> None:
    model, batch, alone = case
    with LLM(model, **(BASE | options)) as llm:
        assert answers(llm, batch) == alone
        if options.get("num_kv_pages") == 14:
            assert llm.stats().preemptions > 0
        # The second time, prefixes come from the cache.
        assert answers(llm, batch) == alone
        llm.core.scheduler.check()
        assert llm.stats().kv_pages_used == 0


def test_prefix_hit_is_counted(case: tuple[str, list[list[int]], list[list[int]]]) -> None:
    model, batch, alone = case
    with LLM(model, **BASE) as llm:
        assert [o.cached_tokens for o in llm.generate(batch, GREEDY)] == [0] * len(batch)
        again = llm.generate(batch, GREEDY)
        assert [o.cached_tokens for o in again] == [(len(p) - 1) // 16 * 16 for p in batch]
        assert [o.completions[0].token_ids for o in again] == alone


def test_seeded_sampling_does_not_depend_on_the_batch(tiny: Callable[[str], str]) -> None:
    batch = prompts(2, [9, 40, 21])
    with LLM(tiny("llama"), **BASE) as llm:
        together = answers(llm, batch, SEEDED)
        assert [answers(llm, [p], SEEDED)[0] for p in batch] == together
    with LLM(tiny("llama"), **(BASE | {"num_kv_pages": 9, "max_model_len": 100})) as llm:
        assert answers(llm, batch * 2, SEEDED) == together * 2


@pytest.mark.parametrize("size", [1, 2])
def test_chunks_that_go_by_layers(
    case: tuple[str, list[list[int]], list[list[int]]], size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A token costs 2 ms and a step has 60: long prompts pass a layer per step beside decodes."""

    fix_cost(monkeypatch, 2e-3)
    parts = watch_layers(monkeypatch)
    model, batch, alone = case
    with LLM(model, **BASE, step_time="60ms", max_num_seqs=2, tensor_parallel_size=size) as llm:
        whole = [batch[0], *batch]  # the first one decodes beside all others
        longer = SamplingParams(temperature=0.0, max_tokens=300, ignore_eos=True)
        found = llm.generate(whole, [longer] + [GREEDY] * len(batch))
        assert [out.completions[0].token_ids for out in found[1:]] == alone
        asked = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=2)
        plain = [llm.generate([p], asked)[0].prompt_logprobs for p in batch]
        beside = llm.generate(whole, [longer] + [asked] * len(batch))[1:]
        for one, other in zip(plain, beside, strict=True):
            pairs = list(zip(one or (), other.prompt_logprobs or (), strict=True))[1:]
            assert all(
                mine.chosen.token_id == theirs.chosen.token_id
                and mine.chosen.logprob == pytest.approx(theirs.chosen.logprob, abs=1e-9)
                for mine, theirs in pairs
            )
        llm.core.scheduler.check()
        assert llm.stats().kv_pages_used == 0
    assert {(0, 1), (1, 2), (2, 3)} <= set(parts)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("size", [2, 4])
def test_tensor_parallel(tiny: Callable[[str], str], family: str, size: int) -> None:
    batch = prompts(3, [5, 50, 18])
    with LLM(tiny(family), **BASE) as llm:
        single = answers(llm, batch)
        sampled = answers(llm, batch, SEEDED)
    with LLM(tiny(family), **BASE, tensor_parallel_size=size) as llm:
        assert answers(llm, batch) == single
        assert answers(llm, batch, SEEDED) == sampled
