"""Batches made by worker processes while the device computes."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from baton.evals import seeds, text
from baton.evals.context import Context, noise, sample
from training.recipes import Recipe

Batch = dict[str, torch.Tensor]


def load_texts(purpose: seeds.Purpose) -> dict[str, text.Bytes]:
    """What facts are hidden in; training never sees the held-out files."""
    code = text.sources(held_out=purpose != "training")
    return {"code": code, "prose": text.prose(purpose, 0, 4 << 20), "noise": noise()}


def batch_of(contexts: list[Context]) -> Batch:
    """Stack equal lengths: `tokens`, `kind`, `distance`, each `[B, L]`."""
    return {
        name: torch.from_numpy(np.stack([getattr(c, name) for c in contexts]))
        for name in ("tokens", "kind", "distance")
    }


class Stream(IterableDataset[Batch]):
    """Batch after batch of one token count; lengths and families by the stage of training.

    Batch `i` is made from the seed, `i` and the stage alone, by worker `i % workers`.
    """

    def __init__(self, recipe: Recipe, first: int) -> None:
        self.recipe, self.first = recipe, first
        self.texts = load_texts("training")
        self.stage = multiprocessing.Value("i", 0)

    def __iter__(self) -> Iterator[Batch]:
        worker: Any = get_worker_info()
        torch.set_num_threads(1)
        index = self.first + worker.id
        while True:
            yield self.make(index, self.stage.value)
            index += worker.num_workers

    def make(self, index: int, stage: int) -> Batch:
        """The batch of this number."""
        now, seed, tokens = self.recipe.stages[stage], self.recipe.seed, self.recipe.tokens
        rng = seeds.stream("training", seed, index)
        length = int(rng.choice(now.lengths, p=np.array(now.weights) / sum(now.weights)))
        rows = range(max(1, tokens // length))
        made = [
            sample(seeds.stream("training", seed, index, row + 1), length, now.mix, self.texts)
            for row in rows
        ]
        return batch_of(made)

    def batches(self, workers: int) -> Iterator[Batch]:
        """Batches in order, made ahead by `workers` processes."""
        loader: DataLoader[Batch] = DataLoader(
            self, batch_size=None, num_workers=workers, prefetch_factor=2,
            pin_memory=torch.cuda.is_available(),
        )  # fmt: skip
        return iter(loader)
