"""Loading: every name a checkpoint may use, and an error for everything that is not exact."""

from __future__ import annotations

import dataclasses
import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch

from baton.core.errors import ModelError
from baton.layers.moe import Router
from baton.layers.weights import Weighted
from baton.models.load import dummy_weights, match_weights
from baton.models.registry import build, parse
from baton.parallel.group import LocalGroup
from helpers.forward import DictCheckpoint, Driver, FolderCheckpoint, relative_error
from helpers.zoo import CASES, TOKENS, random_model


def saved(case: str, folder: Path) -> tuple[Any, dict[str, torch.Tensor]]:
    """A model's parsed config and its checkpoint's tensors, as `save_pretrained` names them."""
    random_model(*CASES[case]).save_pretrained(folder)
    checkpoint = FolderCheckpoint(folder)
    config = parse(json.loads((folder / "config.json").read_text()), str(folder))
    return config, {name: checkpoint.read(name) for name in checkpoint.names()}


def logits(config: Any, tensors: dict[str, torch.Tensor]) -> torch.Tensor:
    model = build(config, "float32", "cpu", LocalGroup())
    match_weights(model, DictCheckpoint(tensors)).load()
    return Driver(model).run("a", TOKENS, [11])


def in_memory_names(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Stacked experts and outer names, as transformers holds them in memory."""
    out: dict[str, torch.Tensor] = {}
    stacks: dict[str, dict[int, dict[str, torch.Tensor]]] = {}
    for name, tensor in tensors.items():
        layer, found, rest = name.partition("mlp.experts.")
        if found:
            expert, part, _ = rest.split(".")
            stacks.setdefault(layer, {}).setdefault(int(expert), {})[part] = tensor
            continue
        name = name.replace("mlp.router.gate.", "mlp.gate.").replace("shared_mlp", "shared_experts")
        out[name.replace("mlp.expert_bias", "mlp.e_score_correction_bias")] = tensor
    for layer, experts in stacks.items():
        rows = [experts[i] for i in range(len(experts))]
        both = [torch.cat((row["gate_proj"], row["up_proj"])) for row in rows]
        out[f"{layer}mlp.experts.gate_up_proj"] = torch.stack(both)
        out[f"{layer}mlp.experts.down_proj"] = torch.stack([row["down_proj"] for row in rows])
    return out


@pytest.mark.parametrize("case", ["hy3", "qwen3 moe", "deepseek3"])
def test_stacked_and_outer_names_are_the_same_weights(case: str, tmp_path: Path) -> None:
    config, tensors = saved(case, tmp_path)
    outer = in_memory_names(tensors)
    assert set(outer) != set(tensors)
    assert torch.equal(logits(config, outer), logits(config, tensors))


def test_a_shared_expert_that_is_not_made_of_whole_experts(tmp_path: Path) -> None:
    """48 wide beside experts of 32 it is an MLP of its own; zeros make it two experts."""
    config, tensors = saved("deepseek2 greedy", tmp_path)
    assert config.moe.shared_experts == 2
    narrow, padded = dict(tensors), dict(tensors)
    for name, tensor in tensors.items():
        if "shared_experts" in name:
            narrow[name] = tensor[:, :48] if "down" in name else tensor[:48]
            padded[name] = torch.zeros_like(tensor)
            padded[name][: narrow[name].shape[0], : narrow[name].shape[1]] = narrow[name]
    moe = dataclasses.replace(config.moe, shared_intermediate=48)
    assert moe.shared_experts == 0
    apart = logits(dataclasses.replace(config, moe=moe), narrow)
    assert relative_error(apart, logits(config, padded)) < 1e-5
    assert relative_error(apart, logits(config, tensors)) > 1e-2


def test_hy3_released_names_are_what_transformers_saves(tmp_path: Path) -> None:
    _, tensors = saved("hy3", tmp_path)
    layer = "model.layers.1.mlp."
    for name in ("router.gate.weight", "expert_bias", "shared_mlp.up_proj.weight"):
        assert layer + name in tensors


def test_mtp_layers_and_rotary_tables_are_passed_over(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, tensors = saved("deepseek3", tmp_path)
    extra = {
        "model.layers.3.eh_proj.weight": torch.zeros(2, 2),
        "model.layers.3.mlp.gate.weight": torch.zeros(2, 2),
        "model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(4),
    }
    monkeypatch.setattr(logging.getLogger("baton"), "propagate", True)
    with caplog.at_level(logging.INFO, "baton"):
        assert torch.equal(logits(config, tensors | extra), logits(config, tensors))
    assert "1 MTP layer(s), not loaded: [3]" in caplog.text


def test_a_tied_head_in_the_checkpoint_is_ignored(tmp_path: Path) -> None:
    config, tensors = saved("llama tied", tmp_path)
    assert "lm_head.weight" not in tensors
    extra = {"lm_head.weight": torch.zeros(97, 64)}
    assert torch.equal(logits(config, tensors | extra), logits(config, tensors))


def test_what_is_not_exact_is_an_error_that_names_it(tmp_path: Path) -> None:
    config, tensors = saved("hy3", tmp_path)
    name = "model.layers.1.self_attn.k_proj.weight"
    without = {key: value for key, value in tensors.items() if key != name}
    with pytest.raises(ModelError, match=rf"{name}.*missing.*\[32, 64\]"):
        logits(config, without)
    with pytest.raises(ModelError, match=rf"{name}.*shape \[31, 64\].*\[32, 64\]"):
        logits(config, tensors | {name: torch.zeros(31, 64)})
    with pytest.raises(ModelError, match=r"memory: tensor 'model.layers.1.extra'.*nothing"):
        logits(config, tensors | {"model.layers.1.extra": torch.zeros(1)})
    with pytest.raises(ModelError, match="missing"):
        logits(config, {})


@pytest.mark.parametrize("case", list(CASES))
def test_fills_cover_every_element_once(case: str) -> None:
    made = random_model(*CASES[case])
    raw = made.config.to_dict() | {"architectures": [f"{CASES[case][0]}ForCausalLM"]}
    model = build(parse(raw, "config.json"), "float32", "cpu", LocalGroup())
    for module in model.modules():
        if isinstance(module, Weighted):
            for name, parameter in module.named_parameters(recurse=False):
                times = torch.zeros(parameter.shape)
                for fill in module.fills:
                    if fill.parameter == name:
                        times[fill.into] += 1
                assert (times == 1).all(), name


@pytest.mark.parametrize("dummy", [True, False])
def test_what_is_made_of_weights_is_made_of_those_loaded(
    dummy: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("baton.layers.moe.split_weight", lambda weight: -weight)
    config, tensors = saved("hy3", tmp_path)
    model = build(config, "float32", "cpu", LocalGroup())
    for _ in range(2):
        if dummy:
            dummy_weights(model, 0)
        else:
            match_weights(model, DictCheckpoint(tensors)).load()
        routers = [module for module in model.modules() if isinstance(module, Router)]
        assert routers
        assert all(torch.equal(r._split, -r.weight) for r in routers)
        for router in routers:
            router.weight.zero_()


def test_dummy_weights_are_seeded_and_shaped_as_promised() -> None:
    made = random_model(*CASES["hy3"])
    config = parse(made.config.to_dict() | {"architectures": ["HYV3ForCausalLM"]}, "config.json")

    def fresh(seed: int) -> dict[str, torch.Tensor]:
        model = build(config, "bfloat16", "cpu", LocalGroup())
        dummy_weights(model, seed)
        return dict(model.named_parameters())

    first, again, other = fresh(1), fresh(1), fresh(2)
    for name, tensor in first.items():
        assert torch.equal(tensor, again[name]), name
        if "norm" in name:
            assert (tensor == 1).all(), name
        elif name.endswith("bias"):
            assert (tensor == 0).all(), name
        else:
            assert not torch.equal(tensor, other[name]), name
            assert 0.01 < tensor.float().std() < 0.03, name
    assert first["model.layers.1.mlp.gate.weight"].dtype == torch.float32
    assert first["model.layers.1.mlp.experts.gate_up"].dtype == torch.bfloat16


def test_progress_counts_to_the_end(tmp_path: Path) -> None:
    config, tensors = saved("llama", tmp_path)
    seen: list[tuple[int, int]] = []
    model = build(config, "float32", "cpu", LocalGroup())
    match_weights(model, DictCheckpoint(tensors)).load(lambda *at: seen.append(at))
    assert [done for done, _ in seen] == list(range(1, seen[0][1] + 1))
