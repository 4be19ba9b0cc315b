"""The sampling operations against float64 references, transformers, and statistics."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from transformers import (
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from baton.ops import sample as ops

NEG_INF = float("-inf")
KNOWN_KEYS = [[2065550767, -501176263], [-1550686894, 656671904], [-1243059117, 928350206]]
KNOWN_NOISE = [-0.708585, 2.5523683, -0.8591815]
NO_IDS = torch.zeros(1, 1, dtype=torch.int64)


def logits_of(rows: int, vocab: int, scale: float = 3.0, seed: int = 0) -> Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * scale


def run_filter(
    logits: Tensor, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0
) -> Tensor:
    """All filters with the same parameters for every row; the filtered, shifted logits."""
    rows, vocab = logits.shape
    k = top_k if 0 < top_k < vocab else vocab
    x = ops.temper(logits, logits.amax(1), torch.full((rows,), temperature, dtype=torch.float64))
    ops.filter_min_p(x, torch.full((rows,), min_p, dtype=torch.float64).log())
    if k < vocab or top_p < 1:
        ops.filter_top(
            x,
            torch.full((rows,), k),
            torch.full((rows,), top_p, dtype=torch.float64),
            widest=k if k < vocab else 0,
            nucleus=top_p < 1,
            open_nucleus=top_p < 1 and k == vocab,
        )
    return x


def reference_kept(
    row: Tensor, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0
) -> set[int]:
    """The kept ids by the definitions, token by token in Python floats."""
    best = row.max().item()
    values = [(v - best) / temperature for v in row.tolist()]
    weight = {i: math.exp(v) for i, v in enumerate(values) if math.exp(v) >= min_p}
    order = sorted(weight, key=lambda i: (-values[i], i))
    if 0 < top_k < len(order):
        order = [i for i in order if values[i] >= values[order[top_k - 1]]]
    total = math.fsum(weight[i] for i in order)
    kept: set[int] = set()
    mass = 0.0
    for i in order:
        if kept and mass >= top_p * total:
            break
        kept.add(i)
        mass += weight[i]
    return kept


def kept(x: Tensor) -> list[set[int]]:
    return [set((row > NEG_INF).nonzero().flatten().tolist()) for row in x]


CASES = [
    {"top_k": 1},
    {"top_k": 7},
    {"top_k": 5000},
    {"top_p": 0.9},
    {"top_p": 0.999},
    {"top_p": 1e-9},
    {"min_p": 0.05},
    {"min_p": 1.0},
    {"top_k": 40, "top_p": 0.8},
    {"top_k": 40, "top_p": 0.8, "min_p": 0.02, "temperature": 1.7},
    {"top_k": 700, "top_p": 0.95, "temperature": 0.3},
    {"top_p": 0.5, "temperature": 1e-4},
    {"top_p": 0.5, "temperature": 100.0},
]


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("vocab", [1, 2, 1001, 12289])
def test_filters_keep_what_the_definitions_say(case: dict[str, float], vocab: int) -> None:
    logits = logits_of(3, vocab)
    x = run_filter(logits, **case)  # type: ignore[arg-type]
    assert kept(x) == [reference_kept(row, **case) for row in logits]  # type: ignore[arg-type]


@pytest.mark.parametrize("case", [c for c in CASES if c.get("top_p") != 1e-9], ids=str)
def test_filters_match_transformers(case: dict[str, float]) -> None:
    logits = logits_of(4, 4001, seed=3)
    expected = TemperatureLogitsWarper(float(case.get("temperature", 1.0)))(NO_IDS, logits.clone())
    if "min_p" in case:  # vLLM's order: min-p before top-k and top-p
        expected = MinPLogitsWarper(case["min_p"])(NO_IDS, expected)
    if "top_k" in case:
        expected = TopKLogitsWarper(int(case["top_k"]))(NO_IDS, expected)
    if "top_p" in case:
        expected = TopPLogitsWarper(case["top_p"])(NO_IDS, expected)
    x = run_filter(logits, **case)  # type: ignore[arg-type]
    assert kept(x) == kept(expected)
    torch.testing.assert_close(
        x.double().softmax(1), expected.double().softmax(1), atol=1e-6, rtol=1e-5
    )


def test_ties() -> None:
    logits = torch.tensor([[1.0, 3.0, 2.0, 3.0, 2.0, 2.0, 0.0]]).repeat(2, 1)
    assert kept(run_filter(logits, top_k=3))[0] == {1, 3, 2, 4, 5}  # ties at the k-th place stay
    assert kept(run_filter(logits, top_k=2, top_p=0.5))[0] == {1}  # lowest index among equals
    assert kept(run_filter(logits, top_k=3, top_p=0.8))[0] == reference_kept(
        logits[0], top_k=3, top_p=0.8
    )
    equal = torch.zeros(2, 1000)
    assert kept(run_filter(equal, top_p=0.3)) == [set(range(300))] * 2
    assert kept(run_filter(equal, top_k=5)) == [set(range(1000))] * 2
    assert kept(run_filter(equal, top_k=5, top_p=0.25)) == [set(range(250))] * 2
    assert kept(run_filter(equal, min_p=1.0)) == [set(range(1000))] * 2


def test_coarse_logits_with_many_ties() -> None:
    logits = logits_of(6, 997, scale=1.0).mul(2).round()
    for case in ({"top_p": 0.6}, {"top_k": 50, "top_p": 0.7}, {"top_k": 3, "top_p": 0.9}):
        expected = [reference_kept(row, **case) for row in logits]  # type: ignore[arg-type]
        assert kept(run_filter(logits, **case)) == expected  # type: ignore[arg-type]


def test_only_one_token_allowed() -> None:
    logits = torch.full((1, 513), NEG_INF)
    logits[0, 400] = -7.0
    for case in CASES:
        assert kept(run_filter(logits, **case)) == [{400}]  # type: ignore[arg-type]


def test_partial_and_full_sort_agree() -> None:
    logits = logits_of(5, 20000)
    partial = run_filter(logits, top_p=0.7)
    x = ops.temper(logits, logits.amax(1), torch.ones(5))
    full = ops._ranked(x, 20000)
    assert torch.equal(full, x.sort(descending=True).values)
    ops._filter_nucleus(x, full, torch.full((5,), 0.7, dtype=torch.float64), may_widen=False)
    assert torch.equal(partial, x)


def test_mixed_parameters_in_one_batch() -> None:
    logits = logits_of(4, 9001)
    cases = [{"top_k": 5}, {"top_p": 0.6}, {"top_k": 300, "top_p": 0.9}, {}]
    x = ops.temper(logits, logits.amax(1), torch.ones(4))
    ops.filter_top(
        x,
        torch.tensor([5, 9001, 300, 9001]),
        torch.tensor([1.0, 0.6, 0.9, 1.0], dtype=torch.float64),
        widest=300,
        nucleus=True,
        open_nucleus=True,
    )
    assert kept(x) == [
        reference_kept(row, **case)  # type: ignore[arg-type]
        for row, case in zip(logits, cases, strict=True)
    ]


# ------------------------------------------------------------------------------ penalties, logprobs


def test_repetition_penalty_matches_transformers() -> None:
    logits = logits_of(2, 301)
    ids = torch.randint(0, 301, (2, 50), generator=torch.Generator().manual_seed(1))
    counts = torch.zeros(2, 301, dtype=torch.int32)
    in_prompt = torch.zeros(2, 301, dtype=torch.bool).scatter_(1, ids, True)
    zero = torch.zeros(2)
    got = ops.penalise(logits, counts, in_prompt, torch.full((2,), 1.3), zero, zero)
    expected = RepetitionPenaltyLogitsProcessor(1.3)(ids, logits)
    torch.testing.assert_close(got, expected)


def test_presence_and_frequency_look_at_the_output_only() -> None:
    logits = torch.tensor([[2.0, -2.0, 1.0, NEG_INF]])
    counts = torch.tensor([[0, 3, 1, 0]], dtype=torch.int32)
    in_prompt = torch.tensor([[True, False, False, True]])
    got = ops.penalise(
        logits, counts, in_prompt, torch.tensor([2.0]), torch.tensor([0.5]), torch.tensor([0.25])
    )
    expected = [[1.0, -4.0 - 0.5 - 0.75, 0.5 - 0.5 - 0.25, NEG_INF]]
    torch.testing.assert_close(got, torch.tensor(expected))


def test_token_logprobs() -> None:
    logits = logits_of(3, 777)
    tokens = torch.tensor([5, int(logits[1].argmax()), 776])
    got = ops.token_logprobs(logits, tokens, 20)
    expected = logits.double().log_softmax(1)
    chosen = expected.gather(1, tokens[:, None])
    torch.testing.assert_close(got.chosen.double(), chosen[:, 0], atol=1e-5, rtol=0)
    assert got.rank.tolist() == ((expected > chosen).sum(1) + 1).tolist()
    assert got.rank[1] == 1
    best = expected.topk(20)
    assert torch.equal(got.top_ids, best.indices)
    torch.testing.assert_close(got.top.double(), best.values, atol=1e-5, rtol=0)


def test_token_logprobs_ties_and_edges() -> None:
    got = ops.token_logprobs(torch.zeros(1, 9), torch.tensor([7]), 4)
    assert got.top_ids.tolist() == [[0, 1, 2, 3]]
    assert got.rank.tolist() == [1]
    assert ops.token_logprobs(torch.zeros(1, 9), torch.tensor([7]), 0).top_ids.shape == (1, 0)
    assert ops.token_logprobs(torch.zeros(1, 3), torch.tensor([2]), 20).top_ids.shape == (1, 3)
    logits = torch.tensor([[NEG_INF, -0.0, 0.0, -1.0]])
    assert ops.token_logprobs(logits, torch.tensor([3]), 4).top_ids.tolist() == [[1, 2, 3, 0]]


# -------------------------------------------------------------------------------------- randomness


def keys_of(seeds: int, counts: int) -> Tensor:
    seed = torch.arange(seeds).repeat_interleave(counts)
    return ops.row_keys(seed, torch.arange(counts).repeat(seeds))


def chi_square(observed: Tensor, expected: Tensor) -> float:
    """How many standard deviations the statistic lies above its mean (about normal)."""
    freedom = observed.numel() - 1
    statistic = ((observed - expected) ** 2 / expected).sum().item()
    return (statistic - freedom) / math.sqrt(2 * freedom)


def test_noise_known_values() -> None:
    """The noise is part of the contract: the same seed must give the same text in any version."""
    keys = ops.row_keys(torch.tensor([0, 42, -1]), torch.tensor([0, 7, 10**6]))
    assert keys.tolist() == KNOWN_KEYS
    got = ops.gumbel(keys, torch.tensor([0, 1, 49151], dtype=torch.int32))
    torch.testing.assert_close(got, torch.tensor(KNOWN_NOISE), atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("along", ["vocabulary", "count", "seed"])
def test_noise_is_uniform_and_uncorrelated(along: str) -> None:
    """exp(-exp(-g)) is uniform (Kolmogorov-Smirnov, chi-square), with no serial correlation."""
    n = 100_000
    zero = torch.zeros(n, dtype=torch.int32)
    if along == "vocabulary":
        noise = ops.gumbel(keys_of(1, 1), torch.arange(n, dtype=torch.int32))
    else:
        noise = ops.gumbel(keys_of(1, n) if along == "count" else keys_of(n, 1), zero)
    assert noise.isfinite().all()
    u = (-(-noise.double()).exp()).exp()
    distance = (u.sort().values - (torch.arange(n) + 0.5) / n).abs().max().item()
    assert distance * math.sqrt(n) < 1.95  # p = 0.001
    bins = torch.histc(u.float(), 256, 0, 1)
    assert abs(chi_square(bins, torch.full((256,), n / 256))) < 4
    centred = u - 0.5
    for lag in (1, 2, 3, 64, 128):
        correlation = (centred[lag:] * centred[:-lag]).mean().item() * 12
        assert abs(correlation) * math.sqrt(n) < 4
    pairs = (u[:-1] * 16).long() * 16 + (u[1:] * 16).long()
    assert abs(chi_square(pairs.bincount(minlength=256).float(), torch.tensor(n / 256.0))) < 4


def test_noise_tail() -> None:
    """Large noise decides at large vocabularies: P(g > t) must hold far out."""
    keys = keys_of(20, 20)
    noise = ops.gumbel(keys[:, None, :], torch.arange(25_000, dtype=torch.int32))
    for level in (4.0, 8.0, 11.0):
        expected = noise.numel() * -math.expm1(-math.exp(-level))
        assert abs((noise > level).sum().item() - expected) < 5 * math.sqrt(expected)
    assert noise.min() > -2.9
    assert noise.max() < ops._NOISE_SPAN - 2.9


@pytest.mark.parametrize("vary", ["count", "seed"])
def test_draws_follow_the_distribution(vary: str) -> None:
    """Chi-square over 20000 draws: successive tokens of one seed, first tokens of many seeds."""
    n, vocab = 20_000, 50
    logits = logits_of(1, vocab, scale=1.0)
    keys = keys_of(1, n) if vary == "count" else keys_of(n, 1)
    tokens = ops.draw((logits - logits.amax()).repeat(n, 1), keys)
    expected = logits[0].double().softmax(0) * n
    assert abs(chi_square(tokens.bincount(minlength=vocab).double(), expected)) < 4


def test_draws_from_a_filtered_distribution() -> None:
    n = 20_000
    logits = logits_of(1, 200, scale=1.5)
    x = run_filter(logits, temperature=0.8, top_k=30, top_p=0.9)
    tokens = ops.draw(x.repeat(n, 1), keys_of(1, n))
    ids = sorted(reference_kept(logits[0], temperature=0.8, top_k=30, top_p=0.9))
    observed = tokens.bincount(minlength=200).double()
    assert observed[ids].sum() == n
    expected = (logits[0, ids].double() / 0.8).softmax(0) * n
    assert abs(chi_square(observed[ids], expected)) < 4


def test_draw_with_few_candidates_equals_the_dense_draw() -> None:
    x = logits_of(16, 3001, scale=30.0)
    x -= x.amax(1, keepdim=True)
    keys = keys_of(4, 4)
    dense = x + ops.gumbel(keys[:, None, :], torch.arange(3001, dtype=torch.int32))
    assert torch.equal(ops.draw(x, keys), dense.argmax(1))


def test_huge_flat_vocabulary_is_drawn_evenly() -> None:
    tokens = ops.draw(torch.zeros(400, 50_000), keys_of(20, 20))
    quarters = (tokens // 12_500).bincount(minlength=4).float()
    assert abs(chi_square(quarters, torch.full((4,), 100.0))) < 4
    assert tokens.unique().numel() > 390
