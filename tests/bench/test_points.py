"""What --ttft and --decode may say, and which points fit an engine."""

from __future__ import annotations

import pytest

from baton.bench.offline.points import (
    DECODE_STEPS,
    Limits,
    Point,
    decode_points,
    default_points,
    require_fit,
    ttft_points,
)
from baton.core.errors import ConfigError


def test_points_from_text() -> None:
    assert ttft_points("1024, 4096,,1024") == [Point(1, 1024), Point(1, 4096)]
    assert decode_points("8x65536") == [Point(8, 65536, DECODE_STEPS)]
    assert ttft_points("") == decode_points(" , ") == []
    assert [p.name for p in (Point(1, 7), Point(2, 7, 64))] == ["ttft 7", "decode 2x7"]
    assert len(default_points()) == 11


@pytest.mark.parametrize("text", ["abc", "0", "-1", "1k", "1.5", "1x2", "１２x"])
def test_odd_lengths(text: str) -> None:
    with pytest.raises(ConfigError, match=r"--ttft .*1024,4096"):
        ttft_points(f"16,{text}")


@pytest.mark.parametrize("text", ["1x", "x1", "0x10", "10x0", "8", "8x-1", "1x2x3", "a x b", "1X2"])
def test_odd_pairs(text: str) -> None:
    with pytest.raises(ConfigError, match=r"--decode .*8x65536"):
        decode_points(f"1x16,{text}")


def test_repeats() -> None:
    assert Point(1, 65536).repeats(5) == Point(64, 1024, 64).repeats(5) == 5
    assert Point(1, 65537).repeats(5) == Point(128, 1024, 64).repeats(5) == 1


def test_fit() -> None:
    limits = Limits(max_len=1024, max_seqs=8, pages=40, page_size=16)
    assert Point(1, 600).misfit(limits) == ""
    assert Point(1, 1023).misfit(Limits(1024)) == ""
    assert "more than the max_model_len of 1024" in Point(1, 1024).misfit(Limits(1024))
    assert Point(1, 10**6).misfit(Limits()) == ""
    with pytest.raises(ConfigError, match=r"decode 9x8 needs 9 sequences.* max_num_seqs of 8"):
        require_fit([Point(1, 8), Point(9, 8, 64)], limits)
    # 8 + 65 tokens take 5 pages of each sequence
    assert Point(8, 15, 64).misfit(limits) == ""
    assert Point(8, 16, 64).misfit(limits) == "needs 48 KV pages, the pool has 40"
