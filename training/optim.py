"""Muon for matrices (Jordan et al., 2024; arXiv 2502.16982), Adam for everything else.

`torch.optim.Muon` takes one matrix at a time, some five thousand kernel launches a step for these
models; here matrices of one shape are one batch.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import torch
from torch import nn

_NEWTON = (3.4445, -4.7750, 2.0315)  # the quintic iteration of Muon's authors


def orthogonalise(update: torch.Tensor, steps: int = 5) -> torch.Tensor:
    """`[G, R, C]` -> about `U V^T` of each matrix's `U S V^T`, by Newton-Schulz iterations."""
    tall = update.shape[-2] > update.shape[-1]
    x = update.bfloat16() if update.is_cuda else update.float()
    x = x.mT if tall else x
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    a, b, c = _NEWTON
    for _ in range(steps):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return (x.mT if tall else x).to(update.dtype)


class Muon:
    """Momentum, orthogonalised; matrices and stacks of matrices."""

    def __init__(self, parameters: list[nn.Parameter], momentum: float = 0.95) -> None:
        groups: dict[tuple[int, ...], list[nn.Parameter]] = defaultdict(list)
        for parameter in parameters:
            groups[tuple(parameter.shape)].append(parameter)
        self.groups, self.momentum = list(groups.values()), momentum
        self.buffers = [torch.zeros_like(torch.stack(list(g))) for g in self.groups]

    @torch.no_grad()
    def step(self, rate: float) -> None:
        """One Nesterov step of `rate` per matrix, more for tall ones."""
        for group, buffer in zip(self.groups, self.buffers, strict=True):
            grad = torch.stack([p.grad for p in group])  # type: ignore[misc]
            buffer.lerp_(grad, 1 - self.momentum)
            update = grad.lerp_(buffer, self.momentum)
            rows, columns = update.shape[-2:]
            flat = orthogonalise(update.view(-1, rows, columns)).view_as(update)
            scale = rate * max(1.0, rows / columns) ** 0.5
            torch._foreach_add_(group, list(flat.unbind()), alpha=-scale)

    def state(self) -> list[torch.Tensor]:
        """What a checkpoint keeps."""
        return self.buffers


class Optimiser:
    """Both, over a whole model. `rates`: of Muon and of Adam."""

    def __init__(self, model: nn.Module, rates: tuple[float, float]) -> None:
        self.rates = rates
        adam = {"embed", "head.weight"}
        matrices, rest = [], []
        for name, parameter in model.named_parameters():
            plain = parameter.ndim < 2 or name in adam or name.endswith("router")
            (rest if plain else matrices).append(parameter)
        self.parameters = matrices + rest
        self.muon = Muon(matrices)
        self.adam = torch.optim.AdamW(
            rest, lr=rates[1], betas=(0.9, 0.95), eps=1e-10, weight_decay=0.0, fused=True
        )

    def step(self, factor: float) -> None:
        """One step at `factor` of the full rates; gradients are dropped."""
        self.muon.step(self.rates[0] * factor)
        for group in self.adam.param_groups:
            group["lr"] = self.rates[1] * factor
        self.adam.step()
        for parameter in self.parameters:
            parameter.grad = None

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps."""
        return {"muon": self.muon.state(), "adam": self.adam.state_dict()}

    def load(self, state: dict[str, Any]) -> None:
        """Take up a checkpoint's state."""
        for buffer, saved in zip(self.muon.buffers, state["muon"], strict=True):
            buffer.copy_(saved)
        self.adam.load_state_dict(state["adam"])
