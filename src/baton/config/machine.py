"""What this machine is: cores, memory and devices, as this process may use them."""

from __future__ import annotations

import contextlib
import math
import os
import platform
from collections.abc import Iterator
from pathlib import Path

from baton.config.engine import Machine
from baton.core.errors import ConfigError


def measure_machine(device: str = "auto") -> Machine:
    """Measure once, before `resolve()`. Memory in bytes, as available now.

    Args:
        device: "cpu", "cuda", or "auto" for CUDA when a CUDA device is present.

    Raises:
        ConfigError: CUDA was asked for and torch sees no CUDA device.
    """
    cores, memory = usable_cores(), available_memory()
    if device != "cpu":
        machine = _measure_cuda(cores, memory)
        if machine is not None:
            return machine
        if device == "cuda":
            raise ConfigError("--device cuda: torch sees no CUDA device here; use --device cpu")
    return Machine("cpu", _cpu_name(), cores, memory, device_memory=memory)


def _measure_cuda(cores: int, memory: int) -> Machine | None:
    import torch

    if not torch.cuda.is_available():
        return None
    free, _total = torch.cuda.mem_get_info()
    return Machine(
        "cuda",
        torch.cuda.get_device_name(),
        cores,
        memory,
        device_memory=free,
        num_devices=torch.cuda.device_count(),
    )


def usable_cores(root: Path = Path("/")) -> int:
    """Cores of this process: its affinity mask, cut to its control groups' CPU quota."""
    try:
        cores = len(os.sched_getaffinity(0))
    except AttributeError:  # not Linux
        cores = os.cpu_count() or 1
    for group in _groups(root, "cpu"):
        quota = _cpu_quota(group)
        if quota is not None:
            cores = min(cores, max(1, math.ceil(quota)))
    return cores


def available_memory(root: Path = Path("/")) -> int:
    """Bytes this process can still take: free memory, cut to what its control groups leave."""
    available = _host_memory(root)
    for group in _groups(root, "memory"):
        left = _memory_left(group)
        if left is not None:
            available = min(available, left)
    return max(available, 0)


def _groups(root: Path, controller: str) -> Iterator[Path]:
    """Folders of this process's control groups (versions 2 and 1), innermost first."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        number, names, path = line.split(":", 2)
        if number == "0":
            base = root / "sys/fs/cgroup"
        elif controller in names.split(","):
            base = root / "sys/fs/cgroup" / controller
        else:
            continue
        inner = base / path.lstrip("/")
        yield inner
        while inner != base and base in inner.parents:
            inner = inner.parent
            yield inner


def _read(path: Path) -> str | None:
    with contextlib.suppress(OSError):
        return path.read_text().strip()
    return None


def _cpu_quota(group: Path) -> float | None:
    text = _read(group / "cpu.max")
    if text is None:
        quota, period = _read(group / "cpu.cfs_quota_us"), _read(group / "cpu.cfs_period_us")
        text = f"{quota} {period}" if quota and period else "max"
    quota, _, period = text.partition(" ")
    if quota in {"max", "-1"}:
        return None
    return int(quota) / int(period or 100_000)


def _memory_left(group: Path) -> int | None:
    for limit_name, used_name, cache_key in (
        ("memory.max", "memory.current", "inactive_file"),
        ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    ):
        limit, used = _read(group / limit_name), _read(group / used_name)
        if limit is None or used is None or limit == "max":
            continue
        return int(limit) - int(used) + _stat(group / "memory.stat", cache_key)
    return None


def _stat(path: Path, key: str) -> int:
    """One value of a `memory.stat` file: page cache that the kernel gives back when asked."""
    for line in (_read(path) or "").splitlines():
        name, _, value = line.partition(" ")
        if name == key:
            return int(value)
    return 0


def _host_memory(root: Path) -> int:
    for line in (_read(root / "proc/meminfo") or "").splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _cpu_name() -> str:
    for line in (_read(Path("/proc/cpuinfo")) or "").splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
