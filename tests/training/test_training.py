"""The reference models' training code: what it computes is what others compute from its export."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from baton.evals import vocab
from baton.models.source import resolve_source
from baton.models.tokenizer import load_tokenizer
from helpers.trained import some_model
from training.attention import attend
from training.data import Stream
from training.export import export, load
from training.model import Model
from training.recipes import RECIPES
from training.train import Run, flags

F64 = torch.float64


@pytest.fixture(scope="module")
def ids() -> torch.Tensor:
    torch.manual_seed(1)
    return torch.randint(0, 400, (2, 150))


def test_export_equals_transformers(tmp_path: Path, ids: torch.Tensor) -> None:
    from transformers import AutoModelForCausalLM
    from transformers.modeling_layers import MtpModel

    recipe = RECIPES["recall-rope"]
    model = some_model(recipe.shape)
    export(model, recipe, tmp_path)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    with torch.no_grad():
        hidden, ahead, _ = model(ids, torch.float32)
        expected = theirs(ids).logits
        torch.testing.assert_close(
            model.head(hidden).view_as(expected), expected, atol=2e-5, rtol=0
        )

        layers = recipe.shape.layers  # transformers looks for the module behind 61 layers
        theirs._keys_to_ignore_on_load_unexpected = [rf"model\.layers\.{layers}\..*"]
        mtp = MtpModel.from_pretrained(theirs)
        following = mtp.embed_tokens(ids[:, 1:])
        place = torch.arange(ids.shape[1] - 1)[None]
        mask = torch.full((place.shape[1],) * 2, -torch.inf).triu(1)[None, None]
        states = mtp.layers[0](
            following,
            theirs.model(ids).last_hidden_state[:, :-1],
            position_embeddings=mtp.rotary_emb(following, position_ids=place),
            attention_mask=mask,
            position_ids=place,
            past_key_values=None,
        )
        expected = mtp.shared_head(states)
        mine = model.head(ahead).view(*ids.shape, -1)[:, :-1]
        torch.testing.assert_close(mine, expected, atol=2e-5, rtol=0)


def test_an_export_is_taken_up_again(tmp_path: Path) -> None:
    recipe = RECIPES["tiny"]
    model, again = some_model(recipe.shape), Model(recipe.shape)
    export(model, recipe, tmp_path)
    load(again, tmp_path)
    for (name, mine), its in zip(model.named_parameters(), again.parameters(), strict=True):
        assert torch.equal(mine, its), name
    assert all(file.stat().st_size < 16e6 + 1e5 for file in tmp_path.iterdir())


def test_its_tokenizer_is_bytes_and_marks(tmp_path: Path) -> None:
    export(some_model(RECIPES["tiny"].shape), RECIPES["tiny"], tmp_path)
    tokenizer = load_tokenizer(resolve_source(str(tmp_path)))
    said = "def f(): é <ask><s001><s127>\n"
    ids = tokenizer.encode(said)
    assert ids[:3] == list(b"def")
    assert ids[-4:] == [vocab.ASK, vocab.SYMBOL + 1, vocab.SYMBOL + 127, 10]
    assert tokenizer.decode(ids) == said
    assert tokenizer.eos_ids == (vocab.EOS,)
    every = list(range(256 + len(vocab.TOKENS)))
    assert [tokenizer.token(i) for i in every[256:]] == list(vocab.TOKENS)
    assert tokenizer.token_bytes(200) == bytes([200])


def test_a_window_is_two_blocks() -> None:
    torch.manual_seed(0)
    batch, length, block = 2, 96, 16
    q, k, v = (torch.randn(batch * length, 3, 8, dtype=F64) for _ in range(3))
    at = torch.arange(length)
    seen = (at[:, None] >= at) & (at[:, None] // block - at // block < 2)
    rows = [x.view(batch, length, 3, 8).transpose(1, 2) for x in (q, k, v)]
    expected = torch.nn.functional.scaled_dot_product_attention(*rows, attn_mask=seen)
    torch.testing.assert_close(
        attend(q, k, v, batch, block), expected.transpose(1, 2).flatten(0, 1)
    )


def test_a_stopped_run_goes_on_as_if_it_had_not(tmp_path: Path) -> None:
    recipe = replace(RECIPES["tiny"], tokens=256)
    cpu, stream = torch.device("cpu"), Stream(recipe, 0)
    whole = Run(recipe, tmp_path, cpu, fuse=False)
    for i in range(6):
        if i == 3:
            whole.save()
        whole.train(stream.make(i, 0))
    rest = Run(recipe, tmp_path, cpu, fuse=False)
    assert rest.step == 3
    for i in range(3, 6):
        rest.train(stream.make(i, 0))
    for mine, its in zip(whole.model.parameters(), rest.model.parameters(), strict=True):
        assert torch.equal(mine, its)
    whole.log(note="kept")
    assert json.loads((tmp_path / "log.jsonl").read_text())["step"] == 6


def test_loads_are_balanced_by_the_bias(ids: torch.Tensor) -> None:
    model = some_model(RECIPES["recall-rope"].shape)

    def spread() -> float:
        with torch.no_grad():
            _, _, counts = model(ids, torch.float32)
        model.balance(counts, 0.01)
        return float(torch.stack([c.max() / c.mean() for c in counts]).mean())

    before = spread()
    for _ in range(60):
        after = spread()
    assert after < 0.6 * before, (before, after)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (["--workers", "0"], "argument --workers: '0'"),
        (["--workers", "-1"], "argument --workers: '-1'"),
        (["--workers", "1.5"], "argument --workers: '1.5'"),
        (["--minutes", "0"], "argument --minutes: '0'"),
        (["--minutes", "nan"], "argument --minutes: 'nan'"),
        (["--every", "-1"], "argument --every: '-1'"),
        (["--budget", "0"], "argument --budget: '0'"),
        (["--rates", "0.1", "inf"], "argument --rates: 'inf'"),
        (["--start", "no/such/folder"], "--start: no/such/folder is no exported folder"),
        (["--out", __file__], f"--out: cannot make the folder {__file__}"),
    ],
)
def test_flags_that_make_no_sense_are_named(
    given: list[str],
    words: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    base = ["training", "recall-rope", "--out", str(tmp_path)]
    monkeypatch.setattr("sys.argv", [*base, *given])
    with pytest.raises(SystemExit):
        flags()
    assert words in capsys.readouterr().err
    monkeypatch.setattr("sys.argv", [*base, "--workers", "2", "--budget", "0.5"])
    assert (flags().workers, flags().budget) == (2, 0.5)
