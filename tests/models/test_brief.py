"""One layer of each kind holds as many bytes at once as all layers: the pool is sized by that."""

from __future__ import annotations

import json
import weakref
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from baton.attention.packed import PackedBackend, Piece
from baton.core.forward import Model
from baton.kv.format import make_views
from baton.models.decoder import Brief, CausalLM
from baton.models.load import dummy_weights
from baton.models.registry import build, parse
from baton.ops import activation, mla, moe, norm, qkv, rope, router
from baton.parallel.group import LocalGroup
from baton.runner.probes import Probe
from helpers.trained import some_model
from helpers.zoo import CASES, random_model
from training.export import export
from training.recipes import RECIPES

PAGE, PAGES = 64, 64
#: the shapes of Moonlight-16B-A3B and of Hy3, with few layers
MOONLIGHT = {
    "architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3", "vocab_size": 163840,
    "hidden_size": 2048, "intermediate_size": 11264, "moe_intermediate_size": 1408,
    "num_hidden_layers": 5, "num_attention_heads": 16, "num_key_value_heads": 16,
    "n_shared_experts": 2, "n_routed_experts": 64, "num_experts_per_tok": 6,
    "first_k_dense_replace": 2, "routed_scaling_factor": 2.446, "scoring_func": "sigmoid",
    "topk_method": "noaux_tc", "norm_topk_prob": True, "n_group": 1, "topk_group": 1,
    "kv_lora_rank": 512, "q_lora_rank": None, "qk_rope_head_dim": 64, "v_head_dim": 128,
    "qk_nope_head_dim": 128, "hidden_act": "silu", "max_position_embeddings": 1048576,
    "rms_norm_eps": 1e-5, "rope_theta": 50000.0, "tie_word_embeddings": False,
}  # fmt: skip
HY3 = {
    "architectures": ["HYV3ForCausalLM"], "model_type": "hy_v3", "vocab_size": 120832,
    "hidden_size": 4096, "intermediate_size": 13312, "num_hidden_layers": 5,
    "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 128, "num_experts": 192,
    "num_experts_per_tok": 8, "num_shared_experts": 1, "moe_intermediate_size": 1536,
    "router_scaling_factor": 2.826, "qk_norm": True, "hidden_act": "silu",
    "max_position_embeddings": 1048576, "rms_norm_eps": 1e-5, "tie_word_embeddings": False,
    "rope_parameters": {"rope_type": "default", "rope_theta": 11158840.0},
}  # fmt: skip


class Held(TorchDispatchMode):
    """Counts the bytes that are held, of what operations inside make."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.most = 0
        self._known = dict[int, int]()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        given = {t.untyped_storage()._cdata for t in _tensors((args, kwargs))}
        out = func(*args, **(kwargs or {}))
        for made in _tensors(out):
            storage = made.untyped_storage()
            if storage._cdata not in given | self._known.keys():
                self._known[storage._cdata] = storage.nbytes()
                weakref.finalize(storage, self._free, storage._cdata)
                self.now += storage.nbytes()
                self.most = max(self.most, self.now)
        return out

    def _free(self, storage: int) -> None:
        self.now -= self._known.pop(storage)


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def peak(model: Model, whole: CausalLM, probe: Probe) -> int:
    """Bytes of a step, as a runner's probe makes it."""
    dtype = whole.model.embed_tokens.weight.dtype
    name = str(dtype).removeprefix("torch.")
    views = make_views(whole.kv_shapes, PAGES + 1, PAGE, name, dtype, whole.device)
    with torch.inference_mode(), Held() as held:
        ids, batch = probe.batch(PAGE, PAGES, whole.config.vocab_size, whole.device)
        context = model.plan(batch, views)
        hidden = model.forward(ids, context)
        if model.drafts:
            model.draft(hidden, ids, context)
        model.logits(hidden[-1:])
    return held.most


class Packed(PackedBackend):
    """What attention libraries hold, nothing computed."""

    def attend(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, piece: Piece, need_lse: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        lse = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)
        return torch.empty(*q.shape[:2], v.shape[-1], dtype=q.dtype, device=q.device), lse


@pytest.fixture
def on_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Operations take the way of a GPU's, and no kernel runs."""
    triton = pytest.importorskip("triton")
    monkeypatch.setattr(triton.JITFunction, "run", lambda *_, **__: None)
    for module in (activation, mla, moe, norm, qkv, rope, router):
        monkeypatch.setattr(module, "on_gpu", lambda *_: True)


def peaks(raw: dict[str, Any], probe: Probe, *parts: Callable[[CausalLM], Model]) -> list[int]:
    """Bytes of a step through parts of a model."""
    whole = build(parse(raw, "config.json"), "bfloat16", "meta", LocalGroup(), "torch")
    found = []
    for part in parts:
        whole.attention.prefill = Packed(whole.attention.prefill.need)  # with no workspace yet
        found.append(peak(part(whole), whole, probe))
    return found


@pytest.mark.usefixtures("on_gpu")
@pytest.mark.parametrize("probe", [Probe(1, 16384, 131072), Probe(1, 4096, 0), Probe(1, 16, 0)])
@pytest.mark.parametrize("raw", [MOONLIGHT, HY3], ids=["moonlight", "hy3"])
def test_with_the_operations_of_a_gpu(raw: dict[str, Any], probe: Probe) -> None:
    brief, whole = peaks(raw, probe, CausalLM.brief, lambda whole: whole)
    assert brief == whole > 0


@pytest.mark.usefixtures("on_gpu")
def test_it_takes_a_layer_of_each_kind() -> None:
    parts = [lambda whole, i=i: Brief(whole, [i]) for i in (0, 1)]
    dense, routed, brief = peaks(HY3, Probe(1, 4096, 0), *parts, CausalLM.brief)
    assert dense < routed == brief


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    def make(case: str) -> Path:
        folder = tmp_path_factory.mktemp("model")
        if case in RECIPES:
            export(some_model(RECIPES[case].shape), RECIPES[case], folder)
        else:
            family, config = CASES[case]
            random_model(family, config | {"num_hidden_layers": 5}).save_pretrained(folder)
        return folder

    return make


@pytest.mark.parametrize(
    "case", ["llama", "qwen3 moe some dense", "hy3", "deepseek3", "recall-rope", "recall-512k"]
)
def test_on_a_cpu(case: str, folders: Callable[[str], Path]) -> None:
    raw = json.loads((folders(case) / "config.json").read_text())
    config = parse(raw, "config.json")
    whole = build(replace(config, mtp=config.num_mtp_layers > 0), "float32", "cpu", LocalGroup())
    dummy_weights(whole, 0)
    for parameter in whole.parameters():
        parameter.zero_()  # every layer sends its tokens to the same experts

    def fresh(model: Model) -> int:
        for attention in whole.attentions:
            backend = attention.prefill
            attention.prefill = attention.decode = type(backend)(backend.need)
        return peak(model, whole, Probe(1, 300, 1000))

    assert fresh(whole.brief()) == fresh(whole) > 0
