"""Kernels are compiled once each, by other threads, and launched by nobody."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch

pytest.importorskip("triton")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("kernels are interpreted in this process", allow_module_level=True)

import triton
import triton.language as tl
from triton.runtime import driver

from baton.ops.precompile import precompiling
from helpers.sm90 import Hopper


@triton.jit
def _double(x, out, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(out + i, tl.load(x + i) * 2)


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> Iterator[list[str]]:
    """Threads that compiled a kernel."""
    found: list[str] = []
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(driver, "_active", Hopper())
    triton.knobs.compilation.listener = lambda **_: found.append(threading.current_thread().name)
    yield found
    triton.knobs.compilation.listener = None


def test_kernels_are_compiled_and_not_launched(compiled: list[str]) -> None:
    run = triton.JITFunction.run
    with torch.inference_mode(), precompiling():
        for _ in range(5):
            for n in (16, 32, 64):
                x, out = torch.ones(n), torch.empty(n)
                _double[(1,)](x, out, N=n)
                assert not out.any()  # zeros: what follows may use it as an index
    assert len(compiled) == 3
    assert threading.current_thread().name not in compiled
    assert triton.JITFunction.run is run
    kernels = list(_double.device_caches[0][0].values())
    assert len(kernels) == 3
    assert all(isinstance(kernel, triton.compiler.CompiledKernel) for kernel in kernels)


def test_an_error_leaves_launches_as_they_were(compiled: list[str]) -> None:
    run = triton.JITFunction.run
    with pytest.raises(ZeroDivisionError), precompiling():
        raise ZeroDivisionError
    assert triton.JITFunction.run is run
