"""Libraries are found and read; what cannot be read is left to whoever needs it."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from baton.core import readahead


def test_the_large_libraries_of_torch_are_found() -> None:
    names = {path.name for path in readahead._large_files()}
    assert "libtorch_cpu.so" in names


def test_reads_every_file_once_and_skips_what_is_gone(tmp_path: Path) -> None:
    first, last = tmp_path / "a.so", tmp_path / "b.so"
    first.write_bytes(b"x" * 100)
    last.write_bytes(b"y" * 100)
    files = iter([first, tmp_path / "gone.so", last])
    readahead._read(files, threading.Lock())
    assert next(files, None) is None


def test_does_nothing_without_a_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    if Path("/dev/nvidiactl").exists():
        pytest.skip("this machine has an NVIDIA driver")
    monkeypatch.setattr(readahead, "_large_files", lambda: pytest.fail("looked for files"))
    readahead.read_ahead()
