"""The sampler: determinism in any batch, penalties over time, forced tokens, broken rows."""

from __future__ import annotations

import math
import random

import msgspec
import pytest
import torch
from torch import Tensor

from baton.core.sampling import SamplingParams
from baton.core.step import Admit
from baton.runner.sampler import Sampler

VOCAB = 501
STOP = [3, 4]
CPU = torch.device("cpu")
NEG_INF = float("-inf")

#: Every kind of row, so that any mix of them must leave each one's tokens alone.
KINDS = [
    SamplingParams(temperature=0.0),
    SamplingParams(),
    SamplingParams(temperature=0.7, top_p=0.9),
    SamplingParams(temperature=1.3, top_k=20),
    SamplingParams(temperature=1.0, top_k=400, top_p=0.99),
    SamplingParams(min_p=0.1, logprobs=3),
    SamplingParams(temperature=0.0, repetition_penalty=1.5, logprobs=0),
    SamplingParams(presence_penalty=1.0, frequency_penalty=0.5),
    SamplingParams(temperature=5.0, logit_bias={7: 100.0, 9: 99.0}),
    SamplingParams(temperature=0.0, min_tokens=4, max_tokens=9),
    SamplingParams(temperature=1e-4),
    SamplingParams(top_k=10**6, top_p=1e-9),
]


def admit(
    slot: int,
    params: SamplingParams,
    seed: int = 0,
    prompt: tuple[int, ...] = (),
    output: tuple[int, ...] = (),
) -> Admit:
    tokens = [*prompt, *output] if params.penalised else []
    return Admit(slot, params, seed, len(prompt), len(output), tokens, STOP)


def logits_at(kind: int, step: int) -> Tensor:
    """The logits row a request of this kind would see at this step, whatever runs beside it."""
    generator = torch.Generator().manual_seed(1000 * kind + step)
    return torch.randn(VOCAB, generator=generator) * 3


def sample_one(params: SamplingParams, logits: Tensor, seed: int = 0) -> int:
    sampler = Sampler(1, logits.numel(), CPU)
    sampler.admit(admit(0, params, seed))
    (result,) = sampler.sample(logits[None], [0]).to_host()
    assert result.error is None
    return result.token


def alone(kind: int, steps: int) -> list[tuple[object, ...]]:
    sampler = Sampler(1, VOCAB, CPU)
    sampler.admit(admit(0, KINDS[kind], seed=kind, prompt=(1, 2, 3)))
    out = []
    for step in range(steps):
        (result,) = sampler.sample(logits_at(kind, step)[None], [0]).to_host()
        out.append(msgspec.structs.astuple(result))
    return out


def test_a_row_does_not_depend_on_its_batch() -> None:
    """Random subsets, orders and slots, with late admission and preemption in between."""
    steps = 12
    expected = [alone(kind, steps) for kind in range(len(KINDS))]
    rng = random.Random(0)
    for _ in range(4):
        sampler = Sampler(len(KINDS), VOCAB, CPU)
        free = list(range(len(KINDS)))
        rng.shuffle(free)
        slot_of: dict[int, int] = {}
        got: list[list[tuple[object, ...]]] = [[] for _ in KINDS]
        while any(len(rows) < steps for rows in got):
            chosen = [k for k in range(len(KINDS)) if len(got[k]) < steps and rng.random() < 0.6]
            rng.shuffle(chosen)
            for kind in chosen:
                if kind in slot_of and rng.random() < 0.2:  # preempted, and back in another slot
                    sampler.release(slot_of[kind])
                    free.insert(0, slot_of.pop(kind))
                if kind not in slot_of:
                    slot_of[kind] = free.pop()
                    output = tuple(int(row[0]) for row in got[kind])  # type: ignore[call-overload]
                    sampler.admit(admit(slot_of[kind], KINDS[kind], kind, (1, 2, 3), output))
            rows = [logits_at(kind, len(got[kind])) for kind in chosen]
            logits = torch.stack(rows) if rows else torch.empty(0, VOCAB)
            results = sampler.sample(logits, [slot_of[kind] for kind in chosen]).to_host()
            for kind, result in zip(chosen, results, strict=True):
                got[kind].append(msgspec.structs.astuple(result))
        assert got == expected


