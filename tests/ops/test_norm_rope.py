"""Norms and rotary positions against their formulas and against transformers."""

from __future__ import annotations

import pytest
import torch
import transformers
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from baton.config.model import RopeConfig
from baton.ops.norm import add_rms_norm, rms_norm
from baton.ops.rope import apply_rope, attention_scaling, inverse_frequencies, yarn_mscale


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(1, 1), (3, 7), (2, 5, 96)])
def test_rms_norm(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    x, weight = (torch.randn(shape) * 50).to(dtype), torch.rand(shape[-1]).to(dtype)
    wide = x.double()
    want = wide / (wide.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * weight.double()
    out = rms_norm(x, weight, 1e-5)
    assert out.dtype == dtype
    assert torch.allclose(out.double(), want, rtol=4 * torch.finfo(dtype).eps, atol=1e-7)


def test_float64_norm_is_not_rounded_to_float32() -> None:
    x = torch.randn(4, 33, dtype=torch.float64)
    want = x / (x.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt()
    assert (rms_norm(x, torch.ones(33, dtype=torch.float64), 1e-6) - want).abs().max() < 1e-14


def test_a_large_half_width_value_does_not_overflow_the_square() -> None:
    x = torch.full((1, 8), 60000.0, dtype=torch.float16)
    assert torch.allclose(rms_norm(x, torch.ones(8).half(), 1e-6), torch.ones(1, 8).half())


def test_add_rms_norm_is_the_norm_of_the_sum() -> None:
    x, residual, weight = torch.randn(3, 8), torch.randn(3, 8), torch.rand(8)
    normed, total = add_rms_norm(x, residual, weight, 1e-5)
    assert torch.equal(total, x + residual)
    assert torch.equal(normed, rms_norm(x + residual, weight, 1e-5))


YARN = {"factor": 40.0, "original_max_position_embeddings": 4096.0}
ROPES = {
    "linear": {"factor": 4.0},
    "llama3": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
    "yarn": YARN,
    "yarn mscale": YARN | {"mscale": 1.0, "mscale_all_dim": 0.7, "beta_fast": 16.0},
    "yarn factor": YARN | {"attention_factor": 1.3, "truncate": False},
    "yarn one mscale": YARN | {"mscale": 0.7},
    "yarn degenerate": {"factor": 4.0, "original_max_position_embeddings": 1.0},
}


@pytest.mark.parametrize("case", ROPES)
def test_frequencies_are_those_of_transformers(case: str) -> None:
    kind = case.split()[0]
    config = transformers.LlamaConfig(
        head_dim=64,
        max_position_embeddings=163840,
        rope_parameters=ROPES[case] | {"rope_type": kind, "rope_theta": 5e5},
    )
    want, want_scaling = ROPE_INIT_FUNCTIONS[kind](config, "cpu")
    rope = RopeConfig(64, 5e5, kind, scaling={k: float(v) for k, v in ROPES[case].items()})
    assert torch.allclose(inverse_frequencies(rope, torch.float32), want, rtol=1e-5, atol=0)
    assert attention_scaling(rope) == pytest.approx(want_scaling)


def test_nothing_is_stretched_below_factor_one() -> None:
    assert yarn_mscale(1.0, 0.7) == 1.0


def test_unknown_kind() -> None:
    with pytest.raises(ValueError, match="dynamic"):
        inverse_frequencies(RopeConfig(8, kind="dynamic"), torch.float32)


@pytest.mark.parametrize("interleaved", [False, True])
def test_rotation_is_a_complex_product(interleaved: bool) -> None:
    torch.manual_seed(0)
    x, angles = torch.randn(5, 3, 8, dtype=torch.float64), torch.randn(5, 4, dtype=torch.float64)
    out = apply_rope(x, angles.cos(), angles.sin(), interleaved)

    def pairs(t: torch.Tensor) -> torch.Tensor:
        if interleaved:
            return torch.complex(t[..., 0::2], t[..., 1::2])
        return torch.complex(t[..., :4], t[..., 4:])

    want = pairs(x) * torch.polar(torch.ones_like(angles), angles)[:, None]
    assert torch.allclose(pairs(out), want)


def test_half_width_input_is_rotated_in_float32() -> None:
    x, angles = torch.randn(2, 1, 4).bfloat16(), torch.randn(2, 2)
    out = apply_rope(x, angles.cos(), angles.sin(), False)
    want = apply_rope(x.float(), angles.cos(), angles.sin(), False)
    assert torch.equal(out, want.bfloat16())
