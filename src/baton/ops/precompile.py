"""Compiles the Triton kernels of a piece of code all at once, before it runs for the first time.

Triton compiles a kernel when it is launched and the launch waits for it, so a first step costs the
sum of its kernels. Most of a compilation is outside Python's lock, in LLVM and `ptxas`. So is
what a first launch adds to it: a C module that launches kernels of this signature, from a C
compiler, and loading both.
"""

from __future__ import annotations

import os
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from baton.ops.dispatch import has_triton

_THREADS = 16
#: Of engines that start at once, one at a time replaces Triton's launch: the next one would take
#: the replacement for Triton's own, and put that back for good.
_PATCH = threading.Lock()


def wake_compiler() -> None:
    """Compile one small kernel, where there is a GPU: compilers are read from the disk and look
    at themselves (Triton hashes 0.4 GB) before the first one, while a start waits for other things.
    """
    if has_triton() and torch.cuda.is_available():
        from baton.ops.triton.activation import compile_one

        with suppress(Exception):  # who needs a kernel will meet it, too
            compile_one()


class _Zeros(TorchFunctionMode):
    """New tensors are zeros: what a kernel that did not run leaves may be used as an index. (A
    dispatch mode would see those of torch's own operations, too, and import torch's compiler.)"""

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        if "empty" in getattr(func, "__name__", ""):
            out.zero_()
        return out


@contextmanager
def precompiling() -> Iterator[None]:
    """Inside, no Triton kernel of this thread runs: those not known yet are compiled and loaded by
    other threads, and everything else computes on zeros in their place. At the end all are ready to
    be launched on the current device. Of several threads, one at a time is inside.
    """
    if not has_triton():
        yield
        return
    import triton
    from triton.runtime import driver

    ours = threading.get_ident()
    first = defaultdict[str, threading.Lock](threading.Lock)

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        warmup = warmup or threading.get_ident() == ours
        return launch(self, *args, grid=grid, warmup=warmup, **kwargs)

    class Compiling(triton.AsyncCompileMode):  # type: ignore[misc]
        def submit(self, key: str, compile_fn: Any, finalize_fn: Callable[[Any], None]) -> Any:
            def ready() -> Any:
                kernel = compile_fn()
                with first[kernel.name]:  # makes the C module for all that are called the same
                    kernel._init_handles()  # what else a first launch would do
                return kernel

            known = key in self.future_kernels
            kernel = super().submit(key, ready, finalize_fn)
            if not known:  # found at once by the next launch, instead of being keyed again
                finalize_fn(kernel)
            return kernel

    threads, gpu = min(_THREADS, os.cpu_count() or 1), driver.active
    current = (gpu.get_current_device(),)  # each thread has its own, the first one as a rule
    with (
        _PATCH,
        ThreadPoolExecutor(threads, "compile", gpu.set_current_device, current) as pool,
        Compiling(pool),
    ):
        launch = triton.JITFunction.run
        triton.JITFunction.run = compile_only
        try:
            with _Zeros():
                yield
        finally:
            triton.JITFunction.run = launch