def test_threads_do_not_matter() -> None:
    before = torch.get_num_threads()
    logits = torch.randn(3, 60_001, generator=torch.Generator().manual_seed(0)) * 3
    got = []
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            for rows in ([0, 1, 2], [2], [1]):
                sampler = Sampler(3, 60_001, CPU)
                for row in rows:
                    params = SamplingParams(top_p=0.95 if row else 1.0, logprobs=2)
                    sampler.admit(admit(row, params, seed=row))
                got.append(
                    dict(zip(rows, sampler.sample(logits[rows], rows).to_host(), strict=True))
                )
    finally:
        torch.set_num_threads(before)
    for results in got:
        for row, result in results.items():
            assert msgspec.structs.astuple(result) == msgspec.structs.astuple(got[0][row])


def test_seeds_and_steps_differ() -> None:
    logits = torch.zeros(VOCAB)
    assert len({sample_one(SamplingParams(), logits, seed) for seed in range(50)}) > 35
    sampler = Sampler(1, VOCAB, CPU)
    sampler.admit(admit(0, SamplingParams(), seed=2**64 - 1))
    tokens = {sampler.sample(logits[None], [0]).to_host()[0].token for _ in range(50)}
    assert len(tokens) > 35


def test_greedy_takes_the_lowest_of_equals() -> None:
    logits = torch.zeros(VOCAB)
    logits[[40, 17, 400]] = 1.0
    assert sample_one(SamplingParams(temperature=0.0), logits) == 17
    assert sample_one(SamplingParams(top_p=1e-9), logits) == 17
    assert sample_one(SamplingParams(temperature=1e-4, top_k=1), logits, seed=5) in {17, 40, 400}


def test_penalties_follow_the_formulas_over_time() -> None:
    """Greedy under penalties against a host account of counts (vLLM's formulas) for 40 steps."""
    params = SamplingParams(
        temperature=0.0, repetition_penalty=1.2, presence_penalty=0.3, frequency_penalty=0.4
    )
    logits = torch.randn(64, generator=torch.Generator().manual_seed(0))
    prompt = (int(logits.argmax()), 5, 5)
    sampler = Sampler(3, 64, CPU)
    sampler.admit(admit(2, params, prompt=prompt))
    output: list[int] = []
    for _ in range(40):
        expected = logits.tolist()
        for token in {*prompt, *output}:
            value, count = expected[token], output.count(token)
            value = value / 1.2 if value > 0 else value * 1.2
            expected[token] = value - 0.4 * count - 0.3 * (count > 0)
        sampled = sampler.sample(logits[None], [2])
        assert sampled.tokens.tolist() == [max(range(64), key=expected.__getitem__)]
        output += sampled.tokens.tolist()
    assert len(set(output)) > 10


def test_penalty_state_is_only_for_those_who_use_it_and_is_reused() -> None:
    sampler = Sampler(1000, VOCAB, CPU)
    params = SamplingParams(temperature=0.0, repetition_penalty=100.0)
    for slot in range(10):
        sampler.admit(admit(slot, SamplingParams(temperature=0.0)))
    assert sampler._counts._output.shape[0] == 0
    logits = torch.arange(VOCAB, 0, -1).float()[None]
    for _ in range(20):
        for slot in (700, 5, 6):
            sampler.admit(admit(slot, params, prompt=(0,)))
            assert sampler.sample(logits, [slot]).tokens.item() == 1
            assert sampler.sample(logits, [slot]).tokens.item() == 2
        sampler.release(700)
        sampler.release(700)
    assert sampler._counts._output.shape[0] <= 4


