"""The final configuration: every value concrete, nothing left to decide."""

from __future__ import annotations

from dataclasses import dataclass

from baton.config.model import ModelConfig


@dataclass(frozen=True)
class Machine:
    """What this machine is, measured once by the caller of `resolve()`."""

    device: str  # "cpu" or "cuda"
    device_name: str
    cores: int
    host_memory: int  # bytes available on the host
    device_memory: int  # bytes free on the device (host memory when device is "cpu")
    num_devices: int = 1


@dataclass(frozen=True)
class Decision:
    """One value that resolve() chose, and why, for people to read."""

    name: str
    value: str
    reason: str


@dataclass(frozen=True)
class EngineConfig:
    """Final engine configuration. Sizes in bytes, times in seconds, lengths in tokens.

    `num_pages` 0 means: measure free memory after loading and take `gpu_memory_utilization` of it
    (GPU only). `step_time` bounds a step that has decodes in it; `step_memory` bounds transient
    activations of any step.
    """

    model_path: str
    load_format: str
    seed: int
    model: ModelConfig
    dtype: str
    max_model_len: int
    page_size: int
    kv_dtype: str
    num_pages: int
    gpu_memory_utilization: float
    prefix_caching: bool
    max_num_seqs: int
    max_num_batched_tokens: int
    max_num_queued_reqs: int
    max_num_queued_tokens: int
    step_time: float
    step_memory: int
    async_scheduling: bool
    tensor_parallel_size: int
    device: str
    attention_backend: str
    enforce_eager: bool
    threads: int
    decisions: tuple[Decision, ...] = ()
