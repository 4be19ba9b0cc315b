"""From what the user said to a runner that can run: source, config, weights, pages, fingerprint."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, replace

import torch

from baton import __version__
from baton.config.engine import EngineConfig
from baton.config.fingerprint import Fingerprint, parse_expected
from baton.config.machine import measure_machine
from baton.config.model import MLAConfig
from baton.config.options import EngineOptions
from baton.config.resolve import itemsize, resolve
from baton.core import env
from baton.core.errors import ConfigError
from baton.core.kv import KVShape
from baton.core.log import get_logger
from baton.core.progress import Progress
from baton.core.units import format_bytes, format_seconds
from baton.engine.core import EngineCore
from baton.engine.executor import Executor, Ranks
from baton.engine.memory import pool_views, rehearse, size_pool, widest
from baton.engine.source import find_source, tokenizer_of
from baton.kv.format import bytes_per_page
from baton.kv.manager import KVManager
from baton.models import registry
from baton.models.decoder import CausalLM
from baton.models.load import Matched, dummy_weights, match_weights, materialise
from baton.models.source import (
    ModelSource,
    open_checkpoint,
    read_config,
    weights_digest,
)
from baton.models.tokenizer import Tokenizer
from baton.ops.host import keep_freed_memory
from baton.ops.precompile import wake_compiler
from baton.parallel.group import LocalGroup, ProcessGroup, ShapeGroup, make_group
from baton.runner.probes import Probe, probes
from baton.runner.runner import Runner
from baton.scheduler.cost import BytesModel, CostModel, Features, pairs
from baton.scheduler.scheduler import Scheduler

log = get_logger("engine")
Group = LocalGroup | ProcessGroup


@dataclass
class Prepared:
    """Decided on the host, nothing on the device yet."""

    options: EngineOptions
    config: EngineConfig
    source: ModelSource


@dataclass
class Built:
    """One rank, ready to run. `config` has the pool's final size; `held_context` is as in
    AttentionBackend."""

    config: EngineConfig
    runner: Runner
    held_context: float
    fingerprint: Fingerprint
    close: Callable[[], None]


def prepare(options: EngineOptions) -> Prepared:
    """Find the model (fetching it if need be), read its config and decide everything else.

    Raises:
        ConfigError, ModelError: naming the flag or the file at fault.
    """
    if options.expect_fingerprint is not None:
        parse_expected(options.expect_fingerprint)  # a wrong one shows before anything is loaded
    model, source = options.model, find_source(options)
    model_config = registry.parse(read_config(source), str(source.path))
    if options.device.device != "cpu":  # and there is a model: a process ends with its last thread
        threading.Thread(target=wake_compiler, name="baton-compiler").start()
    if model.mtp:
        if not model_config.num_mtp_layers:
            raise ConfigError(f"--mtp: {source.path} has no MTP module")
        model_config = replace(model_config, mtp=True)
    size = options.parallel.tensor_parallel_size
    if size < 1:
        raise ConfigError(f"--tensor-parallel-size must be at least 1, got {size}")
    shape = registry.build(model_config, model_config.dtype, "cpu", ShapeGroup(size))
    auto = "gguf" if source.is_gguf else "safetensors"
    config = resolve(
        options,
        model_config,
        measure_machine(options.device.device),
        model_path=str(source.path),
        load_format=auto if model.load_format == "auto" else model.load_format,
        kv_bytes_per_page=lambda page, dtype: bytes_per_page(shape.kv_shapes, page, dtype),
        weight_elements=sum(p.numel() for p in shape.parameters()),
    )
    return Prepared(options, config, source)


def read_tokenizer(prepared: Prepared) -> Tokenizer | None:
    """The model's tokenizer; None with `--skip-tokenizer-init`."""
    return tokenizer_of(prepared.options, prepared.source)