def test_bias_forces_and_bans() -> None:
    logits = logits_at(0, 0)
    best = int(logits.argmax())
    second = int(logits.topk(2).indices[1])
    for temperature in (0.0, 1.0):
        forced = SamplingParams(temperature=temperature, logit_bias={11: 100.0})
        assert sample_one(forced, logits) == 11
    banned = SamplingParams(temperature=0.0, logit_bias={best: -100.0})
    assert sample_one(banned, logits) == second


def test_min_tokens_holds_stop_ids_back_also_after_preemption() -> None:
    logits = torch.zeros(1, VOCAB)
    logits[0, STOP] = 50.0
    params = SamplingParams(temperature=0.0, min_tokens=3)
    sampler = Sampler(1, VOCAB, CPU)
    sampler.admit(admit(0, params))
    tokens = [sampler.sample(logits, [0]).tokens.item() for _ in range(5)]
    assert tokens == [0, 0, 0, 3, 3]
    sampler.admit(admit(0, params, output=(0, 0)))
    assert [sampler.sample(logits, [0]).tokens.item() for _ in range(2)] == [0, 3]


def test_logprobs_are_of_the_raw_distribution() -> None:
    params = SamplingParams(temperature=0.3, top_k=2, logit_bias={9: 100.0}, logprobs=4)
    sampler = Sampler(2, VOCAB, CPU)
    sampler.admit(admit(0, SamplingParams(temperature=0.0)))
    sampler.admit(admit(1, params))
    logits = torch.stack([logits_at(0, 0), logits_at(1, 0)])
    plain, scored = sampler.sample(logits, [0, 1]).to_host()
    assert plain.logprobs is None
    assert scored.token == 9
    assert scored.logprobs is not None
    expected = logits[1].double().log_softmax(0)
    assert scored.logprobs.chosen.token_id == 9
    assert math.isclose(scored.logprobs.chosen.logprob, expected[9].item(), abs_tol=1e-5)
    assert scored.logprobs.chosen.rank == int((expected > expected[9]).sum()) + 1
    assert [t.token_id for t in scored.logprobs.top] == expected.topk(4).indices.tolist()
    assert [t.rank for t in scored.logprobs.top] == [1, 2, 3, 4]


@pytest.mark.parametrize(
    "poison", ["nan", "one nan", "inf", "all -inf", "nan under a held stop id"], ids=str
)
def test_a_broken_row_fails_alone(poison: str) -> None:
    logits = torch.stack([logits_at(kind, 0) for kind in range(len(KINDS))])
    sampler = Sampler(len(KINDS), VOCAB, CPU)
    expected = [alone(kind, 1)[0] for kind in range(len(KINDS))]
    for victim in range(len(KINDS)):
        for kind, params in enumerate(KINDS):
            sampler.admit(admit(kind, params, seed=kind, prompt=(1, 2, 3)))
        broken = logits.clone()
        if poison == "nan":
            broken[victim] = math.nan
        elif poison == "one nan":
            broken[victim, 77] = math.nan
        elif poison == "inf":
            broken[victim, 77] = math.inf
        elif poison == "all -inf":
            broken[victim] = NEG_INF
        else:
            broken[victim, STOP[0]] = math.nan
        sampled = sampler.sample(broken, list(range(len(KINDS))))
        assert sampled.tokens.dtype == torch.int64
        results = sampled.to_host()
        for kind, result in enumerate(results):
            if kind == victim:
                assert result.token == sampled.tokens[kind] == 0
                assert result.error is not None
                assert "non-finite logits" in result.error
                assert result.logprobs is None
            else:
                assert msgspec.structs.astuple(result) == expected[kind]


def test_no_token_left_is_an_error_of_that_row() -> None:
    logits = torch.full((1, VOCAB), NEG_INF)
    logits[0, STOP] = 1.0
    sampler = Sampler(1, VOCAB, CPU)
    sampler.admit(admit(0, SamplingParams(min_tokens=2)))
    (result,) = sampler.sample(logits, [0]).to_host()
    assert result.token == 0
    assert result.error is not None


