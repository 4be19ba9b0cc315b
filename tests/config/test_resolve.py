"""resolve(): every default, every refusal, and a reason for each choice."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from baton.config.engine import EngineConfig, Machine
from baton.config.model import GQAConfig, MLAConfig, ModelConfig, RopeConfig
from baton.config.options import EngineOptions
from baton.config.resolve import resolve
from baton.core.errors import ConfigError

GiB = 2**30
CPU = Machine("cpu", "a processor", cores=8, host_memory=32 * GiB, device_memory=32 * GiB)
GPU = Machine("cuda", "an H200", 16, 128 * GiB, device_memory=140 * GiB, num_devices=2)
MODEL = ModelConfig(
    family="llama",
    vocab_size=1000,
    hidden_size=64,
    num_layers=2,
    intermediate_size=128,
    attention=GQAConfig(num_heads=8, num_kv_heads=4, head_dim=8),
    rope=RopeConfig(dim=8),
    norm_eps=1e-5,
    max_position=131072,
)
TOKEN_BYTES = {"float32": 40960, "bfloat16": 20480, "float16": 20480, "float64": 81920}


def run(
    machine: Machine = CPU, model: ModelConfig = MODEL, weight_bytes: int = GiB, **flat: Any
) -> EngineConfig:
    return resolve(
        EngineOptions.of("m", **flat),
        model,
        machine,
        model_path="/m",
        load_format="dummy",
        kv_bytes_per_page=lambda size, dtype: size * TOKEN_BYTES[dtype],
        weight_elements=weight_bytes // 4 if machine.device == "cpu" else weight_bytes // 2,
    )


def test_cpu_defaults() -> None:
    config = run()
    assert config.device == "cpu"
    assert config.dtype == config.kv_dtype == "float32"
    assert config.page_size == 16
    assert config.num_pages == 4 * GiB // (16 * 40960)
    assert config.max_model_len == config.num_pages * 16 < MODEL.max_position
    assert (config.max_num_seqs, config.max_num_batched_tokens) == (64, 2048)
    assert (config.step_time, config.step_memory) == (0.2, 4 * GiB)
    assert config.threads == 8


def test_gpu_defaults() -> None:
    config = run(GPU)
    assert config.device == "cuda"
    assert config.dtype == config.kv_dtype == "bfloat16"
    assert config.page_size == 64
    assert config.num_pages == 0
    assert config.max_model_len == MODEL.max_position
    assert (config.max_num_seqs, config.max_num_batched_tokens) == (256, 16384)
    assert (config.step_time, config.step_memory) == (0.05, 8 * GiB)


def test_cpu_can_be_asked_for_on_a_gpu_machine() -> None:
    config = run(GPU, device="cpu")
    assert (config.device, config.dtype, config.page_size) == ("cpu", "float32", 16)


def test_every_automatic_choice_has_a_reason_and_an_explicit_one_has_none() -> None:
    automatic = {d.name for d in run().decisions}
    assert automatic == {
        "device", "dtype", "block_size", "kv_cache_dtype", "max_num_seqs",
        "max_num_batched_tokens", "num_kv_pages", "max_model_len", "step_time", "step_memory",
        "max_num_queued_tokens", "threads",
    }  # fmt: skip
    assert all(d.value and d.reason for d in run().decisions)
    explicit = run(
        device="cpu", dtype="float32", block_size=16, kv_cache_dtype="float32", max_num_seqs=4,
        max_num_batched_tokens=64, num_kv_pages=100, max_model_len=512, step_time="50ms",
        step_memory="1GiB", max_num_queued_tokens=9, threads=2,
    )  # fmt: skip
    assert explicit.decisions == ()
    assert (explicit.step_time, explicit.step_memory) == (0.05, GiB)


def test_the_lowered_length_says_so() -> None:
    reasons = {d.name: d.reason for d in run().decisions}
    assert "131072" in reasons["max_model_len"]
    assert "KV pool" in reasons["max_model_len"]


def test_a_small_model_gets_no_more_pages_than_its_sequences_can_fill() -> None:
    small = dataclasses.replace(MODEL, max_position=100)
    assert run(model=small).num_pages == 64 * 7
    assert run(model=small, max_num_seqs=3).num_pages == 3 * 7


def test_a_quarter_of_little_memory() -> None:
    little = dataclasses.replace(CPU, host_memory=4 * GiB)
    assert run(little).num_pages == GiB // (16 * 40960)


def test_ranks_share_the_host() -> None:
    config = run(tensor_parallel_size=4)
    assert config.num_pages == 2 * GiB // (16 * 40960)
    assert config.threads == 2


def test_automatic_batch_follows_the_explicit_half() -> None:
    assert run(max_num_batched_tokens=8).max_num_seqs == 8
    assert run(max_num_seqs=4096).max_num_batched_tokens == 4096


def test_mla_has_no_kv_heads_to_divide() -> None:
    mla = MLAConfig(6, None, 32, 8, 8, 8)
    assert run(model=dataclasses.replace(MODEL, attention=mla), tensor_parallel_size=3)


def test_small_pages_are_for_cpus() -> None:
    assert run(block_size=1).page_size == 1
    assert run(block_size=48).page_size == 48
    assert run(GPU, block_size=128).page_size == 128


@pytest.mark.parametrize(
    "flat, words",
    [
        ({"max_model_len": 131073}, ["--max-model-len 131073", "131072"]),
        ({"max_model_len": 131072}, ["--max-model-len 131072", "holds 104848 tokens"]),
        ({"max_model_len": 0}, ["--max-model-len", "got 0"]),
        ({"tensor_parallel_size": 3}, ["--tensor-parallel-size 3", "8 attention heads"]),
        ({"tensor_parallel_size": 0}, ["--tensor-parallel-size", "got 0"]),
        ({"block_size": 24}, ["--block-size 24"]),
        ({"block_size": -16}, ["--block-size", "-16"]),
        ({"device": "cuda"}, ["--device cuda"]),
        ({"kv_cache_memory": "much"}, ["--kv-cache-memory", "much"]),
        ({"kv_cache_memory": "1KiB"}, ["--kv-cache-memory", "holds no page", "640.00 KiB"]),
        ({"kv_cache_memory": "64GiB"}, ["64.00 GiB", "32.00 GiB", "--kv-cache-memory"]),
        ({"num_kv_pages": 0}, ["--num-kv-pages"]),
        ({"gpu_memory_utilization": 0.0}, ["--gpu-memory-utilization", "(0, 1]"]),
        ({"gpu_memory_utilization": 1.01}, ["--gpu-memory-utilization"]),
        ({"gpu_memory_utilization": float("nan")}, ["--gpu-memory-utilization"]),
        ({"max_num_seqs": 0}, ["--max-num-seqs"]),
        ({"max_num_batched_tokens": -1}, ["--max-num-batched-tokens"]),
        ({"max_num_seqs": 9, "max_num_batched_tokens": 8}, ["8", "--max-num-seqs 9"]),
        ({"max_num_queued_reqs": 0}, ["--max-num-queued-reqs"]),
        ({"max_num_queued_tokens": 0}, ["--max-num-queued-tokens"]),
        ({"step_time": "soon"}, ["--step-time", "soon"]),
        ({"step_time": "0s"}, ["--step-time"]),
        ({"step_memory": "x"}, ["--step-memory"]),
        ({"step_memory": "0"}, ["--step-memory"]),
        ({"threads": 0}, ["--threads"]),
        ({"threads": 100_000}, ["--threads", "1024"]),
        ({"attention_backend": "a,b,c"}, ["--attention-backend"]),
        ({"attention_backend": "a,"}, ["--attention-backend"]),
        ({"weight_bytes": 40 * GiB}, ["40.00 GiB", "32.00 GiB"]),
    ],
)  # fmt: skip
def test_refusals_name_the_flag_and_the_numbers(flat: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(ConfigError) as error:
        run(**flat)
    for word in words:
        assert word in str(error.value)


def test_gpu_refusals() -> None:
    with pytest.raises(ConfigError, match="multiples of 64"):
        run(GPU, block_size=16)
    with pytest.raises(ConfigError, match="2 CUDA device"):
        run(GPU, tensor_parallel_size=4)
    with pytest.raises(ConfigError, match=r"130\.00 GiB"):
        run(GPU, weight_bytes=130 * GiB)
