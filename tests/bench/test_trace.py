"""Traces: what is refused, what scaling keeps, what the synthetic one looks like."""

from __future__ import annotations

import json
import statistics
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest

from baton.bench.paper import paper_lru
from baton.bench.synth import Conversations, synthesize
from baton.bench.trace import (
    BLOCK,
    PromptMaker,
    TraceError,
    TraceRequest,
    make_jobs,
    read_trace,
    span,
    write_trace,
)
from baton.core.errors import ConfigError

REAL = Path(__file__).parents[2] / "../shared/traces/mooncake_conversation_trace.jsonl"
GOOD = {"timestamp": 5, "input_length": 600, "output_length": 3, "hash_ids": [0, 7]}


def test_good_lines_blank_lines_and_the_limit(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text(json.dumps(GOOD) + "\n\n" + json.dumps(GOOD | {"timestamp": 1500}) + "\n")
    requests = read_trace(path)
    assert requests[0] == TraceRequest(0.005, 600, 3, (0, 7))
    assert requests[1].at == 1.5
    assert len(read_trace(path, limit=1)) == 1


@pytest.mark.parametrize(
    "bad, words",
    [
        ("{", "not JSON"),
        ("[1]", "expected a JSON object, got list"),
        ({"timestamp": -1}, "timestamp must be an integer of at least 0, got -1"),
        ({"timestamp": 4}, "timestamp goes back"),
        ({"timestamp": 6.5}, "timestamp must be an integer"),
        ({"input_length": 0}, "input_length must be an integer of at least 1, got 0"),
        ({"input_length": True}, "input_length"),
        ({"output_length": None}, "output_length"),
        ({"hash_ids": [0]}, "1 ids, but 600 tokens are 2 blocks"),
        ({"hash_ids": [0, -1]}, "hash_ids"),
        ({"hash_ids": "01"}, "hash_ids"),
    ],
)
def test_errors_name_the_line(tmp_path: Path, bad: str | dict[str, Any], words: str) -> None:
    path = tmp_path / "t.jsonl"
    line = bad if isinstance(bad, str) else json.dumps(GOOD | bad)
    path.write_text(json.dumps(GOOD) + "\n" + line + "\n")
    with pytest.raises(TraceError) as error:
        read_trace(path)
    assert f"{path}:2: " in str(error.value)
    assert words in str(error.value)


def test_missing_field_missing_file_empty_file_binary_file(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text('{"timestamp": 0, "output_length": 1}')
    with pytest.raises(TraceError, match="input_length is missing"):
        read_trace(path)
    with pytest.raises(TraceError, match="No such file"):
        read_trace(tmp_path / "absent")
    path.write_text("\n")
    with pytest.raises(TraceError, match="no requests"):
        read_trace(path)
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(TraceError, match="cannot be read"):
        read_trace(path)


def test_write_then_read(tmp_path: Path) -> None:
    requests = synthesize(20)
    write_trace(tmp_path / "t", requests)
    assert read_trace(tmp_path / "t") == requests


def common(a: tuple[int, ...] | list[int], b: tuple[int, ...] | list[int]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b)) if x != y), min(len(a), len(b)))  # noqa: B905


@pytest.mark.parametrize("scale", [Fraction(1, 64), Fraction(1, 8), Fraction(1)])
def test_scaling_keeps_exactly_the_shared_blocks(scale: Fraction) -> None:
    requests = synthesize(40, seed=3, shape=Conversations(pause_median=1.0))
    maker = PromptMaker(scale)
    prompts = [maker.prompt(r) for r in requests]
    for r, prompt in zip(requests, prompts, strict=True):
        assert len(prompt) == maker.length(r)
        assert len(prompt) == (r.input_length // BLOCK) * maker.block + -(
            -(r.input_length % BLOCK) * scale.numerator // scale.denominator
        )
        assert 256 <= min(prompt) <= max(prompt) < 32000
    pairs = 0
    for i, a in enumerate(requests):
        for j in range(i):
            shared = common(a.hash_ids, requests[j].hash_ids)
            if shared == min(len(a.hash_ids), len(requests[j].hash_ids)):
                continue  # one may be a prefix of the other: its tail decides
            assert common(prompts[i], prompts[j]) == shared * maker.block
            pairs += 1
    assert pairs > 100


def test_equal_ids_equal_tokens_and_seeds_differ() -> None:
    request = TraceRequest(0, 700, 1, (5, 6))
    a, b = PromptMaker(Fraction(1, 4)), PromptMaker(Fraction(1, 4))
    assert a.prompt(request) == b.prompt(request)
    assert PromptMaker(Fraction(1, 4), seed=1).prompt(request)[0] != a.prompt(request)[0]


