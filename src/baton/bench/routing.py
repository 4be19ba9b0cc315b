"""How many distinct experts a step reaches, counted beside the timing and never during it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import nn


@dataclass
class Routing:
    """Distinct experts of each MoE layer, in every step seen with exactly `tokens` tokens."""

    tokens: int
    layers: list[list[int]] = field(default_factory=list)

    @property
    def per_layer(self) -> list[float]:
        """Mean over steps, one for each MoE layer; empty when no step was seen."""
        return [sum(counts) / len(counts) for counts in self.layers if counts]

    @property
    def mean(self) -> float | None:
        """Mean over steps and layers; None when no step was seen."""
        found = self.per_layer
        return sum(found) / len(found) if found else None


@contextmanager
def counting(model: nn.Module, tokens: int) -> Iterator[Routing]:
    """Count what the model's routers choose in steps of `tokens` tokens while this is open.

    Reads each router's output on the host, so steps are slow meanwhile. A model whose routers are
    not called (dense, or replayed from a graph) leaves the counts empty.
    """
    from baton.layers.moe import Router

    routers = [module for module in model.modules() if isinstance(module, Router)]
    routing = Routing(tokens, [[] for _ in routers])
    hooks = [
        router.register_forward_hook(_counter(counts, tokens))
        for router, counts in zip(routers, routing.layers, strict=True)
    ]
    try:
        yield routing
    finally:
        for hook in hooks:
            hook.remove()


def _counter(counts: list[int], tokens: int) -> Any:
    def count(router: nn.Module, inputs: Any, output: Any) -> None:
        experts = output[0]
        if experts.shape[0] == tokens:
            counts.append(int(experts.unique().numel()))

    return count
