"""Routing and routed experts, on tokens that all agree, all differ, or are alone."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from baton.config.model import MoEConfig
from baton.ops.moe import expert_mlp, expert_mlp_norm
from baton.ops.router import route


def one_by_one(x, experts, weights, gate_up, down) -> torch.Tensor:
    out = torch.zeros(x.shape[0], down.shape[1], dtype=torch.float64)
    for t in range(x.shape[0]):
        for expert, weight in zip(experts[t], weights[t], strict=True):
            gate, up = (gate_up[expert].double() @ x[t].double()).chunk(2)
            out[t] += weight * (down[expert].double() @ (F.silu(gate) * up))
    return out


CHOICES = {
    "mixed": torch.tensor([[0, 3], [3, 1], [6, 0], [1, 6], [0, 1]]),
    "one token": torch.tensor([[5, 2]]),
    "all to the same": torch.tensor([[4, 6]] * 9),
    "first and last": torch.tensor([[0, 6], [6, 0]]),
}


@pytest.mark.parametrize("case", CHOICES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("wide_combine", [True, False])
def test_experts_against_one_by_one(case: str, dtype: torch.dtype, wide_combine: bool) -> None:
    torch.manual_seed(0)
    experts = CHOICES[case]
    x = torch.randn(experts.shape[0], 10).to(dtype)
    gate_up, down = torch.randn(7, 12, 10).to(dtype), torch.randn(7, 10, 6).to(dtype)
    weights = torch.rand(experts.shape)
    out = expert_mlp(x, experts, weights, gate_up, down, wide_combine)
    want = one_by_one(x, experts, weights, gate_up, down)
    assert out.dtype == dtype
    tolerance = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 0.05}[dtype]
    assert (out - want).norm() <= tolerance * want.norm()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_experts_up_to_the_next_norm(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    experts = CHOICES["mixed"]
    x, residual, shared = torch.randn(3, experts.shape[0], 10).to(dtype)
    gate_up, down = torch.randn(7, 12, 10).to(dtype), torch.randn(7, 10, 6).to(dtype)
    weights, norm = torch.rand(experts.shape), torch.rand(10).to(dtype)
    parts = x, experts, weights, gate_up, down
    out, total = expert_mlp_norm(*parts, residual, norm, 1e-5, shared=shared)
    want = one_by_one(*parts) + shared.double() + residual.double()
    tolerance = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 0.05}[dtype]
    assert (total - want).norm() <= tolerance * want.norm()
    want = F.rms_norm(want, (10,), norm.double(), 1e-5)
    assert (out - want).norm() <= tolerance * want.norm()
    assert out.dtype == total.dtype == dtype


def test_bias_decides_the_choice_and_not_the_weight() -> None:
    logits = torch.tensor([[2.0, 1.0, 0.0, -1.0]])
    moe = MoEConfig(4, 2, 1, score="sigmoid", score_bias=True, normalise=False, scale=3.0)
    experts, weights = route(logits, torch.tensor([-9.0, 0.0, 0.0, 9.0]), moe)
    assert sorted(experts[0].tolist()) == [1, 3]
    assert torch.allclose(weights, 3 * logits.sigmoid().gather(1, experts))


@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
def test_normalised_weights_sum_to_the_scale(score: str) -> None:
    logits = torch.randn(6, 9, dtype=torch.float64)
    _, weights = route(logits, None, MoEConfig(9, 3, 1, score=score, scale=2.5))
    assert torch.allclose(weights.sum(-1), torch.full((6,), 2.5, dtype=torch.float64))


@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
def test_shared_experts_are_columns_behind_the_chosen_ones(score: str) -> None:
    logits = torch.randn(6, 9, dtype=torch.float64)
    base = {"num_experts": 9, "top_k": 3, "intermediate": 4, "score": score, "scale": 2.5}
    experts, weights = route(logits, None, MoEConfig(**base, shared_intermediate=8))
    assert (experts[:, 3:] == torch.tensor([9, 10])).all()
    assert (weights[:, 3:] == 1).all()
    # what is not made of whole experts has no columns
    for got, want in zip(
        (experts, weights),
        route(logits, None, MoEConfig(**base, shared_intermediate=6)),
        strict=True,
    ):
        assert torch.equal(got[:, :3], want)


def test_scores_that_vanish_do_not_divide_by_zero() -> None:
    moe = MoEConfig(3, 2, 1, score="sigmoid")
    _, weights = route(torch.full((1, 3), -200.0), None, moe)
    assert torch.equal(weights, torch.zeros(1, 2))


def test_groups_scored_by_best_or_by_two_best_differ() -> None:
    # group 0 has the best expert, group 1 the best pair
    logits = torch.tensor([[4.0, -9.0, 3.0, 3.0]]).log_softmax(-1)
    base = {"num_experts": 4, "top_k": 2, "intermediate": 1, "groups": 2, "top_groups": 1}
    best, _ = route(logits, None, MoEConfig(**base, group_score="max"))
    pair, _ = route(logits, None, MoEConfig(**base, group_score="top2"))
    assert sorted(best[0].tolist()) == [0, 1]
    assert sorted(pair[0].tolist()) == [0, 1]
    logits = torch.tensor([[1.0, -9.0, 0.9, 0.9]])
    pair, _ = route(logits, None, MoEConfig(**base, group_score="top2"))
    assert sorted(pair[0].tolist()) == [2, 3]


def test_negative_biased_scores_still_lose_to_chosen_groups() -> None:
    """An expert in a dropped group must not win against negative scores in a kept one."""
    moe = MoEConfig(4, 2, 1, score="sigmoid", groups=2, top_groups=1, group_score="top2")
    experts, _ = route(torch.zeros(1, 4), torch.tensor([-2.0, -2.0, -3.0, -3.0]), moe)
    assert sorted(experts[0].tolist()) == [0, 1]


@pytest.mark.parametrize("capability, taken", [((8, 9), False), ((9, 0), True), ((10, 0), False)])
def test_the_grouped_gemm_with_roles_is_for_hopper_alone(
    capability: tuple[int, int], taken: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("triton")
    from baton.ops.triton import moe_hopper

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    monkeypatch.setattr(moe_hopper, "_is_hopper", moe_hopper._is_hopper.__wrapped__)
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    many = torch.empty(moe_hopper.FROM + 1, 64, dtype=torch.bfloat16)
    assert moe_hopper.supports(many, 1, 1) is taken