def test_one_token_blocks_stay_apart_or_are_refused() -> None:
    maker = PromptMaker(Fraction(1, 512), vocab=(0, 100))
    tokens = {tuple(maker.prompt(TraceRequest(0, 512, 1, (i,)))) for i in range(100)}
    assert len(tokens) == 100
    with pytest.raises(TraceError, match="block id 100 cannot be told apart"):
        maker.prompt(TraceRequest(0, 512, 1, (100,)))


@pytest.mark.parametrize("scale", [Fraction(1, 3), Fraction(0), Fraction(2), Fraction(1, 1024)])
def test_scales_that_break_blocks_are_refused(scale: Fraction) -> None:
    with pytest.raises(ConfigError, match="length scale"):
        PromptMaker(scale)
    with pytest.raises(ConfigError, match="vocabulary"):
        PromptMaker(Fraction(1, 64), vocab=(5, 6))


def test_jobs_are_scaled_in_time_and_length() -> None:
    requests = [TraceRequest(2.0, 1025, 100, (0, 1, 2)), TraceRequest(4.0, 512, 1, (0,))]
    jobs = list(make_jobs(requests, PromptMaker(Fraction(1, 64)), time_scale=0.5))
    assert [j.at for j in jobs] == [0.0, 1.0]
    assert [len(j.prompt) for j in jobs] == [17, 8]
    assert [j.max_tokens for j in jobs] == [2, 1]
    jobs = list(
        make_jobs(requests, PromptMaker(Fraction(1, 64)), output_scale=Fraction(1), max_tokens=16)
    )
    assert [(len(j.prompt), j.max_tokens) for j in jobs] == [(8, 8), (8, 1)]


def test_synthetic_statistics_are_the_published_ones() -> None:
    requests = synthesize(6000, seed=1)
    inputs = [r.input_length for r in requests]
    outputs = [r.output_length for r in requests]
    assert statistics.median(inputs) == pytest.approx(6909, rel=0.12)
    assert statistics.mean(inputs) == pytest.approx(12035, rel=0.15)
    assert max(inputs) <= 126_195
    assert statistics.mean(outputs) == pytest.approx(342.6, rel=0.1)
    assert len(requests) / span(requests) == pytest.approx(3.4, rel=0.15)
    maker = PromptMaker(Fraction(1, 64))
    hits = paper_lru((maker.prompt(r) for r in requests), 8, None)
    assert hits.ratio == pytest.approx(0.374, abs=0.05)
    assert all(r.hash_ids[0] == 0 for r in requests)
    assert all(len(r.hash_ids) == -(-r.input_length // BLOCK) for r in requests)
    assert synthesize(6000, seed=1) == requests
    assert synthesize(100, seed=1) == requests[:100]
    assert synthesize(100, seed=2) != requests[:100]


def test_paper_lru_by_hand() -> None:
    a, b = [1, 2, 3, 4, 5], [1, 2, 9, 9, 9]
    assert paper_lru([a, a, b], 2, None).per_request == [0, 4, 2]
    assert paper_lru([[1, 2], [1, 2]], 2, None).per_request == [0, 0]  # one token is computed
    # two pages: the second request evicts the first one's leaf, then its root survives
    assert paper_lru([a, [7, 7, 7], a], 2, 2).per_request == [0, 0, 2]
    assert paper_lru([a, [7, 7, 8, 8, 8], a], 2, 2).per_request == [0, 0, 0]
    # with 4 generated tokens (3 of them computed) a takes 4 pages and [7, 7, 7] takes 3
    assert paper_lru([a, [7, 7, 7], a], 2, 4).per_request == [0, 0, 4]
    assert paper_lru([a, [7, 7, 7], a], 2, 4, generated=[4, 4, 4]).per_request == [0, 0, 2]
    assert paper_lru([], 2, 2).ratio == 0.0


def test_real_trace_has_the_published_sharing() -> None:
    if not REAL.exists():
        pytest.skip("the Mooncake conversation trace is not beside this checkout")
    requests = read_trace(REAL)
    assert len(requests) == 12_031
    # one token per block: token hits are then block hits
    maker = PromptMaker(Fraction(1, 512), vocab=(0, 200_000))
    prompts = [maker.prompt(r) for r in requests]
    ideal = paper_lru(prompts, 1, None)
    assert ideal.prompt_tokens == sum(len(r.hash_ids) for r in requests)
    assert ideal.ratio == pytest.approx(0.3664, abs=0.001)
    assert paper_lru(prompts, 1, 10_000_000 // BLOCK).ratio == pytest.approx(0.291, abs=0.01)
