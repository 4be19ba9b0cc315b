"""What one rank of a tensor-parallel test runs. Apart, so that spawned ranks do not import
transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from baton.models.load import dummy_weights
from baton.models.registry import build, parse
from baton.parallel.group import make_group
from helpers.forward import Driver, load_folder

CHUNKS = [9, 5]


def all_logits(folder: Path, names: list[str], tokens: list[int], group: Any) -> dict[str, Any]:
    """Logits of each checkpoint in `folder`, and of dummy weights with the first one's shape."""
    found = {}
    for name in names:
        model = load_folder(folder / name, group=group)
        found[name] = Driver(model).run("a", tokens, CHUNKS)
    raw = json.loads((folder / names[0] / "config.json").read_text())
    model = build(parse(raw, "config.json"), "float32", "cpu", group)
    dummy_weights(model, seed=5)
    found["dummy"] = Driver(model).run("a", tokens, CHUNKS)
    return found


def rank_main(rank: int, size: int, folder: Path, names: list[str], tokens: list[int]) -> None:
    """Join the group, run everything, leave the result in a file."""
    torch.set_num_threads(1)
    group = make_group(rank, size, f"file://{folder}/meet{size}", "cpu")
    torch.save(all_logits(folder, names, tokens, group), folder / f"out{size}.{rank}")
    group.close()
