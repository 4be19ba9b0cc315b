"""How many distinct experts a decode step reaches: counted beside the timing, never during it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from baton.bench.offline.points import Point

if TYPE_CHECKING:
    import torch
    from torch import nn

    from baton.engine.llm import LLM

#: prompt tokens of a sequence at most, and decode steps, of a count
PROMPT, STEPS = 1024, 8


@dataclass(frozen=True)
class Routing:
    """Distinct experts in each step, by MoE layer."""

    layers: list[list[int]]

    @property
    def per_layer(self) -> list[float]:
        """Mean over steps, one for each MoE layer."""
        return [sum(counts) / len(counts) for counts in self.layers]

    @property
    def mean(self) -> float:
        """Mean over steps and layers."""
        return sum(self.per_layer) / len(self.layers)


def count_experts(llm: LLM, point: Point, seed: int = 0) -> Routing | None:
    """Experts that STEPS decode steps of `point.batch` sequences reach in each layer.

    Runs the model itself on the idle engine's pages, step by step and sampling at temperature 1,
    so that a runner that replays graphs hides nothing. Prompts are random and at most PROMPT
    tokens long. What the prefix cache held of those pages is lost.

    Returns:
        None for a model without experts, and for one that is split over ranks.
    """
    import torch

    from baton.core.forward import ForwardBatch

    config, runner = llm.config, llm.core.executor.runner
    if config.model.moe is None or config.tensor_parallel_size > 1:
        return None
    model: Any = runner.model
    room = config.max_num_batched_tokens // point.batch
    length = max(1, min(point.context, PROMPT, room))
    width = -(-(length + STEPS) // config.page_size)
    pages = torch.arange(point.batch * width, device=runner.device).view(point.batch, width)
    generator = torch.Generator(runner.device).manual_seed(seed)

    def step(ids: torch.Tensor, context: int) -> torch.Tensor:
        """Run `ids [batch, chunk]` behind `context` tokens; one sampled token each, [batch, 1]."""
        chunk = ids.shape[1]
        positions = torch.arange(context, context + chunk, device=runner.device)
        slots = pages[:, positions // config.page_size] * config.page_size
        batch = ForwardBatch(
            query_lens=[chunk] * point.batch,
            context_lens=[context] * point.batch,
            positions=positions.repeat(point.batch),
            slots=(slots + positions % config.page_size).flatten(),
            pages=pages,
        )
        hidden = model.forward(ids.flatten(), model.plan(batch, runner.views))
        logits = model.logits(hidden[chunk - 1 :: chunk]).float()
        return torch.multinomial(logits.softmax(-1), 1, generator=generator)

    ids = torch.randint(
        config.model.vocab_size,
        (point.batch, length),
        generator=generator,
        device=runner.device,
    )
    with torch.inference_mode():
        ids = step(ids, 0)
        with _counting(model) as layers:
            for context in range(length, length + STEPS):
                ids = step(ids, context)
    return Routing(layers)


@contextmanager
def _counting(model: nn.Module) -> Iterator[list[list[int]]]:
    """Distinct routed experts of each call of each router while this is open, read on the host.
    Ids behind the routed ones are shared experts, which every token reaches."""
    from baton.layers.moe import Router

    routers = [module for module in model.modules() if isinstance(module, Router)]
    layers: list[list[int]] = [[] for _ in routers]

    def counter(counts: list[int]) -> Any:
        def count(router: Router, _: Any, output: tuple[torch.Tensor, torch.Tensor]) -> None:
            ids: Any = output[0]
            counts.append(int(ids[ids < router.moe.num_experts].unique().numel()))

        return count

    hooks = [r.register_forward_hook(counter(c)) for r, c in zip(routers, layers, strict=True)]
    try:
        yield layers
    finally:
        for hook in hooks:
            hook.remove()
