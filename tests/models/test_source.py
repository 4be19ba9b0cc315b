"""Model sources and safetensors folders, above all the broken ones."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from baton.core.errors import ModelError
from baton.models.folder import SafetensorsCheckpoint
from baton.models.source import (
    ModelSource,
    open_checkpoint,
    read_config,
    resolve_source,
    weights_digest,
)

TENSORS = {
    "model.embed_tokens.weight": torch.arange(12.0).reshape(4, 3),
    "model.norm.weight": torch.ones(3, dtype=torch.bfloat16),
    "lm_head.weight": torch.full((4, 3), 2.0, dtype=torch.float16),
}
SHARDS = {name: f"model-0000{i + 1}-of-00003.safetensors" for i, name in enumerate(TENSORS)}


def put_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value))


@pytest.fixture
def single(tmp_path: Path) -> Path:
    folder = tmp_path / "single"
    folder.mkdir()
    put_json(folder / "config.json", {"model_type": "llama", "eos_token_id": 2})
    save_file(TENSORS, folder / "model.safetensors")
    return folder


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    folder = tmp_path / "sharded"
    folder.mkdir()
    put_json(folder / "config.json", {"model_type": "llama", "eos_token_id": 2})
    for name, shard in SHARDS.items():
        save_file({name: TENSORS[name]}, folder / shard)
    put_json(folder / "model.safetensors.index.json", {"weight_map": SHARDS})
    return folder


@pytest.mark.parametrize("kind", ["single", "sharded", "glob"])
def test_folder_reads_every_tensor(kind: str, single: Path, sharded: Path) -> None:
    folder = single if kind == "single" else sharded
    if kind == "glob":
        (folder / "model.safetensors.index.json").unlink()
    source = resolve_source(str(folder))
    assert source == ModelSource("folder", folder, str(folder))
    checkpoint = open_checkpoint(source)
    assert sorted(checkpoint.names()) == sorted(TENSORS)
    for name, tensor in TENSORS.items():
        assert checkpoint.shape(name) == tuple(tensor.shape)
        assert torch.equal(checkpoint.read(name), tensor)
        assert checkpoint.read(name).dtype == tensor.dtype
        assert Path(checkpoint.file(name)).parent == folder


def test_missing_shard_is_named(sharded: Path) -> None:
    gone = SHARDS["model.norm.weight"]
    (sharded / gone).unlink()
    with pytest.raises(ModelError, match=rf"{gone}.*model\.norm\.weight.*missing.*index"):
        resolve_source(str(sharded))


def test_tensor_missing_from_its_shard(sharded: Path) -> None:
    shard = sharded / SHARDS["model.norm.weight"]
    save_file({"other": torch.ones(1)}, shard)
    with pytest.raises(ModelError, match=rf"{shard.name}.*model\.norm\.weight.*not in this file"):
        SafetensorsCheckpoint(sharded)


def test_tensor_in_another_shard_than_the_index_says(sharded: Path) -> None:
    swapped = SHARDS | {"model.norm.weight": SHARDS["lm_head.weight"]}
    swapped["lm_head.weight"] = SHARDS["model.norm.weight"]
    put_json(sharded / "model.safetensors.index.json", {"weight_map": swapped})
    with pytest.raises(ModelError, match="not in this file"):
        SafetensorsCheckpoint(sharded)


@pytest.mark.parametrize(
    "index",
    [[], {}, {"weight_map": []}, {"weight_map": {"a": 1}}, {"weight_map": {"a": "../../x"}}],
)
def test_index_of_a_wrong_shape(sharded: Path, index: Any) -> None:
    put_json(sharded / "model.safetensors.index.json", index)
    with pytest.raises(ModelError, match=r"index\.json.*expected"):
        SafetensorsCheckpoint(sharded)


def test_index_that_is_not_json(sharded: Path) -> None:
    (sharded / "model.safetensors.index.json").write_text("{")
    with pytest.raises(ModelError, match=r"index\.json"):
        SafetensorsCheckpoint(sharded)


def test_any_cut_is_an_error(single: Path) -> None:
    path = single / "model.safetensors"
    whole = path.read_bytes()
    for size in range(len(whole)):
        path.write_bytes(whole[:size])
        with pytest.raises(ModelError, match=r"model\.safetensors"):
            SafetensorsCheckpoint(single)
    path.write_bytes(whole[:-1])
    with pytest.raises(ModelError) as caught:
        SafetensorsCheckpoint(single)
    assert caught.value.tensor in TENSORS


def test_header_with_wrong_fields(single: Path) -> None:
    path = single / "model.safetensors"
    for header in ([], {"a": 1}, {"a": {"shape": [1]}}, {"a": {"data_offsets": [0, 4]}}):
        text = json.dumps(header).encode().ljust(64)
        path.write_bytes(len(text).to_bytes(8, "little") + text + b"\0" * 64)
        with pytest.raises(ModelError, match="header"):
            SafetensorsCheckpoint(single)
    # a header that this project accepts but the library does not
    entry = {"dtype": "F32", "shape": [3], "data_offsets": [0, 4]}
    text = json.dumps({"a": entry}).encode().ljust(64)
    path.write_bytes(len(text).to_bytes(8, "little") + text + b"\0" * 4)
    with pytest.raises(ModelError, match="'a'"):
        SafetensorsCheckpoint(single).read("a")


def test_same_tensor_in_two_files(sharded: Path) -> None:
    (sharded / "model.safetensors.index.json").unlink()
    save_file({"lm_head.weight": torch.ones(1)}, sharded / "model-extra.safetensors")
    with pytest.raises(ModelError, match=r"lm_head\.weight.*also in"):
        SafetensorsCheckpoint(sharded)


def test_only_pickled_weights(single: Path) -> None:
    (single / "model.safetensors").rename(single / "pytorch_model.bin")
    with pytest.raises(ModelError, match=r"only pytorch_model\.bin.*save_pretrained"):
        resolve_source(str(single))


def test_no_weights_is_enough_for_dummy(single: Path) -> None:
    (single / "model.safetensors").unlink()
    with pytest.raises(ModelError, match="no weights"):
        resolve_source(str(single))
    source = resolve_source(str(single), load_format="dummy")
    assert read_config(source)["model_type"] == "llama"


def test_unknown_quantisation(single: Path) -> None:
    config = {"model_type": "llama", "quantization_config": {"quant_method": "gptq", "bits": 4}}
    put_json(single / "config.json", config)
    with pytest.raises(ModelError, match=r"config\.json.*'gptq'.*bfloat16"):
        SafetensorsCheckpoint(single)


def test_unknown_tensor(single: Path) -> None:
    with pytest.raises(ModelError, match=r"'nope'"):
        SafetensorsCheckpoint(single).shape("nope")


@pytest.mark.parametrize(
    "generation, expected", [(None, 2), (2, 2), (5, [2, 5]), ([5, 2, 7], [2, 5, 7])]
)
def test_eos_ids_of_both_configs(single: Path, generation: Any, expected: Any) -> None:
    if generation is not None:
        put_json(single / "generation_config.json", {"eos_token_id": generation})
    assert read_config(resolve_source(str(single)))["eos_token_id"] == expected


def test_config_that_is_not_json(single: Path) -> None:
    (single / "config.json").write_text("not json")
    with pytest.raises(ModelError, match=r"config\.json"):
        read_config(resolve_source(str(single)))


@pytest.mark.parametrize("name", ["smollm", "", "/no/such/folder", "a" * 5000, "\0", "~nobody/x/y"])
def test_nothing_of_that_name_says_what_was_tried(name: str) -> None:
    with pytest.raises(ModelError, match=r"folder.*embedded.*hub.*smollm2-135m"):
        resolve_source(name)


def test_files_and_folders_that_are_no_models(tmp_path: Path) -> None:
    (tmp_path / "a.txt").touch()
    with pytest.raises(ModelError, match=r"not \.gguf"):
        resolve_source(str(tmp_path / "a.txt"))
    with pytest.raises(ModelError, match=r"neither config\.json"):
        resolve_source(str(tmp_path))
    (tmp_path / "a.gguf").touch()
    (tmp_path / "b.gguf").touch()
    with pytest.raises(ModelError, match="2 GGUF"):
        resolve_source(str(tmp_path))


def test_folder_with_one_gguf_is_that_file(tmp_path: Path) -> None:
    (tmp_path / "a.gguf").touch()
    source = resolve_source(str(tmp_path))
    assert (source.kind, source.path) == ("gguf", tmp_path / "a.gguf")
    with pytest.raises(ModelError, match=r"gguf weights.*safetensors"):
        resolve_source(str(tmp_path), load_format="safetensors")


def test_hub_in_offline_mode_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(ModelError, match=r"hub cannot be reached.*embedded"):
        resolve_source("no-such-organisation/no-such-model")


def test_hub_snapshot_is_a_folder(single: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    asked: dict[str, Any] = {}

    def snapshot(model: str, **options: Any) -> str:
        asked.update(options, model=model)
        return str(single)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot)
    source = resolve_source("org/name", revision="v2")
    assert source == ModelSource("hub", single, "org/name", "v2")
    assert (asked["model"], asked["revision"]) == ("org/name", "v2")
    assert "*.safetensors" in asked["allow_patterns"]
    resolve_source("org/name", load_format="dummy")
    assert "*.safetensors" not in asked["allow_patterns"]


def test_weights_digest_sees_content_names_and_shapes(single: Path, sharded: Path) -> None:
    source = resolve_source(str(single))
    first = weights_digest(source)
    assert first == weights_digest(source)
    assert first != weights_digest(resolve_source(str(sharded)))
    path = single / "model.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    assert weights_digest(source) != first
    assert weights_digest(source, "dummy", 1) != weights_digest(source, "dummy", 2)


def test_weights_digest_samples_big_files(single: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from baton.models import source as module

    monkeypatch.setattr(module, "_WHOLE", 1 << 20)
    save_file({"a": torch.zeros(4 << 20)}, single / "model.safetensors")
    source = resolve_source(str(single))
    first = weights_digest(source)
    path = single / "model.safetensors"
    size = path.stat().st_size
    for at in (size - 1, (1 << 20) + (size - (2 << 20)) // 2):
        with open(path, "r+b") as file:
            file.seek(at)
            file.write(b"\x01")
        assert weights_digest(source) != first
        first = weights_digest(source)
