"""Compiles Triton kernels for Hopper where there is no GPU, and reads what came out."""

from __future__ import annotations

import re
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.experimental.gluon import language as gl
from triton.experimental.gluon._runtime import GluonASTSource
from triton.runtime import driver

TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"


class Hopper:
    """As much of a driver as a compilation asks for."""

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)


def gluon_descriptor(rows: int, columns: int) -> str:
    """The type of a Gluon descriptor of bfloat16 blocks."""
    layout = gl.NVMMASharedLayout.get_default_for([rows, columns], gl.bfloat16)
    return f"tensordesc<bf16[{rows},{columns}],{layout!r}>"


@dataclass(frozen=True)
class Compiled:
    """registers, local bytes (spills) and shared bytes of a kernel, its machine code, and what
    each of its reductions is over: shape, type and how that lies in threads."""

    registers: int
    local: int
    shared: int
    sass: str
    reductions: list[str]

    def count(self, word: str) -> int:
        """Lines of machine code that hold `word`."""
        return sum(word in line for line in self.sass.splitlines())

    def first(self, word: str) -> int:
        """The first line of machine code that holds `word`."""
        return next(i for i, line in enumerate(self.sass.splitlines()) if word in line)

    def last(self, word: str) -> int:
        """The last one."""
        lines = self.sass.splitlines()
        return len(lines) - 1 - next(i for i, line in enumerate(lines[::-1]) if word in line)


def compile_sm90(
    kernel: Any,
    args: dict[str, str],
    constants: dict[str, Any],
    unaligned: tuple[str, ...] = (),
    num_warps: int = 4,
    num_stages: int = 3,
    maxnreg: int | None = None,
) -> Compiled:
    """Args map names to Triton types ("*bf16", "i32", "fp32"); pointers and integers count as
    divisible by 16, as the launcher would find, except those in `unaligned`."""
    names = kernel.arg_names
    args = {n: t for n, t in args.items() if n not in constants}
    signature = {n: args.get(n, "constexpr") for n in names}
    aligned = [n for n, t in args.items() if (t[0] == "*" or t[0] == "i") and n not in unaligned]
    attrs = {(names.index(n),): [["tt.divisibility", 16]] for n in aligned}
    language = GluonASTSource if kernel.is_gluon() else ASTSource
    source = language(
        kernel, signature, {(names.index(n),): v for n, v in constants.items()}, attrs
    )
    options = {"num_warps": num_warps, "num_stages": num_stages, "maxnreg": maxnreg}
    before, driver._active = driver._active, Hopper()
    try:
        found = triton.compile(source, options=options)
    finally:
        driver._active = before
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        Path(file.name).write_bytes(found.asm["cubin"])
        usage = _run("cuobjdump", "-res-usage", file.name)
        sass = _run("cuobjdump", "-sass", file.name)
    registers, stack, local = (
        int(re.search(rf"{word}:(\d+)", usage)[1])  # type: ignore[index]
        for word in ("REG", "STACK", "LOCAL")
    )
    reductions = _reductions(found.asm["ttgir"])
    return Compiled(registers, stack + local, found.metadata.shared, sass, reductions)


def _reductions(text: str) -> list[str]:
    layouts = dict(re.findall(r"^(#\w+) = (#ttg.*)$", text, re.MULTILINE))
    found = re.findall(r'"tt\.reduce"[\s\S]*?: \(tensor<([^,>]+), (#\w+)>', text)
    return [f"{shape} {layouts[name]}" for shape, name in found]


def _run(tool: str, *args: str) -> str:
    done = subprocess.run([str(TOOLS / tool), *args], capture_output=True, text=True, check=True)
    return done.stdout
