"""Activation, dtypes, host memory."""

from __future__ import annotations

import sys

import pytest
import torch

from baton.ops.activation import silu_mul
from baton.ops.dtypes import torch_dtype, wide
from baton.ops.host import keep_freed_memory


def test_silu_mul() -> None:
    x = torch.randn(3, 10, dtype=torch.float64)
    gate, up = x[:, :5], x[:, 5:]
    assert torch.allclose(silu_mul(x), gate / (1 + (-gate).exp()) * up)


def test_dtypes() -> None:
    assert torch_dtype("bfloat16") == torch_dtype(torch.bfloat16) == torch.bfloat16
    assert wide(torch.float64) == torch.float64
    assert wide(torch.float16) == torch.float32
    with pytest.raises(ValueError, match="int8"):
        torch_dtype("int8")


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="glibc only")
def test_freed_memory_can_be_kept() -> None:
    assert keep_freed_memory() in (True, False)  # False under another C library