def build_rank(
    prepared: Prepared,
    rank: int,
    size: int,
    rendezvous: str,
    *,
    tokenizer: str,
    meet: Callable[[Callable[[], Group]], Group] | None = None,
) -> Built:
    """Load one rank: weights, KV pages, runner.

    Args:
        rendezvous: torch.distributed init method; not used when `size` is 1.
        tokenizer: digest of the tokenizer, "" without one.
        meet: calls what joins the group of all ranks, which waits for every one of them.
    """
    config = prepared.config
    device = _device(config, rank)

    def join() -> Group:
        return make_group(rank, size, rendezvous, device)

    group = join() if meet is None else meet(join)
    begin = time.perf_counter()
    model = registry.build(config.model, config.dtype, device, group, config.attention_backend)
    fingerprint = fingerprint_of(prepared, model.kv_shapes, tokenizer)
    if prepared.options.expect_fingerprint is not None:  # before minutes of loading
        fingerprint.require(parse_expected(prepared.options.expect_fingerprint))
    matched = _match(model, prepared)
    materialise(model)
    sized, held = config.num_pages == 0, model.attention.prefill.held_context(config.page_size)
    loaded = torch.cuda.memory_allocated(device) if sized else 0
    with ThreadPoolExecutor(1) as beside:  # weights wait for the disk, compilers do not
        rehearsed = beside.submit(rehearse, config, model, device)
        _load(model, prepared, matched, show=rank == 0)
        _wait(rehearsed, "kernels and libraries", show=rank == 0)
    if sized:
        config = size_pool(config, model, device, group, widest(config, held), loaded)
    views = pool_views(config, model, device)
    if rank == 0:
        weights = sum(p.numel() * p.element_size() for p in model.parameters())
        log.info(
            "%s: %s of weights in %s; KV pool %d pages of %d tokens",
            config.model.family,
            format_bytes(weights),
            format_seconds(time.perf_counter() - begin),
            config.num_pages,
            config.page_size,
        )
    runner = Runner(config, model, views)
    runner.capture()
    return Built(config, runner, held, fingerprint, group.close)


def _wait(work: Future[None], what: str, show: bool) -> None:
    """Until it is done, saying so if that takes its time."""
    if show and not wait([work], timeout=1.0).done:
        with Progress("items") as progress:
            progress(0, 1, what)
            work.result()
            progress(1, 1, what)
    work.result()


def _device(config: EngineConfig, rank: int) -> torch.device:
    """The rank's own, which this process uses from now on."""
    torch.set_num_threads(config.threads)
    if config.device != "cuda":
        keep_freed_memory()
        return torch.device("cpu")
    device = torch.device(f"cuda:{rank}")
    torch.cuda.set_device(device)
    return device


def fingerprint_of(prepared: Prepared, kv_shapes: Sequence[KVShape], tokenizer: str) -> Fingerprint:
    """The fingerprint of the engine that `prepared` becomes; arguments as in `Fingerprint.of`."""
    config = prepared.config
    return Fingerprint.of(
        engine=__version__,
        model=config.model,
        weights=weights_digest(prepared.source, prepared.options.model.load_format, config.seed),
        tokenizer=tokenizer,
        dtype=config.dtype,
        kv_dtype=config.kv_dtype,
        page_size=config.page_size,
        kv_shapes=kv_shapes,
        tp_size=config.tensor_parallel_size,
    )


def build_core(
    prepared: Prepared, tokenizer: Tokenizer | None = None, folder: str | None = None
) -> tuple[EngineCore, Fingerprint]:
    """Every rank loaded and agreed, step costs measured, ready for requests.

    Args:
        folder: where to make the folder that ranks meet in; the system's unless given.

    Raises:
        Unavailable: another rank ended, for a reason that it logged.
        FingerprintMismatch: a rank, or `--expect-fingerprint`, differs.
    """
    options, size = prepared.options, prepared.config.tensor_parallel_size
    digest = "" if tokenizer is None else tokenizer.digest
    ranks = Ranks(options, digest, size, folder) if size > 1 else None
    try:
        rendezvous = "" if ranks is None else ranks.rendezvous
        meet = None if ranks is None else ranks.meet
        built = build_rank(prepared, 0, size, rendezvous, tokenizer=digest, meet=meet)
        if ranks is not None:
            ranks.await_ready(built.fingerprint)
    except BaseException:
        if ranks is not None:
            ranks.close()
        raise
    executor = Executor(built.runner, ranks, built.close)
    config = built.config
    kv = KVManager(
        config.num_pages,
        config.page_size,
        built.fingerprint.digest.encode(),
        config.prefix_caching,
        track_freed=env.DEBUG.get(),
        looks_ahead=config.model.mtp,
    )
    sized = prepared.config.num_pages == 0
    cost = CostModel(bytes_model(config, built.held_context, measured=sized))
    try:
        measure_cost(cost, config, executor)
    except BaseException:
        executor.close()
        raise
    log.info("fingerprint %s", built.fingerprint.digest)
    # What is alive now lives as long as the engine: full collections need not stop the loop to
    # walk it.
    gc.collect()
    gc.freeze()
    return EngineCore(config, Scheduler(config, kv, cost), executor), built.fingerprint


