"""The ranks that share every layer, as a TensorGroup."""

from __future__ import annotations

import torch
import torch.distributed as dist

from baton.core.errors import ConfigError


class LocalGroup:
    """A group of one rank; every collective is the identity."""

    rank = 0
    size = 1

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """`x` itself."""
        return x

    def all_gather(self, x: torch.Tensor, dim: int = -1) -> torch.Tensor:
        """`x` itself."""
        return x

    def close(self) -> None:
        """Nothing to release."""


class ShapeGroup:
    """Rank 0 of `size` ranks that never meet: for asking how big a share would be."""

    rank = 0

    def __init__(self, size: int) -> None:
        self.size = size

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """Not possible here."""
        raise RuntimeError("a ShapeGroup has nobody to talk to")

    def all_gather(self, x: torch.Tensor, dim: int = -1) -> torch.Tensor:
        """Not possible here."""
        raise RuntimeError("a ShapeGroup has nobody to talk to")


class ProcessGroup:
    """Ranks in processes, joined by torch.distributed: NCCL on GPUs, Gloo on CPUs.

    Raises:
        ConfigError: this process is in such a group already.
    """

    def __init__(self, rank: int, size: int, init_method: str, device: torch.device) -> None:
        if dist.is_initialized():
            raise ConfigError("this process has an engine of several ranks already: close it first")
        self.rank, self.size = rank, size
        if device.type == "cuda":
            torch.cuda.set_device(device)
        dist.init_process_group(
            "nccl" if device.type == "cuda" else "gloo",
            init_method=init_method,
            rank=rank,
            world_size=size,
        )

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """Sum of `x` over ranks, written into `x`."""
        x = x.contiguous()
        dist.all_reduce(x)
        return x

    def all_gather(self, x: torch.Tensor, dim: int = -1) -> torch.Tensor:
        """Concatenation over ranks along `dim`, in rank order."""
        x = x.contiguous()
        parts = [torch.empty_like(x) for _ in range(self.size)]
        dist.all_gather(parts, x)
        return torch.cat(parts, dim)

    def close(self) -> None:
        """Leave the group."""
        dist.destroy_process_group()


def make_group(
    rank: int, size: int, init_method: str, device: str | torch.device
) -> LocalGroup | ProcessGroup:
    """The group of `size` ranks; blocks until all have joined when there is more than one.

    Args:
        rank: this process's place, `0 <= rank < size`.
        size: number of ranks; 1 touches no torch.distributed.
        init_method: rendezvous as torch.distributed writes it (`tcp://host:port`, `file:///...`).
        device: this rank's device.

    Raises:
        ConfigError: when rank is outside the group.
    """
    if not 0 <= rank < size:
        raise ConfigError(f"rank {rank} is outside a group of {size}")
    if size == 1:
        return LocalGroup()
    return ProcessGroup(rank, size, init_method, torch.device(device))
