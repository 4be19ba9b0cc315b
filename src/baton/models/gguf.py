"""GGUF files as checkpoints: Hugging Face names and layout, weights unpacked to floating point."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import gguf
import numpy as np
import numpy.typing as npt
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

from baton.core.errors import ModelError
from baton.models.gguf_file import GGUFFile

if TYPE_CHECKING:  # what reads a config or a tokenizer needs no torch
    import torch

#: names outside the blocks, and within `blk.N.`, that GGUF's "llama" architecture uses
_OUTER = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_BLOCK = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_NAME = re.compile(r"(?:blk\.(\d+)\.)?([a-z_]+)\.(weight|bias)")
#: Llama 3.1's RoPE scaling, stored as one divisor per frequency instead of as parameters
_ROPE_FACTORS = "rope_freqs.weight"
#: types that torch has too, and their names there
_PLAIN = {
    GGMLQuantizationType.F32: "float32",
    GGMLQuantizationType.F16: "float16",
    GGMLQuantizationType.BF16: "bfloat16",
    GGMLQuantizationType.F64: "float64",
}
#: elements unpacked at once: temporaries then stay in the CPU's caches
_GROUP = 1 << 18


class GGUFCheckpoint:
    """Checkpoint over one GGUF file of the llama architecture.

    F32, F16, BF16 and F64 tensors keep their dtype; quantised ones are unpacked to float32 and
    equal bit for bit what `gguf.dequantize` (and so transformers) makes of them.

    Raises:
        ModelError: damaged file, unknown architecture, unknown tensor name or type.
    """

    def __init__(self, path: str | Path) -> None:
        self._file = GGUFFile(Path(path))
        config = _config(self._file)
        self._heads = {
            "attn_q": config["num_attention_heads"],
            "attn_k": config["num_key_value_heads"],
        }
        self._origin: dict[str, str] = {}
        for name in self._file.tensors:
            if name != _ROPE_FACTORS:
                self._origin[self._translate(name)] = name

    def names(self) -> list[str]:
        """Every tensor, by its Hugging Face name."""
        return list(self._origin)

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor, without reading it."""
        return self._file.tensors[self._find(name)].shape

    def file(self, name: str) -> str:
        """Path of the GGUF file."""
        return str(self._file.path)

    def read(self, name: str) -> torch.Tensor:
        """The tensor on the CPU, in memory of its own.

        Raises:
            ModelError: no such tensor, or its type cannot be unpacked.
        """
        import torch

        origin = self._find(name)
        info = self._file.tensors[origin]
        raw = self._file.data(origin)
        if info.kind in _PLAIN:
            dtype = getattr(torch, _PLAIN[info.kind])
            tensor = torch.from_numpy(raw.copy()).view(dtype).reshape(info.shape)
        else:
            try:
                values = _unpack(raw, info.kind)
            except NotImplementedError:
                raise ModelError(
                    file=self._file.path,
                    tensor=name,
                    problem=f"has type {info.kind.name}, which cannot be unpacked",
                    expected="F32, F16, BF16, Q4_0 to Q8_0, a K-quant or an IQ type of `gguf`",
                ) from None
            tensor = torch.from_numpy(values).reshape(info.shape)
        heads = self._heads.get(origin.split(".")[-2])
        return tensor if heads is None else _unpermute(tensor, heads)

    def _find(self, name: str) -> str:
        if name not in self._origin:
            raise ModelError(
                file=self._file.path,
                tensor=name,
                problem="is not in the file",
                expected=f"one of its {len(self._origin)} tensors",
            )
        return self._origin[name]

    def _translate(self, name: str) -> str:
        """`blk.3.attn_q.weight` -> `model.layers.3.self_attn.q_proj.weight`."""
        match = _NAME.fullmatch(name)
        layer, part, suffix = match.groups() if match else (None, "", "")
        target = (_OUTER if layer is None else _BLOCK).get(part)
        if target is None:
            raise ModelError(
                file=self._file.path,
                tensor=name,
                problem="is not a tensor of the llama architecture",
                expected=f"one of {sorted(_OUTER)} or blk.N.{sorted(_BLOCK)}",
            )
        return f"{target}.{suffix}" if layer is None else f"model.layers.{layer}.{target}.{suffix}"


def gguf_config(path: str | Path) -> dict[str, Any]:
    """The file's metadata as a Hugging Face `config.json` dict.

    Raises:
        ModelError: damaged file, unknown architecture, or a metadata key that is missing.
    """
    return _config(GGUFFile(Path(path)))


