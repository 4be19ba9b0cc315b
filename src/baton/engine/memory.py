"""How many KV pages a GPU can hold beside everything else, found by running the worst step.

Weights are there already. What is left is shared between the widest prefill with long context
behind it (a profile of new tokens only is blind to gathered context), CUDA graphs, and pages; so
the first two are measured on a small pool, and the pages get the rest.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from baton.config.engine import EngineConfig
from baton.config.resolve import itemsize
from baton.core.errors import ConfigError
from baton.core.forward import Model, TensorGroup
from baton.core.garbage import uncollected
from baton.core.kv import KVView
from baton.core.log import get_logger
from baton.core.units import format_bytes
from baton.kv.format import bytes_per_page, make_views
from baton.models.decoder import CausalLM
from baton.ops.precompile import precompiling
from baton.runner.probes import Probe
from baton.runner.runner import Runner

log = get_logger("memory")

#: Pages of the pool that steps are measured on; their contents do not matter.
TRIAL_PAGES = 64
#: Bytes that stay free for what torch does not account for (NCCL, cuBLAS, fragmentation).
MARGIN = 1 << 30
#: Context behind the measured chunk, at least, if the engine takes as much.
LONG = 131072


def widest(config: EngineConfig, held_context: float) -> Probe:
    """The step that takes most memory: the largest chunk, with so much context behind it that a
    workspace of `held_context` tokens is full."""
    chunk = min(config.max_num_batched_tokens, config.max_model_len)
    most = config.max_model_len - chunk
    return Probe(1, chunk, int(min(max(LONG, held_context), most)))


def pool_views(config: EngineConfig, model: Model, device: torch.device) -> list[KVView]:
    """Every layer's KV pages: the pool's, and one more as scrap, for padded rows."""
    return make_views(
        model.kv_shapes,
        config.num_pages + 1,
        config.page_size,
        config.kv_dtype,
        config.dtype,
        device,
    )


@dataclass(frozen=True)
class MemoryBudget:
    """Bytes on one GPU: `total`, of which `allowed` may be used; `weights` are loaded, and
    libraries with them; a step takes up to `step`, workspaces that stay included; a chunk between
    two steps keeps `kept`; graphs take `graphs`."""

    total: int
    allowed: int
    weights: int
    step: int
    kept: int
    graphs: int

    @property
    def pages(self) -> int:
        """What is left for KV pages; may be negative."""
        return self.allowed - self.weights - self.step - self.kept - self.graphs - MARGIN


def rehearse(config: EngineConfig, model: CausalLM, device: torch.device) -> None:
    """Load libraries and compile the kernels of all steps that can come. What the weights hold does
    not matter as long as it is finite, so this can go on in a thread of its own while they are
    loaded."""
    if device.type != "cuda":
        return
    torch.cuda.set_device(device)  # of this thread
    trial = replace(config, num_pages=TRIAL_PAGES)
    runner = Runner(trial, model.brief(), pool_views(trial, model, device))
    with uncollected(), precompiling():
        if not runner.slots.debug:  # its checks read what kernels have not written
            runner.rehearse()
        model.attention.warm_up()
    torch.cuda.synchronize(device)


def measure_budget(
    config: EngineConfig, model: Model, device: torch.device, step: Probe, loaded: int
) -> MemoryBudget:
    """Run the widest step and capture all graphs on a small pool, and see what they take.

    The step goes through one layer of each kind: a layer's activations are freed before the next
    one's are made, so more layers take more time and no more memory.

    Args:
        loaded: bytes that torch had allocated with the weights and nothing else.
    """
    trial = replace(config, num_pages=TRIAL_PAGES)
    pool = (TRIAL_PAGES + 1) * bytes_per_page(model.kv_shapes, config.page_size, config.kv_dtype)
    views = pool_views(trial, model, device)
    peak = _peak(Runner(trial, model.brief(), views), device, step) - loaded - pool
    runner = Runner(trial, model, views)
    stays = torch.cuda.memory_allocated(device) - loaded  # pool, slots, attention's workspaces
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    runner.capture()
    graphs = max(0, free - torch.cuda.mem_get_info(device)[0])
    runner.close()
    del runner, views
    torch.cuda.empty_cache()
    allowed = int(total * config.gpu_memory_utilization)
    weights = total - free - stays
    # Hidden states of a chunk on its way through the layers, and those normed.
    kept = 2 * step.chunk * config.model.hidden_size * itemsize(config.dtype)
    return MemoryBudget(total, allowed, weights, peak, kept, graphs)


def _peak(runner: Runner, device: torch.device, step: Probe) -> int:
    """Most bytes that are allocated at once while `step` runs."""
    runner.probe(Probe(1, min(16, step.chunk), 0))  # loads libraries, whose memory stays
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    runner.probe(step)
    return torch.cuda.max_memory_allocated(device)


def size_pool(
    config: EngineConfig,
    model: Model,
    device: torch.device,
    group: TensorGroup,
    step: Probe,
    loaded: int,
) -> EngineConfig:
    """The config with `num_pages`, `step_memory` and, if need be, a lower `max_model_len`; the
    least of all ranks, which must agree.

    Args:
        step: the widest one.
        loaded: as in `measure_budget`.

    Raises:
        ConfigError: nothing is left for pages; says what took the memory.
    """
    budget = measure_budget(config, model, device, step, loaded)
    page_bytes = bytes_per_page(model.kv_shapes, config.page_size, config.kv_dtype)
    enough = config.max_num_seqs * -(-config.max_model_len // config.page_size)
    found = torch.tensor([min(budget.pages // page_bytes, enough), -budget.step], device=device)
    pages, memory = group.all_gather(found, 0).view(-1, 2).amin(0).tolist()
    account = (
        f"{format_bytes(budget.allowed)} allowed, {format_bytes(budget.weights)} weights, "
        f"{format_bytes(budget.step + budget.kept)} steps, {format_bytes(budget.graphs)} graphs"
    )
    if pages < 1:
        raise ConfigError(f"no GPU memory is left for KV pages ({account})")
    log.info("GPU memory: %s, %s KV pages", account, format_bytes(pages * page_bytes))
    holds = pages * config.page_size
    return replace(
        config,
        num_pages=pages,
        max_model_len=min(config.max_model_len, holds),
        step_memory=max(-memory, 1),
    )
