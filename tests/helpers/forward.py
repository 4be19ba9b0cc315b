"""Drives a Model over pages directly: any chunks, any batches, shuffled and poisoned pages."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from baton.core.forward import ForwardBatch
from baton.kv.format import make_views
from baton.models.decoder import CausalLM
from baton.models.load import match_weights
from baton.models.registry import build, parse
from baton.parallel.group import LocalGroup


class FolderCheckpoint:
    """A folder of safetensors files, as a Checkpoint."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._files = {}
        for path in sorted(folder.glob("*.safetensors")):
            handle = safe_open(path, "pt")
            self._files |= dict.fromkeys(handle.keys(), (path, handle))

    def names(self) -> list[str]:
        return list(self._files)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._files[name][1].get_slice(name).get_shape())

    def file(self, name: str) -> str:
        return str(self._files[name][0])

    def read(self, name: str) -> torch.Tensor:
        return self._files[name][1].get_tensor(name)


class DictCheckpoint:
    """Tensors in memory, as a Checkpoint."""

    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        self.tensors = tensors

    def names(self) -> list[str]:
        return list(self.tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self.tensors[name].shape)

    def file(self, name: str) -> str:
        return "memory"

    def read(self, name: str) -> torch.Tensor:
        return self.tensors[name]


def load_folder(
    folder: Path, dtype: str = "float32", group: Any = None, backend: str = "auto"
) -> CausalLM:
    """The model in a `save_pretrained` folder, with its weights."""
    raw = json.loads((folder / "config.json").read_text())
    config = parse(raw, str(folder / "config.json"))
    model = build(config, dtype, "cpu", group or LocalGroup(), backend)
    match_weights(model, FolderCheckpoint(folder)).load()
    return model


class Driver:
    """Sequences of one model over one page pool; every page starts as NaN."""

    def __init__(
        self,
        model: CausalLM,
        num_pages: int = 64,
        page_size: int = 4,
        kv_dtype: str = "float32",
        compute_dtype: str = "float32",
    ) -> None:
        self.model, self.page_size = model, page_size
        self.views = make_views(
            model.kv_shapes, num_pages, page_size, kv_dtype, compute_dtype, model.device
        )
        for view in self.views:
            view.poison(torch.arange(num_pages))
        order = torch.randperm(num_pages, generator=torch.Generator().manual_seed(7))
        self._free = order.tolist()
        self._pages: dict[Any, list[int]] = {}
        self._lengths: dict[Any, int] = {}

    def step(self, rows: dict[Any, list[int]]) -> dict[Any, torch.Tensor]:
        """Run the given new tokens of each sequence in one step; logits `[n, vocab]` of each."""
        contexts, lens, positions, slots, tables = [], [], [], [], []
        for name, tokens in rows.items():
            start = self._lengths.get(name, 0)
            pages = self._pages.setdefault(name, [])
            while len(pages) * self.page_size < start + len(tokens):
                pages.append(self._free.pop())
            contexts.append(start)
            lens.append(len(tokens))
            span = range(start, start + len(tokens))
            positions += span
            slots += [
                pages[p // self.page_size] * self.page_size + p % self.page_size for p in span
            ]
            tables.append(pages)
            self._lengths[name] = start + len(tokens)
        width = max(len(pages) for pages in tables)
        batch = ForwardBatch(
            query_lens=lens,
            context_lens=contexts,
            positions=torch.tensor(positions),
            slots=torch.tensor(slots),
            pages=torch.tensor([pages + [0] * (width - len(pages)) for pages in tables]),
        )
        ids = torch.tensor([token for tokens in rows.values() for token in tokens])
        context = self.model.plan(batch, self.views)
        logits = self.model.logits(self.model.forward(ids, context))
        return dict(zip(rows, logits.split(lens), strict=True))

    def run(self, name: Any, tokens: list[int], chunks: list[int]) -> torch.Tensor:
        """One sequence in the given chunks, then token by token; logits at every position."""
        out, start = [], 0
        for size in chunks + [1] * (len(tokens) - sum(chunks)):
            out.append(self.step({name: tokens[start : start + size]})[name])
            start += size
        return torch.cat(out)


def relative_error(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    """Largest over positions of `max |ours - theirs| / max |theirs|`."""
    ours, theirs = ours.double(), theirs.double()
    gap = (ours - theirs).abs().amax(-1) / theirs.abs().amax(-1)
    return gap.max().item()
