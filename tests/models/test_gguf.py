"""GGUF: equal to transformers for the real file; damaged files say what is wrong with them."""

from __future__ import annotations

import shutil
import time
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind

from baton.core.errors import ModelError
from baton.models.gguf import GGUFCheckpoint, gguf_config
from baton.models.source import ModelSource

HIDDEN, HEADS, KV_HEADS, FFN, VOCAB = 64, 4, 2, 96, 320


def write(path: Path, kind: Kind = Kind.F32, arch: str = "llama", **extra: np.ndarray) -> Path:
    """A one-layer llama file with random weights in `kind` where it is a matrix."""
    writer = gguf.GGUFWriter(path, arch)
    writer.add_block_count(1)
    writer.add_context_length(512)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(FFN)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_token_list([f"t{i}" for i in range(VOCAB)])
    rng = np.random.default_rng(0)
    kv = HIDDEN // HEADS * KV_HEADS
    shapes = {
        "token_embd": (VOCAB, HIDDEN),
        "output_norm": (HIDDEN,),
        "blk.0.attn_norm": (HIDDEN,),
        "blk.0.attn_q": (HIDDEN, HIDDEN),
        "blk.0.attn_k": (kv, HIDDEN),
        "blk.0.attn_v": (kv, HIDDEN),
        "blk.0.attn_output": (HIDDEN, HIDDEN),
        "blk.0.ffn_norm": (HIDDEN,),
        "blk.0.ffn_gate": (FFN, HIDDEN),
        "blk.0.ffn_up": (FFN, HIDDEN),
        "blk.0.ffn_down": (HIDDEN, FFN),
    }
    tensors = {f"{n}.weight": rng.standard_normal(s).astype(np.float32) for n, s in shapes.items()}
    for name, value in (tensors | extra).items():
        if value.ndim == 1 or kind == Kind.F32:
            writer.add_tensor(name, value)
        else:
            writer.add_tensor(name, gguf.quantize(value, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_every_weight_and_the_config_equal_transformers(smollm: ModelSource) -> None:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(
        smollm.path.parent, gguf_file=smollm.path.name, dtype=torch.float32
    )
    expected = model.state_dict()
    checkpoint = GGUFCheckpoint(smollm.path)
    assert set(checkpoint.names()) == set(expected) - {"lm_head.weight"}  # tied
    for name in checkpoint.names():
        tensor = checkpoint.read(name)
        assert tuple(tensor.shape) == checkpoint.shape(name)
        assert torch.equal(tensor, expected[name]), name

    config = gguf_config(smollm.path)
    theirs = model.config.to_dict()
    theirs["rope_theta"] = theirs["rope_parameters"]["rope_theta"]
    for key in set(config) - {"torch_dtype", "architectures"}:
        assert config[key] == theirs[key], key


def test_loading_is_fast(smollm: ModelSource) -> None:
    start = time.perf_counter()
    checkpoint = GGUFCheckpoint(smollm.path)
    for name in checkpoint.names():
        checkpoint.read(name)
    assert time.perf_counter() - start < 10  # 0.4 s on an idle desktop core


@pytest.mark.parametrize("kind", [Kind.F32, Kind.F16, Kind.BF16, Kind.Q8_0, Kind.Q4_0, Kind.Q5_1])
def test_types_unpack_as_the_gguf_package_does(tmp_path: Path, kind: Kind) -> None:
    path = write(tmp_path / "m.gguf", kind)
    checkpoint = GGUFCheckpoint(path)
    reader = gguf.GGUFReader(path)
    stored = {t.name: gguf.dequantize(t.data, t.tensor_type) for t in reader.tensors}
    for theirs, ours in (
        ("blk.0.ffn_down.weight", "model.layers.0.mlp.down_proj.weight"),
        ("token_embd.weight", "model.embed_tokens.weight"),
    ):
        assert np.array_equal(checkpoint.read(ours).float().numpy(), stored[theirs])
    key = checkpoint.read("model.layers.0.self_attn.k_proj.weight").float().numpy()
    head = HIDDEN // HEADS
    for row in range(head * KV_HEADS):  # row of (head, half, pair) comes from (head, pair, half)
        which, inside = divmod(row, head)
        half, pair = divmod(inside, head // 2)
        source = which * head + pair * 2 + half
        assert np.array_equal(key[row], stored["blk.0.attn_k.weight"][source])


def test_tensors_own_their_memory(tmp_path: Path) -> None:
    checkpoint = GGUFCheckpoint(write(tmp_path / "m.gguf"))
    checkpoint.read("model.norm.weight").zero_()
    assert checkpoint.read("model.norm.weight").abs().sum() > 0


def test_llama3_rope_divisors_become_their_rule(tmp_path: Path) -> None:
    # the formula of transformers.modeling_rope_utils, on this head size
    inverse = 10000.0 ** -(np.arange(0, 16, 2) / 16)
    wave = 2 * np.pi / inverse
    smooth = np.clip((8192 / wave - 1) / 3, 0, 1)
    divisors = (1 / ((1 - smooth) / 8 + smooth)).astype(np.float32)
    good = write(tmp_path / "a.gguf", **{"rope_freqs.weight": divisors})
    scaling = gguf_config(good)["rope_scaling"]
    assert scaling["rope_type"] == "llama3"
    assert scaling["factor"] == pytest.approx(divisors.max())
    bad = write(tmp_path / "b.gguf", **{"rope_freqs.weight": divisors[::-1].copy()})
    with pytest.raises(ModelError, match="rope_freqs"):
        gguf_config(bad)


def test_untied_output_is_lm_head(tmp_path: Path) -> None:
    head = np.ones((VOCAB, HIDDEN), np.float32)
    path = write(tmp_path / "m.gguf", **{"output.weight": head})
    assert "lm_head.weight" in GGUFCheckpoint(path).names()
    assert gguf_config(path)["tie_word_embeddings"] is False


def test_wrong_magic(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(b"PK\x03\x04" + b"\0" * 64)
    with pytest.raises(ModelError, match=r"m\.gguf.*PK.*magic"):
        GGUFCheckpoint(path)


def test_empty_file(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.touch()
    with pytest.raises(ModelError, match="GGUF file"):
        GGUFCheckpoint(path)


def test_any_cut_is_an_error_that_names_the_place(tmp_path: Path) -> None:
    whole = write(tmp_path / "m.gguf").read_bytes()
    path = tmp_path / "cut.gguf"
    for size in range(1, len(whole) - 1, 997):
        path.write_bytes(whole[:size])
        with pytest.raises(ModelError) as caught:
            GGUFCheckpoint(path)
        assert "cut.gguf" in str(caught.value)
        assert caught.value.expected


def test_real_file_cut_in_tensor_data_names_the_tensor(smollm: ModelSource, tmp_path: Path) -> None:
    path = tmp_path / "cut.gguf"
    shutil.copyfile(smollm.path, path)
    with open(path, "r+b") as file:
        file.truncate(60_000_000)
    with pytest.raises(ModelError) as caught:
        GGUFCheckpoint(path)
    assert caught.value.tensor is not None
    assert caught.value.tensor.startswith("blk.")
    assert "fetch the file again" in str(caught.value)


def test_absurd_counts_do_not_take_memory(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(b"GGUF" + (3).to_bytes(4, "little") + b"\xff" * 16 + b"\xff" * 64)
    with pytest.raises(ModelError, match="ends at byte"):
        GGUFCheckpoint(path)


def test_unknown_architecture(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"'mamba'.*llama"):
        gguf_config(write(tmp_path / "m.gguf", arch="mamba"))


def test_unknown_tensor_name(tmp_path: Path) -> None:
    path = write(tmp_path / "m.gguf", **{"blk.0.ssm_a.weight": np.ones(4, np.float32)})
    with pytest.raises(ModelError, match=r"blk\.0\.ssm_a\.weight"):
        GGUFCheckpoint(path)


def test_a_type_that_cannot_be_unpacked_names_tensor_and_type(tmp_path: Path) -> None:
    path = write(tmp_path / "m.gguf", **{"output.weight": np.ones((VOCAB, HIDDEN), np.float32)})
    data = bytearray(path.read_bytes())
    entry = (13).to_bytes(8, "little") + b"output.weight"
    at = data.index(entry) + len(entry) + 4 + 16
    assert int.from_bytes(data[at : at + 4], "little") == Kind.F32
    data[at : at + 4] = int(Kind.I32).to_bytes(4, "little")
    path.write_bytes(data)
    with pytest.raises(ModelError, match=r"lm_head\.weight.*I32"):
        GGUFCheckpoint(path).read("lm_head.weight")


def test_missing_tensor_and_metadata(tmp_path: Path) -> None:
    path = write(tmp_path / "m.gguf")
    with pytest.raises(ModelError, match=r"lm_head\.weight"):
        GGUFCheckpoint(path).read("lm_head.weight")
    data = path.read_bytes().replace(b"llama.context_length", b"llama.context_lengtx")
    path.write_bytes(data)
    with pytest.raises(ModelError, match=r"llama\.context_length is None"):
        gguf_config(path)
