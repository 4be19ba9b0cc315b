"""From what a user calls a model to files on this machine, and from files to a checkpoint."""

from __future__ import annotations

import hashlib
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from baton.core.errors import ModelError
from baton.core.progress import ProgressFn
from baton.models import embedded, hub
from baton.models.checkpoint import Checkpoint
from baton.models.folder import SafetensorsCheckpoint, read_header, read_json, weight_files

LoadFormat = Literal["auto", "safetensors", "gguf", "dummy"]
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")

#: files up to this size are hashed whole, bigger ones by samples
_WHOLE = 256 << 20
_EDGE, _BLOCK, _BLOCKS = 1 << 20, 64 << 10, 64


@dataclass(frozen=True)
class ModelSource:
    """A model whose files are here. `path` is a folder, or a GGUF file (kinds gguf and embedded).

    `name` is what the user wrote; `revision` is set for kind hub only.
    """

    kind: Literal["folder", "gguf", "hub", "embedded"]
    path: Path
    name: str
    revision: str | None = None

    @property
    def is_gguf(self) -> bool:
        """True when `path` is a GGUF file."""
        return self.path.suffix == ".gguf"


def resolve_source(
    model: str,
    *,
    revision: str | None = None,
    load_format: LoadFormat = "auto",
    progress: ProgressFn | None = None,
) -> ModelSource:
    """Find a model, fetching it when it is an embedded name or a hub id.

    Tried in this order: embedded name, path on this machine, hub id `org/name`.

    Args:
        model: folder, `.gguf` file, embedded name or hub id.
        revision: hub branch, tag or commit; used for hub ids only.
        load_format: what the files must be; "dummy" needs no weights.
        progress: told about downloads, in bytes.

    Raises:
        ModelError: nothing of that name (the message lists what was tried), a folder without what
            `load_format` needs, or a download that failed.
    """
    if model in embedded.CATALOGUE:
        source = ModelSource("embedded", embedded.fetch(embedded.CATALOGUE[model], progress), model)
    elif os.path.exists(path := os.path.expanduser(model)):  # False for any odd text
        source = _local(Path(path), model)
    elif _HUB_ID.fullmatch(model):
        folder = hub.fetch(model, revision, weights=load_format != "dummy")
        source = ModelSource("hub", folder, model, revision)
    else:
        raise ModelError(
            file=model,
            problem="no such model: not a folder or file here, not an embedded name, "
            "not a hub id (org/name)",
            expected=f"a path, a hub id, or one of the embedded names {sorted(embedded.CATALOGUE)}",
        )
    _check_format(source, load_format)
    return source


def _local(path: Path, name: str) -> ModelSource:
    if path.is_file():
        if path.suffix != ".gguf":
            raise ModelError(
                file=path, problem="is a file but not .gguf", expected="a folder or a .gguf file"
            )
        return ModelSource("gguf", path, name)
    if (path / "config.json").exists():
        return ModelSource("folder", path, name)
    files = sorted(path.glob("*.gguf"))
    if len(files) == 1:
        return ModelSource("gguf", files[0], name)
    found = f"has {len(files)} GGUF files" if files else "has neither config.json nor a GGUF file"
    raise ModelError(
        file=path, problem=found, expected="config.json with safetensors files, or one .gguf file"
    )


def _check_format(source: ModelSource, load_format: LoadFormat) -> None:
    """The files must be what the user asked for; a folder's weights must be there."""
    here = "gguf" if source.is_gguf else "safetensors"
    if load_format in {"gguf", "safetensors"} and load_format != here:
        raise ModelError(
            file=source.path,
            problem=f"holds {here} weights",
            expected=f"{load_format}, as load_format asks",
        )
    if load_format != "dummy" and not source.is_gguf:
        weight_files(source.path)


def open_checkpoint(source: ModelSource) -> Checkpoint:
    """The model's tensors. Raises ModelError when a file is damaged or of an unknown kind."""
    if source.is_gguf:
        from baton.models.gguf import GGUFCheckpoint

        return GGUFCheckpoint(source.path)
    return SafetensorsCheckpoint(source.path)


def read_config(source: ModelSource) -> dict[str, Any]:
    """The model's `config.json` as a dict (made from the metadata for GGUF).

    `eos_token_id` also holds what `generation_config.json` adds: chat models often name the
    end-of-turn token only there. One id stays a number, several become a list.
    """
    if source.is_gguf:
        from baton.models.gguf import gguf_config

        return gguf_config(source.path)
    config = read_json(source.path / "config.json")
    path = source.path / "generation_config.json"
    if path.exists():
        ids = eos_ids(config) + eos_ids(read_json(path))
        unique = list(dict.fromkeys(ids))
        if unique:
            config["eos_token_id"] = unique if len(unique) > 1 else unique[0]
    return config


def eos_ids(config: dict[str, Any]) -> list[int]:
    """`eos_token_id` of a config, which may be absent, a number or a list, as a list."""
    value = config.get("eos_token_id")
    if value is None:
        return []
    return [int(one) for one in value] if isinstance(value, list) else [int(value)]


def weights_digest(source: ModelSource, load_format: LoadFormat = "auto", seed: int = 0) -> str:
    """SHA-256 (hex) of the weights: equal for equal files, cheap for big ones.

    Hashed, for each weight file in name order: its name, its size, and for safetensors every
    tensor's name, dtype, shape and place. Then its content: all of it up to 256 MiB; of a bigger
    file the first and last MiB and 64 blocks of 64 KiB spread evenly between, so that an edit of a
    few weights in a very big file can go unseen, while another training run, conversion or
    quantisation cannot. The same weights sharded differently have another digest.
    Dummy weights are their seed.
    """
    sha = hashlib.sha256()
    if load_format == "dummy":
        sha.update(f"dummy {seed}".encode())
        return sha.hexdigest()
    for path in [source.path] if source.is_gguf else weight_files(source.path):
        size = path.stat().st_size
        sha.update(f"file {path.name} {size}\n".encode())
        if not source.is_gguf:  # a GGUF header lies within its hashed head
            for name, entry in sorted(read_header(path).items()):
                place = entry["data_offsets"]
                sha.update(f"{name} {entry['dtype']} {entry['shape']} {place}\n".encode())
        with open(path, "rb") as file:
            if size <= _WHOLE:
                while chunk := file.read(1 << 20):
                    sha.update(chunk)
                continue
            sha.update(file.read(_EDGE))
            for number in range(_BLOCKS):
                file.seek(_EDGE + (size - 2 * _EDGE) * number // _BLOCKS)
                sha.update(file.read(_BLOCK))
            file.seek(size - _EDGE)
            sha.update(file.read(_EDGE))
    return sha.hexdigest()
