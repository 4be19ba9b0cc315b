"""An engine measured on a CPU, end to end, and the parts that a CPU cannot reach."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from baton.bench import about
from baton.bench.offline import ceilings, engine
from baton.bench.offline.account import H200
from baton.bench.offline.engine import Settings, measure
from baton.bench.offline.kernels import activity
from baton.bench.offline.measure import Stopwatch
from baton.bench.offline.points import Point, decode_points, default_points, ttft_points
from baton.bench.offline.routing import STEPS, count_experts
from baton.bench.offline.table import tables, write_document
from baton.config.engine import Machine
from baton.config.options import EngineOptions
from baton.core.errors import ConfigError, RequestFailed
from baton.core.sampling import SamplingParams
from baton.engine.llm import LLM
from baton.layers.moe import Router
from helpers.shapes import TINY, config_only

CEILINGS: dict[str, float | None] = {"copy": 0.01, "matmul": 0.1, "attention": 0.05}
FLAGS = {
    "load_format": "dummy",
    "skip_tokenizer_init": True,
    "enable_prefix_caching": False,
    "step_time": "1h",
    "device": "cpu",
    "threads": 1,
    "max_num_seqs": 8,
    "num_kv_pages": 256,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(config_only(tmp_path_factory.mktemp("models") / "tiny-mla", TINY["mla"]))


def run(folder: str, points: list[Point], **settings: Any) -> tuple[dict[str, Any], list[str]]:
    lines: list[str] = []
    document = measure(
        EngineOptions.of(folder, **FLAGS),
        points,
        Settings(**({"repeats": 2, "ceilings": CEILINGS, "budget": 1e9} | settings)),
        lambda _, line: lines.append(line),
    )
    return document, lines


def test_a_measurement(folder: str, tmp_path: Path) -> None:
    points = ttft_points("16,40") + decode_points("1x16,4x24")
    document, lines = run(folder, points, commit="abc")
    write_document(tmp_path / "new" / "out.json", document)
    assert json.loads((tmp_path / "new" / "out.json").read_text()) == json.loads(
        json.dumps(document)
    )
    assert str(Path(folder).parent) not in json.dumps(document)
    assert document["model"] == {"name": "tiny-mla", "family": "deepseek_v3", "layers": 3}
    assert document["commit"] is not None
    assert document["backends"] == {"prefill": "torch", "decode": "torch", "moe": "torch"}
    assert document["hardware"] == {"name": document["device"]["name"], **CEILINGS} | {
        "source": "given"
    }
    assert document["start"]["kernel_cache"] is None
    assert 0 < document["start"]["ready_s"] < document["start"]["first_token_s"]
    assert document["passes"]["graph"] == 0
    assert document["passes"]["eager"] >= sum(row["steps"] for row in document["decode"])
    assert document["memory"]["device_peak_bytes"] is None
    assert document["memory"]["host_peak_bytes"] > 2**26
    assert document["config"]["prefix_caching"] is False
    assert {d["name"] for d in document["decisions"]} >= {"dtype", "block_size"}
    assert len(document["fingerprint"]["digest"]) == 16
    assert document["skipped"] == document["failed"] == []
    assert [row["prompt"] for row in document["ttft"]] == [16, 40]
    for row in document["ttft"] + document["decode"]:
        assert row["repeats"] == len(row["samples_ms"]) == 2
        assert min(row["samples_ms"]) <= row["ms"] <= max(row["samples_ms"])
        assert row["roofline"]["share"] == row["roofline"]["limit_ms"] / row["ms"] > 0
        assert row["host_ms"] > 0
    assert all(row["steps"] == 1 for row in document["ttft"])
    for row, batch in zip(document["decode"], (1, 4), strict=True):
        assert (row["batch"], row["steps"]) == (batch, 64)
        assert 0 < row["full_batch_ms"] <= row["full_batch_p90_ms"]
        assert row["full_batch_ms"] == pytest.approx(row["ms"], rel=0.8)
        assert row["experts"]["source"] == "counted"
        assert len(row["experts"]["per_layer"]) == 2
        assert 2 <= row["experts"]["mean"] == row["roofline"]["experts"] <= 8
    assert document["decode"][0]["experts"]["mean"] == 2
    assert lines[0].startswith("started")
    assert [line.partition(":")[0] for line in lines[1:]] == [point.name for point in points]


def test_points_after_the_budget_are_skipped(folder: str) -> None:
    document, lines = run(folder, ttft_points("16,32") + decode_points("1x16"), budget=0.0)
    assert document["ttft"] == document["decode"] == []
    assert document["skipped"] == [
        {"point": name, "reason": "the budget of 0 s was spent"}
        for name in ("ttft 16", "ttft 32", "decode 1x16")
    ]
    assert lines[1] == "ttft 16: skipped, the budget of 0 s was spent"


def test_default_points_that_do_not_fit_are_skipped(folder: str) -> None:
    document, _ = run(folder, default_points()[-3:], lenient=True)
    reasons = {row["point"]: row["reason"] for row in document["skipped"]}
    assert reasons == {
        "decode 128x1024": "needs 128 sequences, more than the max_num_seqs of 8",
        "decode 1x65536": "needs 65601 tokens, more than the max_model_len of 2048",
        "decode 8x65536": "needs 65601 tokens, more than the max_model_len of 2048",
    }


@pytest.mark.parametrize(
    "points, words",
    [
        (ttft_points("2048"), "ttft 2048 needs 2049 tokens, more than the max_model_len of 2048"),
        (decode_points("9x16"), "decode 9x16 needs 9 sequences, more than the max_num_seqs of 8"),
        (decode_points("8x500"), "decode 8x500 needs 288 KV pages, the pool has 256"),
    ],
)
def test_asked_points_that_do_not_fit_are_refused(
    folder: str, points: list[Point], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        run(folder, points)


def test_a_point_that_fails_leaves_the_others(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    time_it = Stopwatch.ttft

    def ttft(self: Stopwatch, point: Point, repeats: int) -> Any:
        if point.context == 16:
            raise RequestFailed("out of memory")
        return time_it(self, point, repeats)

    monkeypatch.setattr(Stopwatch, "ttft", ttft)
    document, lines = run(folder, ttft_points("16,32"))
    assert document["failed"] == [{"point": "ttft 16", "reason": "out of memory"}]
    assert [row["prompt"] for row in document["ttft"]] == [32]
    assert "ttft 16: failed, out of memory" in lines


@pytest.mark.parametrize("point, most", [(Point(3, 40, 64), 6), (Point(1, 5, 64), 2)])
def test_counting_experts(folder: str, point: Point, most: int) -> None:
    """Each MoE layer in each step; no hook stays behind and the engine still answers alike."""
    with LLM(folder, **FLAGS) as llm:
        greedy = SamplingParams(max_tokens=5, temperature=0.0)
        before = llm.generate([[5, 6, 7]], greedy)[0].completions[0].token_ids
        routing = count_experts(llm, point)
        assert routing is not None
        assert [len(layer) for layer in routing.layers] == [STEPS, STEPS]
        assert all(2 <= count <= most for layer in routing.layers for count in layer)
        model: Any = llm.core.executor.runner.model
        assert not any(module._forward_hooks for module in model.modules())
        assert llm.generate([[5, 6, 7]], greedy)[0].completions[0].token_ids == before


def test_routing_that_collapses_is_seen(folder: str) -> None:
    """A bias that sends every token to two experts: the count says so, where the expectation of
    uniform routing would not."""
    with LLM(folder, **FLAGS) as llm:
        model: Any = llm.core.executor.runner.model
        for module in model.modules():
            if isinstance(module, Router):
                assert module.bias is not None
                module.bias.data[:2] = 10.0
        routing = count_experts(llm, Point(8, 16, 64))
        assert routing is not None
        assert routing.per_layer == [2.0, 2.0]


def test_tables_fit(folder: str) -> None:
    document, _ = run(folder, ttft_points("16") + decode_points("2x16"))
    row = document["decode"][0]
    document["ttft"].append(document["ttft"][0] | {"prompt": 524288, "ms": 61234.5})
    document["decode"].append(row | {"batch": 128, "context": 131072, "full_batch_ms": None})
    row["experts"] |= {"source": "expected"}
    kernels = [("k" * 300, 10.0, 20.0), ("other", 21.0, 26.0)]
    found = activity(kernels, 12)
    shares = {"idle_share": found.idle_share, "waiting_share": found.waiting_share}
    row["profile"] = vars(found) | shares
    document["skipped"].append({"point": "ttft 1", "reason": "the budget was spent"})
    document["start"]["kernel_cache"] = "cold"
    document["memory"]["device_peak_bytes"] = 2**36
    console = Console(width=100, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(tables(document), width=100)
    text = console.export_text()
    assert max(len(line) for line in text.splitlines()) <= 100
    for words in ("61,234", "128x131072", "idle 6.2%", "skipped: ttft 1", "~", "cache cold"):
        assert words in text


def test_idle_share() -> None:
    """Overlapping kernels are busy once; order does not matter; nothing is nothing."""
    found = activity([("b", 30.0, 40.0), ("a", 0.0, 10.0), ("a", 5.0, 12.0)], 3)
    assert (found.span, found.busy, found.longest_gap) == (40.0, 22.0, 18.0)
    assert found.idle_share == pytest.approx(18 / 40)
    assert found.kernels == {"a": 17.0, "b": 10.0}
    assert activity([], 3).idle_share == activity([], 3).waiting_share == 0.0
    handover = activity([("a", 0.0, 10.0), ("b", 11.0, 20.0), ("c", 25.0, 50.0)], 1)
    assert handover.waiting_share == pytest.approx(5 / 50), "1 us is how graphs go on"


def test_ceilings(monkeypatch: pytest.MonkeyPatch) -> None:
    card = Machine("cuda", "NVIDIA H200", 8, 1, 1)
    assert ceilings.hardware(card, "bfloat16") == (H200, "known")
    some, source = ceilings.hardware(card, "bfloat16", copy=1.0)
    assert (some.copy, some.matmul, source) == (1.0, 686.0, "known, copy given")
    monkeypatch.setattr(ceilings, "measure", lambda device, dtype: (2.0, 3.0))
    other, source = ceilings.hardware(card, "float32", attention=5.0)
    assert (other.copy, other.matmul, other.attention) == (2.0, 3.0, 5.0)
    assert source == "measured, attention given"
    given, source = ceilings.hardware(card, "float32", copy=1.0, matmul=4.0)
    assert (given.attention, source) == (4.0, "given")


def test_measured_ceilings_are_positive() -> None:
    copy, matmul = ceilings.measure("cpu", "float32")
    assert 1e-4 < copy < 10
    assert 1e-4 < matmul < 100


def test_what_it_ran_on(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert about.versions()["torch"] is not None
    assert about.process_start() < about._LOADED
    monkeypatch.setattr(about, "__file__", str(tmp_path / "about.py"))
    assert about.commit() is None
    assert engine.kernel_cache() in {"warm", "cold", None}
