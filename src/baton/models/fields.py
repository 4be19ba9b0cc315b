"""Reading a family's `config.json`: required fields, old and new ways of saying RoPE."""

from __future__ import annotations

from typing import Any, Literal, cast

from baton.config.model import RopeConfig
from baton.core.errors import ModelError

_ROPE_KINDS = ("default", "linear", "llama3", "yarn")
#: parameters that a rope kind cannot do without; YaRN's own factor can be derived
_ROPE_NEEDS = {
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
}


class Fields:
    """One `config.json`, with errors that name the file and the field."""

    def __init__(self, raw: dict[str, Any], path: str) -> None:
        self.raw, self.path = raw, path

    def fail(self, problem: str, expected: str = "") -> ModelError:
        """The error to raise about this config."""
        return ModelError(file=self.path, problem=problem, expected=expected)

    def integer(self, name: str, default: int | None = None) -> int:
        """A count, at least 1; `default` where it is absent or null."""
        value = self.raw.get(name)
        value = default if value is None else value
        if value is None:
            raise self.fail(f"field {name!r} is missing", "a positive integer")
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise self.fail(f"field {name!r} is {value!r}", "a positive integer")
        return value

    def count(self, name: str, default: int = 0) -> int:
        """A count that may be 0; `default` where it is absent or null."""
        value = self.raw.get(name)
        value = default if value is None else value
        return 0 if value == 0 else self.integer(name, default)

    def number(self, name: str, default: float) -> float:
        """A number; `default` where it is absent or null."""
        value = self.raw.get(name)
        value = default if value is None else value
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.fail(f"field {name!r} is {value!r}", "a number")
        return float(value)

    def flag(self, name: str, default: bool = False) -> bool:
        """True or false; `default` where it is absent or null."""
        value = self.raw.get(name)
        return default if value is None else bool(value)

    def token_ids(self, name: str) -> tuple[int, ...]:
        """Token ids given as one, several, or not at all."""
        value = self.raw.get(name)
        if value is None:
            return ()
        return tuple(value) if isinstance(value, list) else (value,)

    def dtype(self) -> str:
        """Dtype of the released weights; bfloat16 where the config does not say."""
        value = self.raw.get("dtype") or self.raw.get("torch_dtype") or "bfloat16"
        return str(value).removeprefix("torch.")

    def refuse_unsupported(self) -> None:
        """Raise for what no family here computes, rather than computing something else."""
        act = self.raw.get("hidden_act") or "silu"
        if act != "silu":
            raise self.fail(f"activation {act!r} is not supported", "silu")
        if self.raw.get("quantization_config"):
            method = self.raw["quantization_config"].get("quant_method", "unknown")
            raise self.fail(
                f"quantised weights ({method}) are not supported", "an unquantised checkpoint"
            )
        if self.flag("use_sliding_window") and self.raw.get("sliding_window"):
            raise self.fail("sliding-window attention is not supported", "full attention")

    def rope(self, dim: int, theta: float, interleaved: bool = False) -> RopeConfig:
        """RoPE of `rope_parameters` (new style) or `rope_theta` with `rope_scaling` (old style).

        `theta` is the family's default. `original_max_position_embeddings` falls back to
        `max_position_embeddings`, and YaRN's factor to the ratio of the two.
        """
        said = self.raw.get("rope_parameters") or self.raw.get("rope_scaling") or {}
        kind = said.get("rope_type") or said.get("type") or "default"
        if kind not in _ROPE_KINDS:
            raise self.fail(f"rope type {kind!r} is not supported", f"one of {_ROPE_KINDS}")
        partial = said.get("partial_rotary_factor") or self.raw.get("partial_rotary_factor") or 1.0
        if partial != 1.0:
            raise self.fail(f"partial_rotary_factor {partial} is not supported", "1.0")
        base = said.get("rope_theta") or self.raw.get("rope_theta") or theta
        scaling = {
            key: float(value)
            for key, value in said.items()
            if isinstance(value, int | float) and key != "rope_theta"
        }
        if kind in ("llama3", "yarn"):
            original = self.raw.get("original_max_position_embeddings") or scaling.get(
                "original_max_position_embeddings", self.integer("max_position_embeddings")
            )
            scaling["original_max_position_embeddings"] = float(original)
        if kind == "yarn":
            stretched = self.integer("max_position_embeddings")
            scaling.setdefault("factor", stretched / scaling["original_max_position_embeddings"])
        for need in _ROPE_NEEDS.get(kind, ()):
            if need not in scaling:
                raise self.fail(f"rope type {kind!r} without {need!r}", "a number")
        return RopeConfig(
            dim=dim,
            theta=float(base),
            kind=cast(Literal["default", "linear", "llama3", "yarn"], kind),
            interleaved=interleaved,
            scaling=scaling if kind != "default" else {},
        )

    def common(self) -> dict[str, Any]:
        """ModelConfig fields that every family spells alike."""
        return {
            "vocab_size": self.integer("vocab_size"),
            "hidden_size": self.integer("hidden_size"),
            "num_layers": self.integer("num_hidden_layers"),
            "intermediate_size": self.integer("intermediate_size"),
            "norm_eps": self.number("rms_norm_eps", 1e-6),
            "max_position": self.integer("max_position_embeddings"),
            "dtype": self.dtype(),
            "tie_embeddings": self.flag("tie_word_embeddings"),
            "eos_token_ids": self.token_ids("eos_token_id"),
            "bos_token_id": self.raw.get("bos_token_id"),
            "raw": self.raw,
        }
