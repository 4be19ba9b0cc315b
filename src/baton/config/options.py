"""What a user may say, in sections of frozen dataclasses. The CLI is generated from these fields:
the annotation gives the type and the help, the name gives the flag (`max_model_len` ->
`--max-model-len`). `None` or `"auto"` means: let `resolve()` decide.
"""

from __future__ import annotations

import dataclasses
import os
from dataclasses import dataclass, field
from os import PathLike
from typing import Annotated, Any, Literal

from baton.core.errors import ConfigError
from baton.core.kinds import wrong_kind

DType = Literal["auto", "float32", "bfloat16", "float16", "float64"]


@dataclass(frozen=True)
class ModelOptions:
    """Which model, and how its weights become tensors."""

    model: Annotated[str, "folder, GGUF file, hub id or embedded name (see `baton models list`)"]
    tokenizer: Annotated[str | None, "folder or hub id of the tokenizer, if not the model's"] = None
    revision: Annotated[str | None, "hub revision of the model"] = None
    dtype: Annotated[DType, "dtype of weights and activations"] = "auto"
    load_format: Annotated[
        Literal["auto", "safetensors", "gguf", "dummy"],
        "dummy: seeded random weights, no checkpoint read",
    ] = "auto"
    max_model_len: Annotated[int | None, "longest prompt plus output, in tokens"] = None
    seed: Annotated[int, "seed of dummy weights and of requests without one"] = 0
    skip_tokenizer_init: Annotated[bool, "serve token ids only"] = False
    mtp: Annotated[
        bool, "load the MTP module, to examine it (`baton eval`); steps then run eagerly"
    ] = False


@dataclass(frozen=True)
class CacheOptions:
    """KV cache: pages, their format, how much memory they may take."""

    block_size: Annotated[int | None, "tokens per page (64 on GPU, 16 on CPU)"] = None
    kv_cache_dtype: Annotated[
        Literal["auto", "float32", "bfloat16", "float16", "float64"], "KV format"
    ] = "auto"
    kv_cache_memory: Annotated[str | None, "KV pool size, for example 2GiB"] = None
    num_kv_pages: Annotated[int | None, "KV pool size in pages; overrides kv_cache_memory"] = None
    gpu_memory_utilization: Annotated[float, "share of GPU memory the engine may use"] = 0.9
    enable_prefix_caching: Annotated[bool, "share pages between requests with equal prefixes"] = (
        True
    )


@dataclass(frozen=True)
class SchedulerOptions:
    """What runs in a step, and what may wait."""

    max_num_seqs: Annotated[int | None, "requests running at once"] = None
    max_num_batched_tokens: Annotated[
        int | None, "most prompt tokens in one step; decodes come on top"
    ] = None
    max_num_queued_reqs: Annotated[int, "waiting requests before 429"] = 1024
    max_num_queued_tokens: Annotated[int | None, "waiting uncached prompt tokens before 429"] = None
    step_time: Annotated[
        str, "longest step while others decode, prefill beside them included (TPOT objective)"
    ] = "auto"
    step_memory: Annotated[str | None, "most transient memory of one step, for example 1GiB"] = None
    async_scheduling: Annotated[bool, "plan the next step while one runs"] = True


@dataclass(frozen=True)
class ParallelOptions:
    """How the model is spread over devices."""

    tensor_parallel_size: Annotated[int, "ranks that share every layer"] = 1


@dataclass(frozen=True)
class DeviceOptions:
    """Where and with which implementations the model runs."""

    device: Annotated[Literal["auto", "cpu", "cuda"], "device type"] = "auto"
    attention_backend: Annotated[str, 'auto, a name, or "prefill,decode" names'] = "auto"
    enforce_eager: Annotated[bool, "run every step eagerly: no CUDA graphs"] = False
    threads: Annotated[int | None, "CPU threads per rank"] = None


@dataclass(frozen=True)
class EngineOptions:
    """Every engine option, by section. `EngineOptions.of(model, **flat)` takes flat names."""

    model: ModelOptions
    cache: CacheOptions = field(default_factory=CacheOptions)
    scheduler: SchedulerOptions = field(default_factory=SchedulerOptions)
    parallel: ParallelOptions = field(default_factory=ParallelOptions)
    device: DeviceOptions = field(default_factory=DeviceOptions)
    expect_fingerprint: Annotated[
        str | None, "refuse to start unless the fingerprint is this JSON, file or digest"
    ] = None

    @staticmethod
    def of(model: str | PathLike[str], **flat: Any) -> EngineOptions:
        """Options from flat names, as in `LLM(model, max_model_len=4096)`. What may name a file or
        folder may be a path object.

        Raises:
            ConfigError: for a name that no section has, or a value of another type than it needs.
        """
        flat["model"] = model
        for key in _PATHS & flat.keys():
            if isinstance(flat[key], PathLike):
                flat[key] = os.fspath(flat[key])
        expect = flat.pop("expect_fingerprint", None)
        if not isinstance(expect, str | None):
            kind = type(expect).__name__
            raise ConfigError(f"engine option expect_fingerprint: expected str, got {kind}")
        parts: dict[str, dict[str, Any]] = {name: {} for name in SECTIONS}
        owner = {f.name: name for name, cls in SECTIONS.items() for f in dataclasses.fields(cls)}
        for key, value in flat.items():
            if key not in owner:
                raise ConfigError(f"unknown engine option {key!r}: one of {sorted(owner)}")
            parts[owner[key]][key] = value
        for name, cls in SECTIONS.items():
            if (wrong := wrong_kind(cls, parts[name])) is not None:
                raise ConfigError(f"engine option {wrong[1]}")
        sections = {name: cls(**parts[name]) for name, cls in SECTIONS.items()}
        return EngineOptions(**sections, expect_fingerprint=expect)


#: options that may name a file or folder
_PATHS = frozenset({"model", "tokenizer", "expect_fingerprint"})
SECTIONS: dict[str, type[Any]] = {
    "model": ModelOptions,
    "cache": CacheOptions,
    "scheduler": SchedulerOptions,
    "parallel": ParallelOptions,
    "device": DeviceOptions,
}
