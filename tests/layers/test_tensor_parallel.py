"""A model over 2 and 4 ranks is the same model."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.multiprocessing as mp

from baton.core.errors import ConfigError
from baton.layers.weights import split_even, split_kv_heads
from baton.models.load import dummy_weights
from baton.models.registry import build, parse
from baton.parallel.group import LocalGroup, make_group
from helpers.forward import Driver, load_folder, relative_error
from helpers.zoo import CASES, TOKENS, random_model

# 2 KV heads over 4 ranks are replicated; 97 vocabulary rows are padded; 8 heads over 2 are split.
NAMES = ["llama biases", "llama tied", "qwen3 moe", "hy3", "deepseek3", "deepseek3 no query latent"]
CHUNKS = [9, 5]


class FakeGroup(LocalGroup):
    """A rank of a group whose collectives are never called."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size


def logits(folder: Path, group: object) -> torch.Tensor:
    return Driver(load_folder(folder, group=group)).run("a", TOKENS, CHUNKS)


def dummy_logits(config: object, group: object) -> torch.Tensor:
    model = build(config, "float32", "cpu", group)
    dummy_weights(model, seed=5)
    return Driver(model).run("a", TOKENS, CHUNKS)


def dummy_config() -> object:
    made = random_model(*CASES["hy3"])
    raw = made.config.to_dict() | {"architectures": ["HYV3ForCausalLM"]}
    return parse(raw, "config.json")


def rank_main(rank: int, size: int, root: str) -> None:
    torch.set_num_threads(1)
    folder = Path(root)
    group = make_group(rank, size, f"file://{folder}/meet{size}", "cpu")
    found = {name: logits(folder / name, group) for name in NAMES}
    found["dummy"] = dummy_logits(dummy_config(), group)
    torch.save(found, folder / f"out{size}.{rank}")
    group.close()


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("tp")
    for name in NAMES:
        random_model(*CASES[name]).save_pretrained(root / name)
    return root


@pytest.mark.parametrize("size", [2, 4])
def test_ranks_agree_with_one_another_and_with_one_rank(checkpoints: Path, size: int) -> None:
    mp.spawn(rank_main, (size, str(checkpoints)), nprocs=size)
    ranks = [torch.load(checkpoints / f"out{size}.{rank}") for rank in range(size)]
    want = {name: logits(checkpoints / name, LocalGroup()) for name in NAMES}
    want["dummy"] = dummy_logits(dummy_config(), LocalGroup())
    for name, alone in want.items():
        assert all(torch.equal(rank[name], ranks[0][name]) for rank in ranks), name
        assert relative_error(ranks[0][name], alone) <= 1e-5, name


def test_a_size_that_does_not_divide_names_both_numbers() -> None:
    config = dummy_config()
    with pytest.raises(ConfigError, match=r"3 does not divide the number of attention heads \(8\)"):
        build(config, "float32", "cpu", FakeGroup(0, 3))
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
