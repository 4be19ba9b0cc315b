"""A model over 2 and 4 ranks is the same model."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.multiprocessing as mp

from baton.core.errors import ConfigError
from baton.layers.weights import split_even, split_kv_heads
from baton.models.registry import build, parse
from baton.parallel.group import LocalGroup, make_group
from helpers.forward import relative_error
from helpers.ranks import all_logits, rank_main
from helpers.zoo import CASES, TOKENS, random_model

# 2 KV heads over 4 ranks are replicated; 97 vocabulary rows are padded.
NAMES = {
    2: [
        "hy3",
        "llama biases",
        "llama tied",
        "qwen3 moe",
        "deepseek3 biases but on queries",
        "deepseek2 greedy",
    ],
    4: ["hy3", "llama biases", "deepseek3"],
}


class FakeGroup(LocalGroup):
    """A rank of a group whose collectives are never called."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size


@pytest.mark.parametrize("size", [2, 4])
def test_ranks_agree_with_one_another_and_with_one_rank(size: int, tmp_path: Path) -> None:
    names = NAMES[size]
    for name in names:
        random_model(*CASES[name]).save_pretrained(tmp_path / name)
    mp.spawn(rank_main, (size, tmp_path, names, TOKENS), nprocs=size)
    ranks = [torch.load(tmp_path / f"out{size}.{rank}") for rank in range(size)]
    for name, alone in all_logits(tmp_path, names, TOKENS, LocalGroup()).items():
        assert all(torch.equal(rank[name], ranks[0][name]) for rank in ranks), name
        assert relative_error(ranks[0][name], alone) <= 1e-5, name


def test_a_size_that_does_not_divide_names_both_numbers() -> None:
    raw = random_model(*CASES["hy3"]).config.to_dict() | {"architectures": ["HYV3ForCausalLM"]}
    with pytest.raises(ConfigError, match=r"3 does not divide the number of attention heads \(8\)"):
        build(parse(raw, "config.json"), "float32", "cpu", FakeGroup(0, 3))
    with pytest.raises(ConfigError, match=r"4 .*KV heads \(3\)"):
        split_kv_heads(3, 1, FakeGroup(0, 4))
    with pytest.raises(ConfigError, match="rank 2 is outside"):
        make_group(2, 2, "", "cpu")


def test_shares_cover_a_dimension_once() -> None:
    shares = [split_even(12, FakeGroup(rank, 4), "things", 5) for rank in range(4)]
    covered = [i for share in shares for i in range(share.start, share.stop)]
    assert covered == list(range(60))


def test_few_kv_heads_are_shared_by_neighbouring_ranks() -> None:
    shares = [split_kv_heads(2, 10, FakeGroup(rank, 4)) for rank in range(4)]
    assert [(s.start, s.stop) for s in shares] == [(0, 10), (0, 10), (10, 20), (10, 20)]