def measure_cost(cost: CostModel, config: EngineConfig, executor: Executor) -> None:
    """Fit the cost model on synthetic steps, with context behind the chunk."""
    found = probes(
        max_tokens=config.max_num_batched_tokens,
        max_len=config.max_model_len,
        max_seqs=config.max_num_seqs,
        pool_tokens=config.num_pages * config.page_size,
        quick=config.device == "cpu",
    )
    for probe in found[:1]:
        executor.probe(probe)  # first calls allocate; they say nothing
    cost.fit([(_features(probe), executor.probe(probe)) for probe in found])


def _match(model: CausalLM, prepared: Prepared) -> Matched | None:
    """Where the model's weights are in the checkpoint, None for dummy ones. One that does not fit
    is refused here, before there is memory for it and before anything is compiled for it."""
    if prepared.config.load_format == "dummy":
        return None
    return match_weights(model, open_checkpoint(prepared.source))


def _load(model: CausalLM, prepared: Prepared, matched: Matched | None, *, show: bool) -> None:
    if matched is None:
        dummy_weights(model, prepared.config.seed)
    elif show:
        with Progress("items") as progress:
            matched.load(lambda done, total: progress(done, total, "weight tensors"))
    else:
        matched.load()


def _features(probe: Probe) -> Features:
    tokens = probe.seqs * probe.chunk
    if probe.chunk == 1:
        return Features(tokens, 0.0, probe.seqs * probe.context, probe.seqs)
    work, behind = pairs(probe.chunk, probe.context), float(probe.context)
    return Features(tokens, probe.seqs * work, 0.0, probe.seqs, probe.seqs * behind)


def bytes_model(config: EngineConfig, held_context: float, *, measured: bool) -> BytesModel:
    """What steps take.

    Args:
        held_context: as in AttentionBackend.
        measured: whether `config.step_memory` is what the widest step took, beside which the pool
            was sized; the account is scaled to it then.
    """
    model = transient_bytes(config)
    model.most_context = held_context
    if measured:
        probe = widest(config, held_context)
        model.scale = config.step_memory / model.predict(probe.chunk, probe.chunk + probe.context)
    return model


def transient_bytes(config: EngineConfig) -> BytesModel:
    """Activations of one layer per token, and the gathered context of one sequence, in bytes.

    Counts what is alive at once in the widest layer: residual, normed input, projections and the
    MLP's two halves (for routed experts, those of each that a token visits), each at most twice.
    """
    model, size = config.model, itemsize(config.dtype)
    heads = model.attention.num_heads
    if isinstance(model.attention, MLAConfig):
        spec = model.attention
        row = heads * (2 * spec.nope_dim + 2 * spec.rope_dim + spec.v_dim)
        stored = (
            spec.kv_lora_rank + spec.rope_dim + heads * (spec.nope_dim + spec.rope_dim + spec.v_dim)
        )
    else:
        row = heads * model.attention.head_dim * 2
        stored = 2 * model.attention.num_kv_heads * model.attention.head_dim
        row += stored
    wide = 3 * model.intermediate_size
    if model.moe is not None:
        visited = model.moe.top_k + model.moe.shared_experts
        routed = visited * (3 * model.moe.intermediate + 2 * model.hidden_size)
        apart = 0 if model.moe.shared_experts else model.moe.shared_intermediate
        wide = max(wide, routed + 3 * apart)
    return BytesModel(
        per_token=2.0 * size * (4 * model.hidden_size + row + wide),
        per_context_token=2.0 * size * stored,
    )
