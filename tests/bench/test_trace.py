"""Trace files: what is read, what is refused, what the synthetic ones look like."""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Any

import pytest

from baton.bench.workload.job import Job, WorkloadError
from baton.bench.workload.replay import Scales, replay
from baton.bench.workload.synth import TRAFFIC, synthesize
from baton.bench.workload.trace import BLOCK, TraceError, read_trace, write_trace
from helpers.paper import paper_lru

TRACES = Path(__file__).parents[2] / "../shared/traces"
GOOD = {"timestamp": 5, "input_length": 600, "output_length": 3, "hash_ids": [0, 7]}
AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens\n"


def real(name: str) -> Path:
    """A published trace; skips where it is not."""
    if not (TRACES / name).exists():
        pytest.skip(f"{name} is not beside this checkout")
    return TRACES / name


def test_good_lines_blank_lines_and_the_limit(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text(json.dumps(GOOD) + "\n\n" + json.dumps(GOOD | {"timestamp": 1500}) + "\n")
    jobs = read_trace(path)
    assert jobs[0] == Job(((0, 512), (7, 88)), 3, 0.005)
    assert jobs[1].at == 1.5
    assert len(read_trace(path, limit=1)) == 1


@pytest.mark.parametrize(
    "bad, words",
    [
        ("{", "not JSON"),
        ("[1]", "expected a JSON object, got list"),
        ({"timestamp": -1}, "timestamp must be an integer of at least 0, got -1"),
        ({"timestamp": 4}, "before that of the line above"),
        ({"timestamp": 6.5}, "timestamp must be an integer"),
        ({"input_length": 0}, "input_length must be an integer of at least 1, got 0"),
        ({"input_length": True}, "input_length"),
        ({"output_length": None}, "output_length"),
        ({"hash_ids": [0]}, "1 ids, but 600 tokens are 2 blocks"),
        ({"hash_ids": [0, -1]}, "hash_ids"),
        ({"hash_ids": [0, 2**63]}, "hash_ids"),
        ({"hash_ids": "01"}, "hash_ids"),
    ],
)
def test_errors_name_the_line(tmp_path: Path, bad: str | dict[str, Any], words: str) -> None:
    line = bad if isinstance(bad, str) else json.dumps(GOOD | bad)
    check_second_line(tmp_path / "t.jsonl", json.dumps(GOOD), line, words)


def check_second_line(path: Path, first: str, second: str, words: str) -> None:
    path.write_text(f"{first}\n{second}\n")
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


def test_azure_rows(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    rows = "2023-11-16 18:17:03.9799600,4808,10\r\n2023-11-16 18:17:04.0319600,3180,0\r\n"
    path.write_text(AZURE + rows)
    first, second = read_trace(path)
    assert (first.length, first.max_tokens, second.length, second.max_tokens) == (4808, 10, 3180, 1)
    assert (second.at or 0) - (first.at or 0) == pytest.approx(0.052, abs=1e-5)
    assert first.segments[0][0] != second.segments[0][0]


@pytest.mark.parametrize(
    "row, words",
    [
        ("2023-11-16 18:17:03.97,12", "expected 3 columns, got 2"),
        ("yesterday,12,3", "TIMESTAMP 'yesterday' is no date and time"),
        ("2023-11-16 18:17:03.97,x,3", "ContextTokens must be an integer of at least 1, got 'x'"),
        ("2023-11-16 18:17:03.97,0,3", "ContextTokens"),
        ("2023-11-16 18:17:03.97,5,-3", "GeneratedTokens"),
    ],
)
def test_azure_errors_name_the_line(tmp_path: Path, row: str, words: str) -> None:
    check_second_line(tmp_path / "t.csv", AZURE.strip(), row, words)


def test_other_headers_are_refused(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text("time,in,out\n1,2,3\n")
    with pytest.raises(TraceError, match=r":1: neither a JSON object nor the header TIMESTAMP"):
        read_trace(tmp_path / "t.csv")


def test_own_form(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    rows: list[dict[str, Any]] = [
        {"at": 0, "input": 100, "output": 5, "group": "a"},
        {"at": 1.5, "segments": [[1, 64], [2, 6]], "output": 5, "session": 3, "turn": 0},
        {"at": 1.5, "segments": [[1, 64], [4, 9]], "output": 1, "session": 3, "think": 2},
    ]
    path.write_text("\n".join(map(json.dumps, rows)))
    jobs = read_trace(path)
    assert [job.length for job in jobs] == [100, 70, 73]
    assert (jobs[1].session, jobs[1].turn, jobs[2].think) == (3, 0, 2.0)
    assert [job.shared for job in replay(jobs, Scales(), "t").jobs] == [0, 0, 64]


@pytest.mark.parametrize(
    "row, words",
    [
        ({"output": 1}, "expected either input or segments"),
        ({"input": 1, "segments": [[0, 1]], "output": 1}, "expected either input or segments"),
        ({"input": 3}, "output is missing"),
        ({"segments": [[0, 0]], "output": 1}, "segments must be a list of [id, tokens]"),
        ({"segments": [], "output": 1}, "segments must be"),
        ({"segments": [[0]], "output": 1}, "segments must be"),
        ({"input": 3, "output": 1, "at": -1}, "at must be a number of seconds"),
        ({"input": 3, "output": 1, "when": 1}, "unknown field 'when'"),
        ({"input": 3, "output": 1}, "some lines have a time and others have none"),
    ],
)
def test_own_errors(tmp_path: Path, row: dict[str, Any], words: str) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text(json.dumps({"at": 0, "input": 1, "output": 1}) + "\n" + json.dumps(row))
    with pytest.raises(TraceError) as error:
        read_trace(path)
    assert words in str(error.value)


def test_write_then_read(tmp_path: Path) -> None:
    jobs = synthesize(20)
    write_trace(tmp_path / "t", jobs)
    assert read_trace(tmp_path / "t") == jobs


def test_synthetic_statistics_are_the_published_ones() -> None:
    jobs = synthesize(6000, seed=1)
    inputs = [job.length for job in jobs]
    outputs = [job.max_tokens for job in jobs]
    assert statistics.median(inputs) == pytest.approx(6909, rel=0.12)
    assert statistics.mean(inputs) == pytest.approx(12035, rel=0.15)
    assert max(inputs) <= 126_195
    assert statistics.mean(outputs) == pytest.approx(342.6, rel=0.1)
    span = (jobs[-1].at or 0) - (jobs[0].at or 0)
    assert len(jobs) / span == pytest.approx(3.4, rel=0.15)
    shared = sum(job.shared for job in replay(jobs, Scales(), "s").jobs)
    assert shared / sum(inputs) == pytest.approx(0.374, abs=0.05)
    assert all(job.segments[0] == (0, BLOCK) for job in jobs if job.length >= BLOCK)
    assert synthesize(6000, seed=1) == jobs
    assert synthesize(100, seed=1) == jobs[:100]
    assert synthesize(100, seed=2) != jobs[:100]
    with pytest.raises(WorkloadError, match="requests"):
        synthesize(0)


@pytest.mark.parametrize(
    "name, mean, median, output, rate",
    [("chat", 1154.7, 1020, 211.1, 5.53), ("code", 2047.8, 1469, 27.9, 2.57)],
)
def test_other_traffic(name: str, mean: float, median: float, output: float, rate: float) -> None:
    jobs = synthesize(8000, traffic=TRAFFIC[name])
    assert statistics.mean(j.length for j in jobs) == pytest.approx(mean, rel=0.1)
    assert statistics.median(j.length for j in jobs) == pytest.approx(median, rel=0.15)
    assert statistics.mean(j.max_tokens for j in jobs) == pytest.approx(output, rel=0.12)
    assert len(jobs) / (jobs[-1].at or 1) == pytest.approx(rate, rel=0.1)
    assert not any(job.shared for job in replay(jobs, Scales(), name).jobs)


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


@pytest.mark.parametrize(
    "name, count, mean, output, ideal",
    [
        ("mooncake_conversation_trace.jsonl", 12_031, 12_035.1, 342.6, 0.3736),
        ("mooncake_synthetic_trace.jsonl", 3_993, 15_325.5, 149.1, 0.6512),
        ("azure2023_AzureLLMInferenceTrace_code.csv", 8_819, 2_047.8, 27.9, 0.0),
        ("azure2023_AzureLLMInferenceTrace_conv.csv", 19_366, 1_154.7, 211.1, 0.0),
    ],
)
def test_published_traces(name: str, count: int, mean: float, output: float, ideal: float) -> None:
    jobs = replay(read_trace(real(name)), Scales(), name).jobs
    total = sum(job.length for job in jobs)
    assert len(jobs) == count
    assert total / count == pytest.approx(mean, abs=0.1)
    assert sum(job.max_tokens for job in jobs) / count == pytest.approx(output, abs=0.1)
    assert sum(job.shared for job in jobs) / total == pytest.approx(ideal, abs=0.0002)
