"""Reasons that several GPU backends share."""

from __future__ import annotations

import importlib.util

import torch

from baton.attention.spec import AttentionNeed


def against_cuda(
    need: AttentionNeed,
    capability: tuple[int, int],
    dtypes: tuple[torch.dtype, ...],
    *packages: str,
    newest: int | None = None,
) -> list[str]:
    """What speaks against a kernel library: device, its age, dtype, packages not installed.

    Args:
        capability: the oldest compute capability that will do.
        newest: the last major one, if instructions of it are used that later ones lack.
    """
    reasons = []
    if need.device.type != "cuda":
        reasons.append(f"needs a CUDA device, this is {need.device.type}")
    elif torch.cuda.is_available():
        found = torch.cuda.get_device_capability(need.device)
        if found < capability:
            reasons.append(
                f"needs compute capability {capability[0]}.{capability[1]}, "
                f"this is {found[0]}.{found[1]}"
            )
        elif newest is not None and found[0] > newest:
            reasons.append(
                f"is made for compute capability {newest}.x, this is {found[0]}.{found[1]}"
            )
    if need.dtype not in dtypes:
        names = " or ".join(str(d).removeprefix("torch.") for d in dtypes)
        reasons.append(f"needs {names}, the model is {str(need.dtype).removeprefix('torch.')}")
    for package in packages:
        if not _importable(package):
            reasons.append(f"package {package!r} is not installed")
    return reasons


def _importable(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # a parent package is missing
        return False
