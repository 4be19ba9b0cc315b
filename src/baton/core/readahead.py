"""Reads large libraries into the page cache while Python is busy with something else.

A GPU process maps some 2 GB of libraries and touches them page by page over its start-up. On a
machine that has not run one yet every touch waits for the disk; a few threads that read the same
files from end to end get them several times faster, before most of them are touched.
"""

from __future__ import annotations

import importlib.util
import os
import threading
from collections.abc import Iterator
from pathlib import Path

#: Packages that GPU work loads from, with the files of them that it needs.
_FILES = {
    "torch": ("lib/libtorch_cuda.so", "lib/libtorch_cpu.so", "lib/libtorch_python.so"),
    "nvidia": ("**/libcublasLt.so.*", "**/libcublas.so.*", "**/libnvrtc.so.*"),
    "fa3_fwd": ("**/*.so",),
    "flash_attn_3": ("**/*.so",),
    "triton": ("_C/libtriton.so",),
}
_BLOCK = 8 << 20
_THREADS = 4


def read_ahead() -> None:
    """Start reading, in threads that nobody waits for; nothing where there is no NVIDIA driver."""
    if not Path("/dev/nvidiactl").exists():
        return
    files = iter(list(_large_files()))
    lock = threading.Lock()
    for _ in range(_THREADS):
        threading.Thread(target=_read, args=(files, lock), daemon=True).start()


def _large_files() -> Iterator[Path]:
    for package, patterns in _FILES.items():
        spec = importlib.util.find_spec(package)
        for folder in () if spec is None else spec.submodule_search_locations or ():
            for pattern in patterns:
                yield from Path(folder).glob(pattern)


def _read(files: Iterator[Path], lock: threading.Lock) -> None:
    while True:
        with lock:
            path = next(files, None)
        if path is None:
            return
        try:
            with path.open("rb", buffering=0) as file:
                size = os.fstat(file.fileno()).st_size
                for offset in range(0, size, _BLOCK):
                    os.pread(file.fileno(), _BLOCK, offset)
        except OSError:  # a library that cannot be read is somebody else's error to report
            continue
