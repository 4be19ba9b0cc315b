"""Kernels are compiled while weights are loaded, and the account of a GPU's memory."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from baton import LLM, SamplingParams
from baton.config.options import EngineOptions
from baton.core.errors import ModelError
from baton.core.kv import KVShape
from baton.engine import build, memory
from baton.runner.probes import Probe
from helpers.configs import make_config

BASE: dict[str, Any] = {
    "dtype": "float32",
    "block_size": 16,
    "max_model_len": 128,
    "num_kv_pages": 64,
    "skip_tokenizer_init": True,
    "threads": 1,
}


def answer(folder: str) -> list[int]:
    with LLM(folder, **BASE) as llm:
        (found,) = llm.generate([[5, 6, 7]], SamplingParams(max_tokens=6, temperature=0))
    return found.completions[0].token_ids


def test_a_rehearsal_goes_on_beside_loading(
    tiny: Callable[[str], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    expected, load, meet = answer(tiny("hy_v3")), build._load, threading.Barrier(2)

    def beside(*args: Any, **kwargs: Any) -> None:
        meet.wait(30)
        load(*args, **kwargs)

    def rehearse(_: Any, model: Any, device: torch.device) -> None:
        weights = list(model.parameters())
        assert all(weight.device == device for weight in weights), "there is memory to compute on"
        meet.wait(30)

    monkeypatch.setattr(build, "_load", beside)
    monkeypatch.setattr(build, "rehearse", rehearse)
    assert answer(tiny("hy_v3")) == expected


@pytest.mark.parametrize("device, woken", [("auto", True), ("cpu", False)])
def test_compilers_wake_before_the_device_is_known(
    device: str, woken: bool, tiny: Callable[[str], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    awake, measure = threading.Event(), build.measure_machine

    def wait(wanted: str) -> Any:
        assert awake.wait(30 if woken else 0.2) is woken
        return measure(wanted)

    monkeypatch.setattr(build, "wake_compiler", awake.set)
    monkeypatch.setattr(build, "measure_machine", wait)
    build.prepare(EngineOptions.of(tiny("llama"), **BASE, device=device))


def test_no_compiler_wakes_for_a_model_that_is_not_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    awake = threading.Event()
    monkeypatch.setattr(build, "wake_compiler", awake.set)
    with pytest.raises(ModelError):
        build.prepare(EngineOptions.of(str(tmp_path), **BASE, device="auto"))
    assert not awake.wait(0.2)


def test_a_checkpoint_that_does_not_fit_is_refused_before_anything_is_made_for_it(
    tiny: Callable[[str], str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = shutil.copytree(tiny("llama"), tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"intermediate_size": 64}))
    made: list[str] = []
    monkeypatch.setattr(build, "materialise", lambda _: made.append("memory"))
    monkeypatch.setattr(build, "rehearse", lambda *_: made.append("kernels"))
    with pytest.raises(ModelError, match=r"mlp.*has shape \[.*128"):
        LLM(str(folder), **BASE)
    assert made == []


def test_a_long_rehearsal_shows(
    tiny: Callable[[str], str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    seen: list[str] = []

    def rehearse(*_: Any) -> None:
        while not any("kernels and libraries" in text for text in seen):
            threading.Event().wait(0.05)
            seen.append(capsys.readouterr().err)

    monkeypatch.setattr(build, "rehearse", rehearse)
    with LLM(tiny("llama"), **BASE) as llm:
        assert llm.generate([[1, 2, 3]])
    assert "kernels and libraries: done in" in capsys.readouterr().err


def test_an_error_in_loading_waits_for_the_rehearsal(
    tiny: Callable[[str], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    failed, ended = threading.Event(), threading.Event()

    def load(*_: Any, **__: Any) -> None:
        failed.set()
        raise ModelError(file="weights", problem="are bad", expected="good ones")

    def rehearse(*_: Any) -> None:
        assert failed.wait(30)
        threading.Event().wait(0.2)
        ended.set()
        raise ZeroDivisionError

    monkeypatch.setattr(build, "_load", load)
    monkeypatch.setattr(build, "rehearse", rehearse)
    with pytest.raises(ModelError, match="are bad"):
        LLM(tiny("llama"), **BASE)
    assert ended.is_set(), "no thread of an engine that is none goes on"


def test_an_error_in_the_rehearsal_ends_the_start(
    tiny: Callable[[str], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build, "rehearse", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        LLM(tiny("llama"), **BASE)


@pytest.mark.parametrize("debug", [False, True])
def test_a_rehearsal_runs_on_its_rank_s_device_and_launches_nothing(
    debug: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    done = list[str]()

    @contextmanager
    def precompiling() -> Iterator[None]:
        done.append("hold kernels back")
        yield
        done.append("kernels are ready")

    def runner(config: Any, model: Any, views: Any) -> Any:
        assert (config.num_pages, model) == (memory.TRIAL_PAGES, "brief")
        slots = SimpleNamespace(debug=debug)
        return SimpleNamespace(slots=slots, rehearse=lambda: done.append("rehearse"))

    monkeypatch.setattr(torch.cuda, "set_device", lambda device: done.append(str(device)))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda _: done.append("wait"))
    monkeypatch.setattr(memory, "precompiling", precompiling)
    monkeypatch.setattr(memory, "Runner", runner)
    monkeypatch.setattr(memory, "pool_views", lambda *_: [])
    attention = SimpleNamespace(warm_up=lambda: done.append("warm up"))
    model: Any = SimpleNamespace(brief=lambda: "brief", attention=attention)
    memory.rehearse(make_config(), model, torch.device("cpu"))
    assert done == []
    memory.rehearse(make_config(), model, torch.device("cuda:1"))
    steps = [] if debug else ["rehearse"]  # debug's checks would read what no kernel wrote
    inside = ["hold kernels back", *steps, "warm up", "kernels are ready"]
    assert done == ["cuda:1", *inside, "wait"]


class Card:
    """A GPU's memory: `torch` has what PyTorch allocated, `beside` what it knows nothing of."""

    total, loaded, pool = 1 << 40, 5000, 65 * 16 * 3 * 64 * 4

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.torch = {"weights": self.loaded, "workspace": 40}  # of the rehearsal
        self.beside = {"libraries": 300}
        self.most = 0
        for name in ("synchronize", "empty_cache", "reset_peak_memory_stats"):
            monkeypatch.setattr(torch.cuda, name, lambda *_: None)
        monkeypatch.setattr(torch.cuda, "memory_allocated", lambda _: sum(self.torch.values()))
        monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda _: self.most)
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (self.free(), self.total))
        monkeypatch.setattr(memory, "pool_views", self.views)
        monkeypatch.setattr(memory, "Runner", self.runner)

    def free(self) -> int:
        return self.total - sum(self.torch.values()) - sum(self.beside.values())

    def views(self, *_: Any) -> list[Any]:
        self.torch["pool"] = self.pool
        return []

    def runner(self, config: Any, model: Any, views: Any) -> Any:
        self.torch["slots"] = 7

        def probe(step: Probe) -> None:
            if step.context:
                self.torch["workspace"] = 100
            self.most = sum(self.torch.values()) + step.chunk

        def capture() -> None:
            assert model != "brief", "all layers take part in graphs"
            self.beside["graphs"] = 900

        return SimpleNamespace(probe=probe, capture=capture, close=lambda: None)


