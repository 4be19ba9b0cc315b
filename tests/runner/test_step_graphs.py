"""What padded steps read and leave behind, with a model that only shows what it was given."""

from __future__ import annotations

import gc
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from baton.core.forward import ForwardBatch
from baton.core.sampling import SamplingParams
from baton.core.step import Admit, Row
from baton.runner.graphs import StepGraphs
from baton.runner.sampler import Sampler
from baton.runner.slots import Slots

VOCAB, PAGE, CPU = 100, 4, torch.device("cpu")


class Follower:
    """Says token + position + 1, and keeps the batches that it was given."""

    def __init__(self, graph_prompts: bool = False) -> None:
        self.graph_prompts = graph_prompts
        self.seen: list[tuple[torch.Tensor, ForwardBatch]] = []

    def plan(self, batch: ForwardBatch, views: Any) -> ForwardBatch:
        return batch

    def forward(self, ids: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        self.seen.append((ids, batch))
        return F.one_hot((ids + batch.positions + 1) % VOCAB, VOCAB).float()

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden


def test_decodes_beside_padding() -> None:
    slots, sampler = Slots(6, 20, 3, CPU, debug=False), Sampler(6, VOCAB, CPU)
    model: Any = Follower()
    graphs = StepGraphs(model, [], slots, sampler, PAGE, 6, 0)
    for slot, length in ((4, 7), (1, 3), (0, 8)):
        sampler.admit(Admit(slot, SamplingParams(temperature=0.0), 0, 3, 2, [], []))
        slots.pages[slot] = torch.arange(3) + 3 * slot
        slots.computed[slot], slots.last_token[slot] = length, 10 * slot
    rows: list[Any] = [SimpleNamespace(slot=slot, tokens=()) for slot in (4, 1, 0)]
    asked: list[Row] = rows
    for step in range(2):
        found = graphs.run(asked)
        assert found is not None
        assert found.chosen is not None
        ids, batch = model.seen[-1]
        assert batch.positions.tolist() == [7 + step, 3 + step, 8 + step, 0]
        # page 13 of slot 4 ends and page 14 begins, likewise 3 and 4 of slot 1; then the scrap page
        assert batch.slots.tolist() == [[55, 15, 8, 80], [56, 16, 9, 80]][step]
        assert batch.pages.tolist() == [[12, 13, 14], [3, 4, 5], [0, 1, 2], [20] * 3]
        assert ids.tolist() == [[40, 10, 0, 0], [48, 14, 9, 0]][step]
        assert found.chosen.tolist() == [[[48, 14, 9, 1], [57, 19, 19, 1]][step], [0] * 4]
        assert slots.computed[[4, 1, 0]].tolist() == [8 + step, 4 + step, 9 + step]
        assert slots.last_token[[4, 1, 0]].tolist() == found.chosen[0, :3].tolist()
        assert sampler.generated.tolist() == [3 + step, 3 + step, 0, 0, 3 + step, 0, 0]
        assert slots.computed[slots.scrap] == slots.last_token[slots.scrap] == 0


def test_prompts_before_padding() -> None:
    """One after another through the same place: nothing of a longer one is left in it."""
    slots, sampler = Slots(6, 40, 32, CPU, debug=False), Sampler(6, VOCAB, CPU)
    model: Any = Follower(graph_prompts=True)
    graphs = StepGraphs(model, [], slots, sampler, PAGE, 6, 128)
    for slot, length in ((4, 100), (1, 64), (0, 3), (4, 65)):
        pages = torch.randperm(40)[: -(-length // PAGE)]
        slots.pages[slot, : len(pages)], slots.computed[slot] = pages, 0
        ids = torch.randint(VOCAB, (length,))
        row = Row(slot, 0, length, ids.numpy().tobytes(), [], True)
        found = graphs.run([row])
        assert found is not None
        assert found.chosen is None
        read, batch = model.seen[-1]
        size = 64 if length <= 64 else 128
        assert read.tolist() == ids.tolist() + [0] * (size - length)
        assert batch.positions.tolist() == list(range(size))
        stored = [int(pages[i // PAGE]) * PAGE + i % PAGE for i in range(length)]
        assert batch.slots.tolist() == stored + [40 * PAGE + i % PAGE for i in range(length, size)]
        assert torch.equal(batch.pages, slots.pages[[slot]])
        assert found.logits.argmax(1).tolist() == [(int(ids[-1]) + length) % VOCAB]
        assert int(slots.computed[slot]) == length
    assert graphs.run([Row(4, 0, 129, bytes(8 * 129), [], True)]) is None


def test_steps_run_on_the_stream_of_their_capture_through_few_layers_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    slots, sampler = Slots(6, 20, 64, CPU, debug=False), Sampler(6, VOCAB, CPU)
    where, done = ["main"], list[tuple[str, str, int]]()

    class Stream:
        def wait_stream(self, other: Any) -> None:
            pass

    class On:
        """`torch.cuda.stream`, or the capture of a graph."""

        def __init__(self, name: str) -> None:
            self.name = name

        def __enter__(self) -> None:
            where.append(self.name)

        def __exit__(self, *_: object) -> None:
            where.pop()

    class Noting(Follower):
        def __init__(self, name: str) -> None:
            super().__init__(graph_prompts=True)
            self.name = name

        def forward(self, ids: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
            assert not gc.isenabled()
            if self.name == "whole" and len(ids) == 128:
                assert slots.computed[slots.scrap] == 1, "this pass alone has counted a token"
            done.append((self.name, where[-1], len(ids)))
            return super().forward(ids, batch)

    fakes = {
        "Stream": Stream,
        "CUDAGraph": object,
        "current_stream": Stream,
        "graph_pool_handle": object,
        "synchronize": lambda: None,
        "stream": lambda _: On("stream"),
        "graph": lambda *_, **__: On("graph"),
    }
    for name, fake in fakes.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    models: list[Any] = [Noting("brief"), Noting("whole")]
    brief, whole = (StepGraphs(m, [], slots, sampler, PAGE, 6, 200) for m in models)
    whole.capture(brief)
    warm, captured = done[:6], done[6:]
    assert warm == [("brief", "stream", n) for n in (1, 2, 4, 6, 64, 128)]
    assert captured == [("whole", "graph", n) for n in (128, 64, 6, 4, 2, 1)], "largest first"
    assert whole.captured
