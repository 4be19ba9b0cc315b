"""The engine on a CUDA device: close to transformers, and equal with graphs on or off."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers

from baton import LLM, SamplingParams
from baton.core.step import StepPlan
from baton.runner.runner import Runner
from helpers.deep import fix_cost, watch_layers

FAMILIES = ["llama", "qwen3_moe", "hy_v3", "deepseek_v3"]
BASE: dict[str, Any] = {
    "dtype": "bfloat16",
    "max_model_len": 2048,
    "num_kv_pages": 512,
    "max_num_seqs": 64,
    "skip_tokenizer_init": True,
}
#: head dims that the kernels are for; the CPU tests' 8 and 16 are not served by any library
WIDE = {
    "llama": {"hidden_size": 512, "num_attention_heads": 8, "num_key_value_heads": 2},
    "qwen3_moe": {"hidden_size": 512, "head_dim": 128, "moe_intermediate_size": 128},
    "hy_v3": {"hidden_size": 512, "head_dim": 128, "moe_intermediate_size": 128},
    "deepseek_v3": {
        "hidden_size": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "kv_lora_rank": 512,
        "moe_intermediate_size": 128,
    },
}
COMMON = {"intermediate_size": 1024, "initializer_range": 0.03}


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], str]:
    from helpers.tiny import save_tiny

    made: dict[str, str] = {}

    def make(family: str) -> str:
        if family not in made:
            folder = tmp_path_factory.mktemp(family)
            made[family] = str(save_tiny(family, folder, **(COMMON | WIDE[family])))
        return made[family]

    return make


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("chunk", [1024, 192])
def test_logits_are_transformers_within_bfloat16(
    wide: Callable[[str], str], family: str, chunk: int
) -> None:
    """Relative error per position <= 2e-2; equal argmax where the top gap exceeds the error.

    The reference runs in float32 on weights rounded to bfloat16, which is what is served. Where
    two experts tie within bfloat16's rounding another one is chosen, and that position is off by
    more: such positions may be no more than in transformers' own bfloat16 run.
    """
    ids = [(i * 37 + 11) % 317 + 3 for i in range(700)]
    model = transformers.AutoModelForCausalLM.from_pretrained(wide(family), dtype=torch.bfloat16)
    model = model.cuda()
    batch = torch.tensor([ids]).cuda()
    with torch.inference_mode():
        rounded = model(batch).logits[0, :-1].float().cpu()
        logits = model.float()(batch).logits[0, :-1].cpu()
    with LLM(wide(family), **(BASE | {"max_num_batched_tokens": chunk})) as llm:
        scores = llm.score(ids)
    # log_softmax shifts a whole row; compare as logits are compared, around their mean
    ours, theirs, half = (x - x.mean(1, keepdim=True) for x in (scores, logits, rounded))
    error = (ours - theirs).norm(dim=1) / theirs.norm(dim=1)
    usual = (half - theirs).norm(dim=1) / theirs.norm(dim=1)
    top = theirs.topk(2, dim=1).values
    clear = (top[:, 0] - top[:, 1]) > 2 * (ours - theirs).abs().amax(1)
    agree = (ours.argmax(1) == theirs.argmax(1))[clear].float().mean()
    off, usually_off = ((x > 2e-2).float().mean() for x in (error, usual))
    print(
        f"{family}, chunk {chunk}: median {error.median():.1e} (transformers {usual.median():.1e})"
        f", over 2e-2 {off:.2%} ({usually_off:.2%}), argmax {agree:.4f}"
    )
    assert agree >= 0.99
    assert error.median() <= 2e-2
    assert off <= usually_off + 0.01


@pytest.mark.parametrize("family", FAMILIES)
def test_graphs_change_no_token(wide: Callable[[str], str], family: str) -> None:
    prompts = [[(7 * i + j) % 310 + 3 for j in range(5 + 61 * i)] for i in range(11)]
    greedy = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True, logprobs=1)
    drawn = SamplingParams(temperature=1, seed=3, max_tokens=40, ignore_eos=True)
    found = []
    for eager in (True, False):
        with LLM(wide(family), **BASE, enforce_eager=eager) as llm:
            outputs = llm.generate(prompts, greedy) + llm.generate(prompts, drawn)
            found.append([o.completions[0] for o in outputs])
            if not eager:
                assert llm.stats().graph_passes > 60
    for eager_answer, graph_answer in zip(*found, strict=True):
        assert eager_answer.token_ids == graph_answer.token_ids
        assert eager_answer.logprobs == graph_answer.logprobs


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_launch_never_waits_for_the_card(
    wide: Callable[[str], str], temperature: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A prompt that fits a graph, and decodes: no copy from memory that is not pinned, no read."""
    launch, launched = Runner.launch, list[int]()

    def strict(self: Runner, plan: StepPlan) -> Any:
        launched.append(len(plan.admit))
        torch.cuda.set_sync_debug_mode("error")
        try:
            return launch(self, plan)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    asked = SamplingParams(temperature=temperature, max_tokens=3, ignore_eos=True)
    with LLM(wide("llama"), **BASE) as llm:
        monkeypatch.setattr(Runner, "launch", strict)
        for length in (1000, 40, 1100):  # no prefix of one another
            ids = [(7 * i + length) % 310 + 3 for i in range(length)]
            assert len(llm.generate([ids], asked)[0].completions[0].token_ids) == 3
        assert llm.stats().eager_passes == 0
    assert sum(launched) == 3


@pytest.mark.parametrize("family", FAMILIES)
def test_a_chunk_by_layers_equals_one_in_a_single_pass(
    wide: Callable[[str], str], family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To the bit: prompt log-probabilities keep both runs off the graphs, whose padding differs."""

    fix_cost(monkeypatch, 1e-4)
    parts = watch_layers(monkeypatch)
    prompts = [[(7 * i + j) % 310 + 3 for j in range(n)] for i, n in enumerate((9, 5, 1500, 700))]
    asked = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True, prompt_logprobs=1)
    longer = SamplingParams(temperature=0, max_tokens=500, ignore_eos=True)
    brief = SamplingParams(temperature=0, max_tokens=1)
    with LLM(wide(family), **BASE | {"max_num_seqs": 2}, step_time="60ms") as llm:
        alone = [llm.generate([prompt], asked)[0] for prompt in prompts[2:]]
        assert not parts
        # the second leaves its slot to the long one while the first decodes
        beside = [
            llm.generate([*prompts[:2], prompt], [longer, brief, asked])[2]
            for prompt in prompts[2:]
        ]
    assert len(parts) >= 4
    for one, other in zip(alone, beside, strict=True):
        assert one.prompt_logprobs == other.prompt_logprobs
        assert one.completions[0].token_ids[0] == other.completions[0].token_ids[0]
