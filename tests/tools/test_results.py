"""RESULTS.md is what the tool writes, and the tool reads what the benchmark writes."""

from __future__ import annotations

import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from helpers.script import load_script

ROOT = Path(__file__).parents[2]


@pytest.fixture
def tool(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    return load_script("tools/results.py", monkeypatch)


def targets() -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads((ROOT / "benchmarks/targets.json").read_text())
    return found


def document(**changes: Any) -> dict[str, Any]:
    return {
        "kind": "baton bench engine",
        "schema": 1,
        "when": "2030-01-02T03:04:05+00:00",
        "commit": "0123456789abcdef",
        "model": {"name": "hy3-12l"},
        "config": {"dtype": "bfloat16", "kv_dtype": "bfloat16"},
        "device": {"name": "NVIDIA H200", "ranks": 1},
        "versions": {"torch": "2.11.0"},
        "fingerprint": {"digest": "feed"},
        "method": {"repeats": 3},
        "start": {"first_token_s": 12.34, "kernel_cache": "warm"},
        "ttft": [{"prompt": 1024, "ms": 23.456}, {"prompt": 131072, "ms": 7001.2}],
        "decode": [
            {"batch": 8, "context": 65536, "ms": 12.618, "full_batch_ms": None, "repeats": 3},
            {"batch": 16, "context": 1024, "ms": 99.0, "full_batch_ms": 9.5, "repeats": 1},
        ],
        "skipped": [{"point": "ttft 65536", "reason": "budget"}],
        "failed": [{"point": "decode 64x1024", "reason": "memory"}],
    } | changes


def test_the_page_is_up_to_date(tool: ModuleType) -> None:
    page = tool.render(targets(), tool.load(ROOT / "benchmarks" / "results"))
    assert (ROOT / "benchmarks" / "RESULTS.md").read_text() == page


def test_rows_of_a_result(tool: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "hy3-12l.bf16.json").write_text(json.dumps(document()))
    lines = tool.render(targets(), tool.load(tmp_path)).splitlines()
    for line in (
        "| 1024 | 23.46 | 30.8 | 19.7 | 23 |",
        "| 131072 | 7,001 | 7,554 | 6,200 | 6,900 |",
        "| 65536 | skipped | 2,260 | 1,830 | 2,050 |",
        "| 4096 | not run yet | 69.9 | 41 | 50 |",
        "| 8x65536 | 12.62 | - | 12.94 | 12.4 | 12.6 |",
        "| 16x1024 | one pair of runs | 9.5 | 10.98 | 10.2 | 10.5 |",
        "| 64x1024 | failed |  | 19.91 | 18.4 | 19 |",
        "| start to first token (s) | 12.3 | 110 to 220 |  | 20 |",
        "| 1024 | not run yet | 51.2 | 8 | 14 |",
    ):
        assert lines.count(line) == 1, line
    assert sum("commit 0123456789ab, 1 x NVIDIA H200" in line for line in lines) == 2


def test_points_that_the_newest_run_lacks_are_an_older_one_s(
    tool: ModuleType, tmp_path: Path
) -> None:
    (tmp_path / "hy3-12l.bf16.long.json").write_text(json.dumps(document()))
    newer = {"when": "2031-01-02", "commit": "feedfeedfeedfeed", "start": {"first_token_s": 9.0}}
    newer["start"]["kernel_cache"] = "warm"
    newer |= {"ttft": [{"prompt": 1024, "ms": 20.0}], "decode": [], "skipped": [], "failed": []}
    (tmp_path / "hy3-12l.bf16.json").write_text(json.dumps(document(**newer)))
    lines = tool.render(targets(), tool.load(tmp_path)).splitlines()
    assert "| 1024 | 20 | 30.8 | 19.7 | 23 |" in lines
    assert "| 131072 | 7,001 | 7,554 | 6,200 | 6,900 |" in lines
    assert "| 65536 | skipped | 2,260 | 1,830 | 2,050 |" in lines
    assert "| start to first token (s) | 9.0 | 110 to 220 |  | 20 |" in lines
    assert any(line.startswith("1024: 2031-01-02, commit feedfeedfeed") for line in lines)
    assert any(line.startswith("131072: 2030-01-02, commit 0123456789ab") for line in lines)
    assert any(line.startswith("2030-01-02, commit 0123456789ab") for line in lines)  # decodes


@pytest.mark.parametrize(
    "name, changes, words",
    [
        ("hy3-12l.bf16", {"kind": "x"}, "not a result"),
        ("other.bf16", {}, "measured on hy3-12l"),
        ("hy3-12l.bf16", {"config": {"dtype": "float32", "kv_dtype": "bfloat16"}}, "float32"),
        ("hy3-12l", {}, r"MODEL\.VARIANT\.json"),
    ],
)
def test_results_that_are_not_what_their_name_says(
    tool: ModuleType, tmp_path: Path, name: str, changes: dict[str, Any], words: str
) -> None:
    (tmp_path / f"{name}.json").write_text(json.dumps(document(**changes)))
    with pytest.raises(ValueError, match=words):
        tool.load(tmp_path)


@pytest.mark.parametrize(
    "text, words",
    [
        ("", "no JSON"),
        (json.dumps(document())[:-9], "no JSON"),
        ("[]", "not a result"),
        (json.dumps({k: v for k, v in document().items() if k not in ("ttft", "start")}), "start"),
        (json.dumps(document(when=None)), r"Expected `str`, got `null` - at `\$\.when`"),
        (json.dumps(document(device=None)), r"`\$\.device`"),
        (json.dumps(document(ttft=[{"ms": 1.0}])), r"`prompt` - at `\$\.ttft\[0\]`"),
        (json.dumps(document(start={"first_token_s": "1", "kernel_cache": None})), "first_token_s"),
    ],
)
def test_a_file_that_is_not_whole_is_named(
    tool: ModuleType, tmp_path: Path, text: str, words: str
) -> None:
    (tmp_path / "hy3-12l.bf16.json").write_text(text)
    with pytest.raises(ValueError, match=rf"hy3-12l\.bf16\.json: .*{words}"):
        tool.load(tmp_path)