def _config(file: GGUFFile) -> dict[str, Any]:
    fields = file.fields
    architecture = fields.get("general.architecture")
    if architecture != "llama":
        raise ModelError(
            file=file.path,
            problem=f"general.architecture is {architecture!r}",
            expected="'llama' (other families: use their safetensors checkpoint)",
        )
    _refuse_variants(file)

    def need(key: str) -> Any:
        value = fields.get(f"llama.{key}")
        if not isinstance(value, int | float):
            raise ModelError(
                file=file.path, problem=f"llama.{key} is {value!r}", expected="a number"
            )
        return value

    hidden, heads = need("embedding_length"), need("attention.head_count")
    head_dim = fields.get("llama.attention.key_length") or fields.get("llama.rope.dimension_count")
    config: dict[str, Any] = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "vocab_size": _vocab_size(file),
        "hidden_size": hidden,
        "intermediate_size": need("feed_forward_length"),
        "num_hidden_layers": need("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": fields.get("llama.attention.head_count_kv", heads),
        "head_dim": head_dim or hidden // heads,
        "max_position_embeddings": need("context_length"),
        "rms_norm_eps": need("attention.layer_norm_rms_epsilon"),
        "rope_theta": fields.get("llama.rope.freq_base", 10000.0),
        "attention_bias": "blk.0.attn_q.bias" in file.tensors,
        "mlp_bias": "blk.0.ffn_up.bias" in file.tensors,
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "bos_token_id": fields.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": fields.get("tokenizer.ggml.eos_token_id"),
        "torch_dtype": "float32",
    }
    scaling = _rope_scaling(file, config)
    if scaling is not None:
        config["rope_scaling"] = scaling
    return config


def _refuse_variants(file: GGUFFile) -> None:
    """Refuse what the llama architecture tag also covers but is not read here."""
    if file.fields.get("split.count", 1) > 1:
        raise ModelError(
            file=file.path,
            problem=f"is one of {file.fields['split.count']} parts",
            expected="one file: join the parts with `llama-gguf-split --merge`",
        )
    if file.fields.get("llama.expert_count", 0):
        raise ModelError(
            file=file.path,
            problem=f"has {file.fields['llama.expert_count']} experts per layer",
            expected="a dense llama model",
        )


def _vocab_size(file: GGUFFile) -> int:
    """Rows of the embedding: files may leave `llama.vocab_size` out."""
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None:
        raise ModelError(
            file=file.path,
            tensor="token_embd.weight",
            problem="is missing",
            expected="the token embedding [vocabulary, hidden]",
        )
    return embedding.shape[0]


def _rope_scaling(file: GGUFFile, config: dict[str, Any]) -> dict[str, Any] | None:
    """RoPE scaling in `config.json` form, or None.

    Llama 3.1 files carry `rope_freqs.weight`, the divisor of each frequency, in place of the rule
    it came from. The rule's published constants (low 1, high 4, 8192 positions) are tried and
    must give the stored divisors back.
    """
    kind = file.fields.get("llama.rope.scaling.type", "none")
    if _ROPE_FACTORS in file.tensors:
        stored = file.data(_ROPE_FACTORS).view(np.float32)
        rule = {
            "rope_type": "llama3",
            "factor": float(stored.max()),
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        }
        expected = _llama3_divisors(rule, config["rope_theta"], config["head_dim"])
        if stored.shape != expected.shape or not np.allclose(stored, expected, rtol=1e-3):
            raise ModelError(
                file=file.path,
                tensor=_ROPE_FACTORS,
                problem="holds RoPE divisors that are not Llama 3.1's rule",
                expected=f"the rule {rule}",
            )
        return rule
    if kind == "none":
        return None
    if kind != "linear":
        raise ModelError(
            file=file.path,
            problem=f"llama.rope.scaling.type is {kind!r}",
            expected="none, linear, or Llama 3.1's divisors",
        )
    return {"rope_type": "linear", "factor": file.fields["llama.rope.scaling.factor"]}


def _llama3_divisors(
    rule: dict[str, Any], theta: float, head_dim: int
) -> npt.NDArray[np.floating[Any]]:
    """Divisors `[head_dim / 2]` of the RoPE frequencies under Llama 3.1's rule."""
    wave = 2 * math.pi * theta ** (np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)
    low, high = rule["low_freq_factor"], rule["high_freq_factor"]
    smooth = (rule["original_max_position_embeddings"] / wave - low) / (high - low)
    smooth = np.clip(smooth, 0.0, 1.0)
    return np.asarray(1.0 / ((1.0 - smooth) / rule["factor"] + smooth))


def _unpack(raw: npt.NDArray[np.uint8], kind: GGMLQuantizationType) -> npt.NDArray[np.float32]:
    """Quantised bytes `[size]` -> float32 `[elements]`.

    Blocks do not know their row, so the tensor is viewed as rows of up to a few hundred blocks:
    `gguf` works on 16 rows at a time, and a narrow model's real rows are too short for NumPy.
    """
    block, size = GGML_QUANT_SIZES[kind]
    blocks = raw.size // size
    per_row = next(n for n in range(_GROUP // block // 16, 0, -1) if blocks % n == 0)
    values: npt.NDArray[np.float32] = gguf.dequantize(raw.reshape(-1, per_row * size), kind)
    return values.reshape(-1)


def _unpermute(tensor: torch.Tensor, heads: int) -> torch.Tensor:
    """Q or K rows `[heads * head_dim, ...]` from GGUF's order (RoPE pairs side by side) to Hugging
    Face's (first halves, then second halves)."""
    paired = tensor.reshape(heads, tensor.shape[0] // heads // 2, 2, *tensor.shape[1:])
    return paired.transpose(1, 2).reshape(tensor.shape)
