"""From what the user said and what the machine is to the final configuration, with reasons.

`resolve()` is pure: it reads no file, no environment and no device, so every decision can be
tested and explained (`baton doctor MODEL`). Each value is decided once; no flag rewrites another.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from baton.config.engine import Decision, EngineConfig, Machine
from baton.config.model import LocalConfig, ModelConfig
from baton.config.options import CacheOptions, EngineOptions, SchedulerOptions
from baton.core.errors import ConfigError
from baton.core.units import format_bytes, format_seconds, parse_bytes, parse_seconds

T = TypeVar("T")
#: far above what helps, below what a process may start
MAX_THREADS = 1024
GiB = 2**30


class _Decisions(list[Decision]):
    def choose(self, name: str, value: T, reason: str, shown: str | None = None) -> T:
        """Record an automatic choice and return its value."""
        self.append(Decision(name, str(value) if shown is None else shown, reason))
        return value


def resolve(
    options: EngineOptions,
    model: ModelConfig,
    machine: Machine,
    *,
    model_path: str,
    load_format: str,
    kv_bytes_per_page: Callable[[int, str], int],
    weight_elements: int,
) -> EngineConfig:
    """Decide everything that the options leave open, and refuse what cannot work.

    Args:
        machine: measured for `options.device.device`.
        load_format: "safetensors", "gguf" or "dummy"; what `model_path` turned out to be.
        kv_bytes_per_page: bytes of one KV page over all layers of one rank, from
            `(page_size, kv_dtype)`.
        weight_elements: numbers in one rank's weights.

    Raises:
        ConfigError: naming the flag and the numbers that do not fit.
    """
    made = _Decisions()
    device = _device(options, machine, made)
    ranks = _ranks(options, model, device, machine)
    dtype = _dtype(options, model, device, made)
    page_size = _page_size(options.cache, device, model.local, made)
    kv_dtype = _kv_dtype(options.cache, dtype, made)
    seqs, tokens = _batch(options.scheduler, device, made)
    wanted = _wanted_len(options, model)
    utilization = _utilization(options.cache)
    weight_bytes = weight_elements * itemsize(dtype)
    budget = _memory(device, machine, ranks, utilization, weight_bytes)
    page_bytes = kv_bytes_per_page(page_size, kv_dtype)
    most = seqs * -(-wanted // page_size)
    pages = _num_pages(options.cache, device, budget, weight_bytes, page_bytes, most, made)
    max_len = _max_len(options, model, pages, page_size, page_bytes, made)
    step_time, step_memory = _step_limits(options.scheduler, device, machine, ranks, made)
    return EngineConfig(
        model_path=model_path,
        load_format=load_format,
        seed=options.model.seed,
        model=model,
        dtype=dtype,
        max_model_len=max_len,
        page_size=page_size,
        kv_dtype=kv_dtype,
        num_pages=pages,
        gpu_memory_utilization=utilization,
        prefix_caching=options.cache.enable_prefix_caching,
        max_num_seqs=seqs,
        max_num_batched_tokens=tokens,
        max_num_queued_reqs=_positive(
            "--max-num-queued-reqs", options.scheduler.max_num_queued_reqs
        ),
        max_num_queued_tokens=_queued_tokens(options.scheduler, max_len, made),
        step_time=step_time,
        step_memory=step_memory,
        async_scheduling=options.scheduler.async_scheduling,
        tensor_parallel_size=ranks,
        device=device,
        attention_backend=_attention_backend(options),
        enforce_eager=options.device.enforce_eager,
        threads=_threads(options, machine, ranks, made),
        decisions=tuple(made),
    )


def itemsize(dtype: str) -> int:
    """Bytes of one number: `"bfloat16" -> 2`."""
    return {"float64": 8, "float32": 4}.get(dtype, 2)


def _positive(flag: str, value: int) -> int:
    if value < 1:
        raise ConfigError(f"{flag} must be at least 1, got {value}")
    return value


def _bytes(flag: str, text: str) -> int:
    try:
        return _positive(flag, parse_bytes(text))
    except ValueError as error:
        raise ConfigError(f"{flag}: {error}") from None


def _device(options: EngineOptions, machine: Machine, made: _Decisions) -> str:
    asked = options.device.device
    if asked == "auto":
        have = "a CUDA device is present" if machine.device == "cuda" else "no CUDA device here"
        return made.choose("device", machine.device, have)
    if asked == "cuda" and machine.device != "cuda":
        raise ConfigError(f"--device cuda: this machine was measured as {machine.device_name!r}")
    return asked


def _ranks(options: EngineOptions, model: ModelConfig, device: str, machine: Machine) -> int:
    flag = "--tensor-parallel-size"
    ranks = _positive(flag, options.parallel.tensor_parallel_size)
    heads = model.attention.num_heads
    if heads % ranks:
        raise ConfigError(f"{flag} {ranks} does not divide the model's {heads} attention heads")
    if device == "cuda" and ranks > machine.num_devices:
        raise ConfigError(f"{flag} {ranks}: this machine has {machine.num_devices} CUDA device(s)")
    return ranks


def _dtype(options: EngineOptions, model: ModelConfig, device: str, made: _Decisions) -> str:
    if options.model.dtype != "auto":
        return options.model.dtype
    if device == "cuda":
        return made.choose("dtype", model.dtype, "the dtype of the model's weights")
    reason = "exact, and the fastest on CPUs without bfloat16 units"
    return made.choose("dtype", "float32", reason)


def _page_size(
    cache: CacheOptions, device: str, local: LocalConfig | None, made: _Decisions
) -> int:
    size = cache.block_size
    if size is None:
        if device == "cuda":
            return made.choose("block_size", 64, "GPU kernels read whole pages of 64 tokens")
        return made.choose("block_size", 16, "small pages waste little on a CPU")
    _positive("--block-size", size)
    if device == "cuda" and size % 64:
        raise ConfigError(f"--block-size {size}: pages on a GPU are multiples of 64 tokens")
    if size % 16 and size & (size - 1):
        raise ConfigError(f"--block-size {size}: a multiple of 16 or a power of two is needed")
    if local is not None and local.block % size:
        raise ConfigError(
            f"--block-size {size}: the model attends to blocks of {local.block} tokens, which "
            "pages must divide"
        )
    return size


def _kv_dtype(cache: CacheOptions, dtype: str, made: _Decisions) -> str:
    if cache.kv_cache_dtype != "auto":
        return cache.kv_cache_dtype
    return made.choose("kv_cache_dtype", dtype, "same as the compute dtype")


def _batch(scheduler: SchedulerOptions, device: str, made: _Decisions) -> tuple[int, int]:
    """`(max_num_seqs, max_num_batched_tokens)`; every running sequence fits one step."""
    seqs, tokens = scheduler.max_num_seqs, scheduler.max_num_batched_tokens
    if seqs is not None:
        _positive("--max-num-seqs", seqs)
    if tokens is not None:
        _positive("--max-num-batched-tokens", tokens)
    if seqs is not None and tokens is not None and tokens < seqs:
        raise ConfigError(
            f"--max-num-batched-tokens {tokens} is less than --max-num-seqs {seqs}: "
            "each running sequence needs one token of a step"
        )
    usual_seqs, usual_tokens = (256, 16384) if device == "cuda" else (64, 2048)
    if seqs is None:
        fitting = usual_seqs if tokens is None else min(usual_seqs, tokens)
        seqs = made.choose("max_num_seqs", fitting, f"usual for {device}, at most a step's tokens")
    if tokens is None:
        enough = max(usual_tokens, seqs)
        reason = f"usual for {device}, at least one for each sequence"
        tokens = made.choose("max_num_batched_tokens", enough, reason)
    return seqs, tokens


def _wanted_len(options: EngineOptions, model: ModelConfig) -> int:
    """Length to plan for: the user's, or else the model's longest."""
    length = options.model.max_model_len
    if length is None:
        return model.max_position
    _positive("--max-model-len", length)
    if length > model.max_position:
        raise ConfigError(
            f"--max-model-len {length} is more than the {model.max_position} positions "
            f"of this {model.family} model"
        )
    return length


def _memory(
    device: str, machine: Machine, ranks: int, utilization: float, weight_bytes: int
) -> int:
    """Bytes one rank may use; refuses weights that do not fit."""
    if device == "cuda":
        budget, what = int(machine.device_memory * utilization), "GPU memory"
    else:
        budget, what = machine.host_memory // ranks, "memory"
    if weight_bytes >= budget:
        raise ConfigError(
            f"the weights take {format_bytes(weight_bytes)} on each of {ranks} rank(s), but only "
            f"{format_bytes(budget)} of {what} may be used there"
        )
    return budget


def _num_pages(
    cache: CacheOptions,
    device: str,
    budget: int,
    weight_bytes: int,
    page_bytes: int,
    most: int,
    made: _Decisions,
) -> int:
    asked = _asked_pages(cache, page_bytes)
    if asked is not None:
        if asked * page_bytes > budget - weight_bytes:
            raise ConfigError(
                f"a KV pool of {_pool(asked, page_bytes)} and weights of "
                f"{format_bytes(weight_bytes)} do not fit the {format_bytes(budget)} of memory "
                "that may be used: lower --kv-cache-memory or --num-kv-pages"
            )
        return asked
    if device == "cuda":
        reason = "free memory is measured after the weights are loaded"
        return made.choose("num_kv_pages", 0, reason, "measured later")
    size = min(4 * GiB, budget // 4, budget - weight_bytes)
    pages = max(1, size // page_bytes)
    if pages > most:
        reason = "every running sequence at full length"
        return made.choose("num_kv_pages", most, reason, _pool(most, page_bytes))
    reason = f"least of 4 GiB and a quarter of the {format_bytes(budget)} available"
    return made.choose("num_kv_pages", pages, reason, _pool(pages, page_bytes))


def _asked_pages(cache: CacheOptions, page_bytes: int) -> int | None:
    if cache.num_kv_pages is not None:
        return _positive("--num-kv-pages", cache.num_kv_pages)
    if cache.kv_cache_memory is None:
        return None
    size = _bytes("--kv-cache-memory", cache.kv_cache_memory)
    if size < page_bytes:
        raise ConfigError(
            f"--kv-cache-memory {cache.kv_cache_memory} holds no page: "
            f"one takes {format_bytes(page_bytes)}"
        )
    return size // page_bytes


def _pool(pages: int, page_bytes: int) -> str:
    return f"{pages} pages, {format_bytes(pages * page_bytes)}"


def _max_len(
    options: EngineOptions,
    model: ModelConfig,
    pages: int,
    page_size: int,
    page_bytes: int,
    made: _Decisions,
) -> int:
    holds = pages * page_size
    asked = options.model.max_model_len
    if asked is not None:
        if 0 < holds < asked:
            raise ConfigError(
                f"--max-model-len {asked} does not fit the KV pool, which holds {holds} tokens "
                f"({_pool(pages, page_bytes)}): raise --kv-cache-memory or lower --max-model-len"
            )
        return asked
    if 0 < holds < model.max_position:
        reason = f"lowered from the model's {model.max_position} to what the KV pool holds"
        return made.choose("max_model_len", holds, reason)
    return made.choose("max_model_len", model.max_position, "the model's own limit")


def _step_limits(
    scheduler: SchedulerOptions, device: str, machine: Machine, ranks: int, made: _Decisions
) -> tuple[float, int]:
    """`(step_time, step_memory)` in seconds and bytes."""
    if scheduler.step_time == "auto":
        usual = 0.05 if device == "cuda" else 0.2
        reason = f"a pause between tokens that readers accept on {device}"
        seconds = made.choose("step_time", usual, reason, format_seconds(usual))
    else:
        try:
            seconds = parse_seconds(scheduler.step_time)
        except ValueError as error:
            raise ConfigError(f"--step-time: {error}") from None
        if seconds <= 0:
            raise ConfigError(f"--step-time must be greater than 0, got {scheduler.step_time}")
    if scheduler.step_memory is not None:
        return seconds, _bytes("--step-memory", scheduler.step_memory)
    whole = machine.device_memory if device == "cuda" else machine.host_memory // ranks
    size = min(whole // 8, 8 * GiB)
    reason = f"least of 8 GiB and an eighth of the {format_bytes(whole)} available"
    return seconds, made.choose("step_memory", size, reason, format_bytes(size))


def _utilization(cache: CacheOptions) -> float:
    share = cache.gpu_memory_utilization
    if not 0 < share <= 1:
        raise ConfigError(f"--gpu-memory-utilization must be in (0, 1], got {share}")
    return share


def _queued_tokens(scheduler: SchedulerOptions, max_len: int, made: _Decisions) -> int:
    if scheduler.max_num_queued_tokens is not None:
        return _positive("--max-num-queued-tokens", scheduler.max_num_queued_tokens)
    reason = "no limit of its own: --max-num-queued-reqs of the longest prompts"
    return made.choose("max_num_queued_tokens", scheduler.max_num_queued_reqs * max_len, reason)


def _attention_backend(options: EngineOptions) -> str:
    name = options.device.attention_backend
    parts = name.split(",")
    if len(parts) > 2 or not all(part.strip() for part in parts):
        raise ConfigError(f'--attention-backend {name!r}: write one name or "prefill,decode"')
    return name


def _threads(options: EngineOptions, machine: Machine, ranks: int, made: _Decisions) -> int:
    if options.device.threads is not None:
        if options.device.threads > MAX_THREADS:
            raise ConfigError(
                f"--threads must be at most {MAX_THREADS}, got {options.device.threads}"
            )
        return _positive("--threads", options.device.threads)
    reason = f"{machine.cores} cores over {ranks} rank(s)"
    return made.choose("threads", max(1, machine.cores // ranks), reason)