def test_rows_with_most_tokens_impossible() -> None:
    logits = torch.full((VOCAB,), NEG_INF)
    logits[250] = -3.0
    for params in KINDS:
        if not params.logit_bias:
            assert sample_one(params, logits) == 250


def test_extreme_temperatures() -> None:
    logits = logits_at(0, 0)
    best = int(logits.argmax())
    for temperature in (1e-4, 1e-30, 1e-300):
        assert sample_one(SamplingParams(temperature=temperature), logits) == best
    hot = {sample_one(SamplingParams(temperature=100.0), logits, seed) for seed in range(60)}
    assert len(hot) > 40


def test_empty_batch_and_untouched_logits() -> None:
    sampler = Sampler(4, VOCAB, CPU)
    sampled = sampler.sample(torch.empty(0, VOCAB), [])
    assert sampled.tokens.shape == (0,)
    assert sampled.to_host() == []
    for slot in range(4):
        sampler.admit(admit(slot, KINDS[slot + 5], prompt=(1,)))
    logits = torch.randn(4, VOCAB)
    before = logits.clone()
    sampler.sample(logits, [0, 1, 2, 3])
    assert torch.equal(logits, before)


def test_wrong_logits_are_refused() -> None:
    sampler = Sampler(2, VOCAB, CPU)
    sampler.admit(admit(0, SamplingParams()))
    with pytest.raises(ValueError, match="float32"):
        sampler.sample(torch.zeros(1, VOCAB + 1), [0])
    with pytest.raises(ValueError, match="float32"):
        sampler.sample(torch.zeros(1, VOCAB, dtype=torch.bfloat16), [0])


def test_under_inference_mode() -> None:
    sampler = Sampler(len(KINDS), VOCAB, CPU)
    for kind, params in enumerate(KINDS):
        sampler.admit(admit(kind, params, seed=kind, prompt=(1, 2, 3)))
    logits = torch.stack([logits_at(kind, 0) for kind in range(len(KINDS))])
    with torch.inference_mode():
        results = sampler.sample(logits.clone(), list(range(len(KINDS)))).to_host()
    assert [msgspec.structs.astuple(r) for r in results] == [
        alone(k, 1)[0] for k in range(len(KINDS))
    ]


def test_no_step_depends_on_values(monkeypatch: pytest.MonkeyPatch) -> None:
    """A device without values stands in for an accelerator: reading one back would raise."""
    monkeypatch.setattr(Sampler, "_sampled", lambda self, tokens, *rest: tokens)
    sampler = Sampler(len(KINDS), VOCAB, torch.device("meta"))
    for kind, params in enumerate(KINDS):
        sampler.admit(admit(kind, params, seed=kind, prompt=(1, 2, 3)))
    for slots in (list(range(len(KINDS))), [2], [0], [5, 6]):
        tokens = sampler.sample(torch.empty(len(slots), VOCAB, device="meta"), slots)
        assert isinstance(tokens, Tensor)
        assert tokens.shape == (2, len(slots)), "tokens, and which rows are unusable"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_cuda_gives_the_same_tokens_without_a_wait() -> None:
    """Same noise and tokens as on CPU; neither `admit` nor `sample` synchronises."""
    results = []
    for device in (CPU, torch.device("cuda")):
        sampler = Sampler(len(KINDS), VOCAB, device)
        rows = torch.stack([logits_at(kind, 0) for kind in range(len(KINDS))]).to(device)
        torch.cuda.set_sync_debug_mode("error")
        try:
            for kind, params in enumerate(KINDS):
                sampler.admit(admit(kind, params, seed=kind, prompt=(1, 2, 3)))
            steps = [sampler.sample(rows, list(range(len(KINDS)))) for _ in range(20)]
        finally:
            torch.cuda.set_sync_debug_mode("default")
        results.append([[r.token for r in step.to_host()] for step in steps])
    assert results[0] == results[1]
