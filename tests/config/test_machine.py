"""Machine facts come from the control group when it is tighter than the host."""

from __future__ import annotations

from pathlib import Path

import pytest

from baton.config.machine import available_memory, measure_machine, usable_cores
from baton.core.errors import ConfigError


def tree(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def test_version_2_takes_the_tightest_level(tmp_path: Path) -> None:
    root = tree(
        tmp_path,
        {
            "proc/self/cgroup": "0::/outer/inner\n",
            "proc/meminfo": "MemTotal: 99 kB\nMemAvailable: 8388608 kB\n",
            "sys/fs/cgroup/outer/cpu.max": "100000 100000\n",
            "sys/fs/cgroup/outer/inner/cpu.max": "max 100000\n",
            "sys/fs/cgroup/outer/memory.max": "3000000\n",
            "sys/fs/cgroup/outer/memory.current": "1000000\n",
            "sys/fs/cgroup/outer/memory.stat": "anon 5\ninactive_file 500000\n",
            "sys/fs/cgroup/outer/inner/memory.max": "max\n",
            "sys/fs/cgroup/outer/inner/memory.current": "7\n",
        },
    )
    assert usable_cores(root) == 1
    assert available_memory(root) == 2_500_000


def test_version_1(tmp_path: Path) -> None:
    root = tree(
        tmp_path,
        {
            "proc/self/cgroup": "4:memory:/box\n3:cpu,cpuacct:/box\n",
            "proc/meminfo": "MemAvailable: 8388608 kB\n",
            "sys/fs/cgroup/cpu/box/cpu.cfs_quota_us": "50000\n",
            "sys/fs/cgroup/cpu/box/cpu.cfs_period_us": "100000\n",
            "sys/fs/cgroup/memory/box/memory.limit_in_bytes": "4096\n",
            "sys/fs/cgroup/memory/box/memory.usage_in_bytes": "96\n",
        },
    )
    assert usable_cores(root) == 1
    assert available_memory(root) == 4000


def test_no_control_groups(tmp_path: Path) -> None:
    root = tree(tmp_path, {"proc/meminfo": "MemAvailable: 2 kB\n"})
    assert available_memory(root) == 2048
    assert usable_cores(root) >= 1


def test_this_machine() -> None:
    machine = measure_machine("cpu")
    assert machine.device == "cpu"
    assert machine.cores >= 1
    assert machine.device_memory == machine.host_memory > 0


def test_cuda_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(ConfigError, match="--device cuda"):
        measure_machine("cuda")
    assert measure_machine("auto").device == "cpu"
