"""A pool that is too small on a CUDA device: chunks are split, requests preempted, one refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from baton import LLM, SamplingParams
from baton.core.errors import RequestError

BASE: dict[str, Any] = {
    "dtype": "bfloat16",
    "max_model_len": 4096,
    "max_num_seqs": 16,
    "skip_tokenizer_init": True,
    "enable_prefix_caching": False,
}
GREEDY = SamplingParams(temperature=0, max_tokens=400, ignore_eos=True)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    from helpers.tiny import save_tiny

    changes = {
        "hidden_size": 512,
        "head_dim": 128,
        "moe_intermediate_size": 128,
        "max_position_embeddings": 8192,
    }
    return str(save_tiny("hy_v3", tmp_path_factory.mktemp("hy_v3"), **changes))


def prompts(lengths: list[int]) -> list[list[int]]:
    return [[(7 * i + j) % 310 + 3 for j in range(n)] for i, n in enumerate(lengths)]


def test_split_then_evict_then_refuse(model: str) -> None:
    batch = prompts([300, 900, 64, 350, 270, 30, 500, 310])
    with LLM(model, **BASE, num_kv_pages=512) as llm:
        roomy = [out.completions[0].token_ids for out in llm.generate(batch, GREEDY)]
        assert llm.stats().preemptions == 0
    # 26 pages of 64 tokens; a chunk of more than some 200 tokens exceeds the bytes of a step
    with LLM(model, **BASE | {"max_model_len": 1600}, num_kv_pages=26, step_memory="4MiB") as llm:
        found = [out.completions[0].token_ids for out in llm.generate(batch, GREEDY)]
        assert [len(tokens) for tokens in found] == [400] * len(batch)
        assert llm.stats().preemptions > 0
        assert llm.stats().steps > 8 * 4, "chunks were split"
        with pytest.raises(RequestError, match="at most"):
            llm.generate(prompts([1700]), GREEDY)
        again = [llm.generate(batch[2:3], GREEDY)[0].completions[0].token_ids for _ in range(2)]
        assert len(again[0]) == 400, "the engine goes on"
        assert again[0] == again[1]
        assert llm.stats().kv_pages_used == 0
    same = sum(a == b for a, b in zip(roomy, found, strict=True))
    print(f"{same} of {len(batch)} answers are token for token those of a roomy pool")


def test_peak_stays_under_what_is_allowed(model: str) -> None:
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    with LLM(model, **BASE, gpu_memory_utilization=0.1) as llm:
        llm.generate(prompts([3900] * 12), SamplingParams(max_tokens=20, temperature=0))
        allowed = torch.cuda.mem_get_info()[1] * 0.1
    peak = torch.cuda.max_memory_allocated()
    print(f"peak {peak / 2**30:.2f} of {allowed / 2**30:.2f} GiB allowed")
    assert peak < allowed