def test_the_account_of_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    card, shape = Card(monkeypatch), KVShape(4, 8, 8)
    model: Any = SimpleNamespace(kv_shapes=[shape] * 3, brief=lambda: "brief")
    config, device = make_config(gpu_memory_utilization=0.5), torch.device("cuda")
    found = memory.measure_budget(config, model, device, Probe(1, 128, 512), card.loaded)
    assert found.weights == 5000 + 300
    assert found.step == 7 + 100 + 128, "what stays of a step is the step's, whenever it was made"
    assert found.graphs == 900
    assert found.kept == 2 * 128 * 8 * 4
    used = card.total - card.free() - card.pool
    assert found.pages == card.total // 2 - used - 128 - found.kept - memory.MARGIN


def test_a_start_imports_nothing_heavy_that_it_does_not_need() -> None:
    model = str(Path(__file__).parents[1] / "evals" / "tiny")
    code = (
        "import sys\n"
        "from baton import LLM\n"
        f"with LLM({model!r}, load_format='dummy') as llm:\n"
        "    llm.generate('one')\n"
        "heavy = 'torch._dynamo', 'sympy', 'transformers', 'gguf', 'filelock', 'fastapi'\n"
        "print(*(name for name in heavy if name in sys.modules))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120
    )
    assert done.stdout.strip() == ""
