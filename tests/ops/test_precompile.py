"""Kernels are compiled once each, by other threads, and launched by nobody."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("kernels are interpreted in this process", allow_module_level=True)

import triton
import triton.language as tl
from triton.runtime import driver

from baton.ops.precompile import precompiling, wake_compiler
from helpers.sm90 import Hopper


@triton.jit
def _double(x, out, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(out + i, tl.load(x + i) * 2)


class Card(Hopper):
    """Notes what is loaded, by device and thread, and the grids of what is launched."""

    def __init__(self) -> None:
        self.current, self.loaded = threading.local(), list[tuple[int, str]]()
        self.launched: list[tuple[int, int, int]] = []
        self.making, self.meanwhile = threading.Lock(), lambda: None
        self.current.device = 1
        self.utils = self  # methods of both are called here

    def get_current_device(self) -> int:
        return self.current.device  # of the thread, as in CUDA

    def set_current_device(self, device: int) -> None:
        self.current.device = device

    def get_device_properties(self, device: int) -> dict[str, int]:
        return {"max_shared_mem": 232448}

    def launcher_cls(self, source: Any, metadata: Any) -> Any:
        assert self.making.acquire(blocking=False), "a C module is made twice"
        self.meanwhile()
        self.making.release()
        return lambda x, y, z, *_: self.launched.append((x, y, z))

    def load_binary(self, name: str, code: bytes, shared: int, device: int) -> tuple[Any, ...]:
        self.loaded.append((device, threading.current_thread().name))
        return "module", "function", 32, 0, 1024


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> Card:
    found = Card()
    monkeypatch.setattr(driver, "_active", found)
    return found


@pytest.fixture
def compiled(card: Card, monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> Iterator[list[str]]:
    """Threads that compiled a kernel."""
    found: list[str] = []
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    triton.knobs.compilation.listener = lambda **_: found.append(threading.current_thread().name)
    yield found
    triton.knobs.compilation.listener = None


def test_kernels_are_compiled_and_not_launched(compiled: list[str], card: Card) -> None:
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
    kernels = list(_double.device_caches[1][0].values())
    assert len(kernels) == 3
    assert all(isinstance(kernel, triton.compiler.CompiledKernel) for kernel in kernels)
    # Ready to be launched: each was loaded once, where it was compiled, on this thread's device.
    assert all(kernel.module == "module" and kernel._run is not None for kernel in kernels)
    assert sorted(card.loaded) == sorted((1, name) for name in compiled)


def test_other_threads_launch_meanwhile(compiled: list[str], card: Card) -> None:
    def launch() -> None:
        card.set_current_device(1)
        _double[(2, 3)](torch.ones(128), torch.empty(128), N=128)

    with precompiling():
        _double[(1,)](torch.ones(64), torch.empty(64), N=64)
        assert card.launched == []
        thread = threading.Thread(target=launch)
        thread.start()
        thread.join()
    assert card.launched == [(2, 3, 1)]


def test_a_compiler_is_woken_by_a_kernel_that_does_not_run(
    compiled: list[str], card: Card, monkeypatch: pytest.MonkeyPatch
) -> None:
    wake_compiler()
    assert compiled == [], "there is no GPU here"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr("baton.ops.triton.activation.overlapping", lambda: True)
    wake_compiler()
    assert compiled == [threading.current_thread().name]
    assert card.loaded == card.launched == []


def test_of_kernels_called_the_same_one_is_made_ready_at_a_time(
    compiled: list[str], card: Card
) -> None:
    def wait() -> None:
        end = time.monotonic() + 5
        while len(compiled) < 2 and time.monotonic() < end:
            time.sleep(0.01)
        time.sleep(0.1)  # for a second one to come in

    card.meanwhile = wait
    with precompiling():
        for n in (256, 512):
            _double[(1,)](torch.ones(n), torch.empty(n), N=n)
    assert len(card.loaded) == 2


def test_two_at_once_leave_launches_as_they_were(compiled: list[str], card: Card) -> None:
    run, inside = triton.JITFunction.run, threading.Event()

    def other() -> None:
        card.set_current_device(1)
        with precompiling():
            inside.set()

    thread = threading.Thread(target=other)
    with precompiling():
        thread.start()
        assert not inside.wait(0.5)
    thread.join(30)
    assert inside.is_set()
    assert triton.JITFunction.run is run


def test_an_error_leaves_launches_as_they_were(compiled: list[str]) -> None:
    run = triton.JITFunction.run
    with pytest.raises(ZeroDivisionError), precompiling():
        raise ZeroDivisionError
    assert triton.JITFunction.run is run


def test_it_does_not_import_torch_s_compiler(tmp_path: Path) -> None:
    code = (
        "import sys, torch\n"
        "from ops.test_precompile import Card, _double\n"
        "from triton.runtime import driver\n"
        "from baton.ops.precompile import precompiling\n"
        "driver._active = Card()\n"
        "with torch.inference_mode(), precompiling():\n"
        "    _double[(1,)](torch.ones(16), torch.empty(16), N=16)\n"
        "print(*(name for name in ('sympy', 'torch._dynamo') if name in sys.modules))"
    )
    path = os.pathsep.join(sys.path)
    found = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | {"PYTHONPATH": path, "TRITON_CACHE_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    assert found.stdout.strip() == ""
