"""The MTP module on the serving path, against the training code's and against itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from baton import LLM, SamplingParams
from baton.core.errors import ConfigError
from helpers.trained import some_model
from training.export import export
from training.recipes import RECIPES

LENGTH = 512
BASE: dict[str, Any] = {
    "dtype": "float32",
    "kv_cache_dtype": "float32",
    "block_size": 16,
    "max_model_len": 1024,
    "num_kv_pages": 256,
    "max_num_seqs": 4,
    "threads": 1,
    "mtp": True,
}


@pytest.fixture(scope="module", params=["recall-rope", "recall-512k"])
def trained(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A folder, ids, and what the training code's module guesses two tokens on."""
    recipe = RECIPES[request.param]
    folder = tmp_path_factory.mktemp(request.param)
    model = some_model(recipe.shape)
    export(model, recipe, folder)
    torch.manual_seed(3)
    ids = torch.randint(0, 400, (1, LENGTH))
    with torch.no_grad():
        _, ahead, _ = model(ids, torch.float32)
        guesses = model.head(ahead).argmax(-1)
    return str(folder), ids[0].tolist(), guesses.tolist()


def drafts(llm: LLM, ids: list[int], start: int = 0) -> list[int]:
    (found,) = llm.examine([(ids, start)])
    assert found.drafts.shape[0] == found.logprobs.shape[0] == len(ids) - 1 - start
    return list(found.drafts.tolist())


@pytest.mark.parametrize("chunk, ranks", [(1024, 1), (48, 1), (200, 2)])
def test_guesses_are_the_training_code_s(trained: Any, chunk: int, ranks: int) -> None:
    folder, ids, guesses = trained
    more = {"max_num_batched_tokens": chunk, "tensor_parallel_size": ranks}
    with LLM(folder, **BASE, **more) as llm:
        found = drafts(llm, ids)
    # behind the last position comes what the engine sampled, not what the text says
    assert found[: LENGTH - 2] == guesses[: LENGTH - 2]


def test_a_cached_prefix_with_another_token_behind_it_changes_nothing(trained: Any) -> None:
    folder, ids, guesses = trained
    other = [*ids[:160], *(399 - token for token in ids[160:])]
    with LLM(folder, **BASE, max_num_batched_tokens=1024) as llm:
        drafts(llm, other)
        found = drafts(llm, ids, start=200)
        stats = llm.stats()
    assert found[: LENGTH - 202] == guesses[200 : LENGTH - 2]
    assert stats.computed_tokens < 2 * LENGTH - 100, "the prefix was not computed twice"


def test_answers_are_those_without_it(trained: Any) -> None:
    folder, ids, _ = trained
    greedy = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    prompts = [ids[:50], ids[:131], ids[100:117]]
    found = []
    for mtp in (True, False):
        with LLM(folder, **BASE | {"mtp": mtp}, max_num_batched_tokens=64) as llm:
            found.append([out.completions[0].token_ids for out in llm.generate(prompts, greedy)])
            # what decodes left in the cache serves later prompts
            longer = [p + a for p, a in zip(prompts, found[-1], strict=True)]
            found[-1] += [o.completions[0].token_ids for o in llm.generate(longer, greedy)]
    assert found[0] == found[1]


def test_decodes_leave_what_a_later_prompt_needs(trained: Any) -> None:
    folder, ids, _ = trained
    greedy = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    with LLM(folder, **BASE) as llm:
        said = llm.generate([ids[:100]], greedy)[0].completions[0].token_ids
        whole = [*ids[:100], *said, 7, 8, 9]
        cached = drafts(llm, whole, start=130)
    with LLM(folder, **BASE) as fresh:
        assert drafts(fresh, whole, start=130)[:-1] == cached[:-1]


def test_a_model_without_one(tmp_path: Path) -> None:
    from helpers.tiny import save_tiny

    with pytest.raises(ConfigError, match="no MTP module"):
        LLM(str(save_tiny("llama", tmp_path)), **BASE, skip_tokenizer_init=True)
