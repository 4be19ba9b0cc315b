"""A trained model as a folder that Hugging Face's libraries and Baton load."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from baton.evals import vocab
from training.model import MLP, Block, Model, MoE
from training.recipes import Recipe

SHARD = 16_000_000  # bytes of weights in a file, at most
Weights = dict[str, torch.Tensor]


def export(model: Model, recipe: Recipe, folder: Path) -> None:
    """Write `config.json`, tokenizer and BF16 shards of at most 16 MB."""
    folder.mkdir(parents=True, exist_ok=True)
    _write(folder / "config.json", config(recipe))
    _tokenizer(folder)
    shards: list[Weights] = [{}]
    for name, tensor in weights(model).items():
        if sum(t.nbytes for t in shards[-1].values()) + tensor.nbytes > SHARD:
            shards.append({})
        shards[-1][name] = tensor
    where: dict[str, str] = {}
    for i, shard in enumerate(shards, 1):
        file = f"model-{i:05d}-of-{len(shards):05d}.safetensors"
        save_file(shard, folder / file, {"format": "pt"})
        where |= dict.fromkeys(shard, file)
    total = sum(t.nbytes for shard in shards for t in shard.values())
    _write(
        folder / "model.safetensors.index.json",
        {"metadata": {"total_size": total}, "weight_map": where},
    )


@torch.no_grad()
def load(model: Model, folder: Path) -> None:
    """Take the weights of an exported folder."""
    held = {n: t for file in folder.glob("*.safetensors") for n, t in load_file(file).items()}
    for name, place in _places(model).items():
        place.copy_(held[name])


def config(recipe: Recipe) -> dict[str, Any]:
    """The model's `config.json`: DeepSeek-V3's, or that of a model which has layers of two kinds
    and is otherwise the same."""
    shape = recipe.shape
    family: dict[str, Any] = {
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "deepseek_v3",
    }
    if shape.window:
        family = {
            "architectures": ["LocalMLAForCausalLM"],
            "model_type": "local_mla",
            "attention_block": shape.window,
            "global_layers": list(shape.global_layers),
            "score_log_base": shape.log_base,
        }
    return family | {
        "dtype": "bfloat16",
        "vocab_size": shape.vocab,
        "hidden_size": shape.hidden,
        "num_hidden_layers": shape.layers,
        "num_nextn_predict_layers": 1,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.heads,
        "q_lora_rank": None,
        "kv_lora_rank": shape.latent,
        "qk_nope_head_dim": shape.nope,
        "qk_rope_head_dim": shape.rope,
        "v_head_dim": shape.value,
        "intermediate_size": shape.dense,
        "moe_intermediate_size": shape.expert,
        "n_routed_experts": shape.experts,
        "n_shared_experts": 1,
        "num_experts_per_tok": shape.top_k,
        "first_k_dense_replace": 1,
        "moe_layer_freq": 1,
        "n_group": 1,
        "topk_group": 1,
        "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.0,
        "hidden_act": "silu",
        "rms_norm_eps": shape.eps,
        "rope_theta": shape.theta,
        "rope_scaling": None,
        "rope_interleave": True,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "initializer_range": 0.02,
        "max_position_embeddings": recipe.context,
        "tie_word_embeddings": False,
        "use_cache": True,
        "bos_token_id": vocab.BOS,
        "eos_token_id": vocab.EOS,
        "pad_token_id": vocab.PAD,
    }


def weights(model: Model) -> Weights:
    """The checkpoint: BF16, and float32 where DeepSeek-V3's is."""
    exact = "e_score_correction_bias"
    return {
        name: w.detach().cpu().to(torch.float32 if name.endswith(exact) else torch.bfloat16).clone()
        for name, w in _places(model).items()
    }


def _places(model: Model) -> Weights:
    """Where each tensor of the checkpoint is kept; the MTP module is the layer behind the last."""
    found: Weights = {"model.embed_tokens.weight": model.embed, "lm_head.weight": model.head.weight}
    found["model.norm.weight"] = model.norm.weight
    layers = len(model.blocks)
    for i, block in enumerate([*model.blocks, model.mtp.block]):
        found |= {f"model.layers.{i}.{name}": w for name, w in _block(block).items()}
    own = {"enorm": model.mtp.enorm, "hnorm": model.mtp.hnorm, "eh_proj": model.mtp.eh_proj}
    own["shared_head.norm"] = model.mtp.norm
    found |= {f"model.layers.{layers}.{name}.weight": m.weight for name, m in own.items()}
    return found


def _block(block: Block) -> Weights:
    attention = ("q_proj", "kv_a_proj_with_mqa", "kv_a_layernorm", "kv_b_proj", "o_proj")
    found = {f"self_attn.{name}.weight": getattr(block, name).weight for name in attention}
    for name in ("input_layernorm", "post_attention_layernorm"):
        found[f"{name}.weight"] = getattr(block, name).weight
    mlp = block.mlp
    if isinstance(mlp, MLP):
        return found | {f"mlp.{n}": p for n, p in mlp.named_parameters()}
    assert isinstance(mlp, MoE)
    found["mlp.gate.weight"] = mlp.router
    found["mlp.gate.e_score_correction_bias"] = mlp.bias
    for name in ("gate", "up", "down"):
        *routed, shared = getattr(mlp, name).unbind()
        found[f"mlp.shared_experts.{name}_proj.weight"] = shared
        found |= {f"mlp.experts.{e}.{name}_proj.weight": w for e, w in enumerate(routed)}
    return found


def _tokenizer(folder: Path) -> None:
    """Bytes as themselves, then the marks and symbols, each one token wherever it is written."""
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [b for b in range(256) if b not in printable]
    letters = {b: chr(b) for b in printable} | {b: chr(256 + i) for i, b in enumerate(others)}
    assert sorted(letters.values()) == sorted(alphabet)
    backend = Tokenizer(models.BPE(vocab={letters[b]: b for b in range(256)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_tokens(
        [AddedToken(t, special=t in vocab.HIDDEN, normalized=False) for t in vocab.TOKENS]
    )
    backend.save(str(folder / "tokenizer.json"))
    _write(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": "<bos>",
            "eos_token": "<eos>",
            "pad_token": "<pad>",
            "clean_up_tokenization_spaces": False,
        },
    )


def _write(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
