"""`baton eval`, from the command line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from baton.cli.app import main

TINY = str(Path(__file__).parents[1] / "evals" / "tiny")
SMALL = [
    "--tasks", "single,boundary", "--lengths", "128", "--contexts", "3", "--alphabet", "16",
    "--page", "16", "--block", "16", "--chunk", "32", "--segments", "4", "--text-tokens", "512",
    "--max-model-len", "512", "--num-kv-pages", "256", "--dtype", "float32",
]  # fmt: skip


@pytest.fixture(autouse=True)
def as_users_see_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BATON_DEBUG", "0")


def run(*arguments: str) -> int:
    with pytest.raises(SystemExit) as found:
        main(["eval", *arguments])
    return int(found.value.code or 0)


def test_a_model_is_examined_and_compared_with_itself(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    result, html = tmp_path / "a.json", tmp_path / "a.html"
    assert run(TINY, *SMALL, "--out", str(result), "--html", str(html)) == 0
    said = capsys.readouterr().out
    assert "single" in said
    assert "boundary/chunk" in said
    found = json.loads(result.read_text())
    assert found["suite"]["form"] == "marks"
    assert found["subject"]["name"] == TINY
    assert "<svg" in html.read_text()

    gate, out = tmp_path / "gate.toml", tmp_path / "c.json"
    gate.write_text("[all]\nloss = 0.0\nkl = 1e-6\n[perplexity]\nrise = 0.001\n")
    files = ["--gate", str(gate), "--out", str(out), "--keep", str(tmp_path / "kept")]
    chunked = ["--b", "--max-num-batched-tokens 16 --max-num-seqs 2"]
    assert run("compare", str(result), TINY, *SMALL, *chunked, *files) == 0
    assert "all bounds hold" in capsys.readouterr().err
    compared = json.loads(out.read_text())
    assert compared["all"]["paired"]["lost"] == compared["all"]["paired"]["won"] == 0
    assert compared["b"]["subject"]["options"]["scheduler"]["max_num_seqs"] == 2
    assert compared["breaches"] == []

    worse = json.loads((tmp_path / "kept" / "b.json").read_text())
    for answer in worse["answers"][::3]:
        answer["hit"] = False
    (tmp_path / "w.json").write_text(json.dumps(worse))
    assert run("compare", str(result), str(tmp_path / "w.json"), "--gate", str(gate)) == 3
    assert "above the bound of 0.00" in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments, names",
    [
        ([TINY, "--tasks", "nonsense"], "nonsense"),
        ([TINY, "--out", "no/such/folder/a.json"], "no/such/folder"),
        ([TINY, "--out", TINY], "there is a folder of that name"),
        ([TINY, "--html", ""], "there is a folder of that name"),
        (["compare", TINY, "--keep", __file__], "there is a file of that name"),
        ([TINY, "--lengths", "many"], "--lengths many"),
        (["compare", TINY, "--b", "--no-such-flag 1"], "no-such-flag"),
        (["compare", TINY, "--gate", "absent.toml"], "absent.toml"),
        (["compare", "a.json"], "cannot read a.json"),
        (["http://localhost:1", "--kv-cache-dtype", "bfloat16"], "--kv-cache-dtype: http://"),
        (
            ["compare", TINY, "http://localhost:1", "--b", "--threads 1", *SMALL],
            "--threads: http://",
        ),
    ],
)
def test_mistakes_are_named(
    arguments: list[str], names: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(*arguments) != 0
    assert names in capsys.readouterr().err


def test_a_part_is_gone_on_from_and_then_removed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    result, part = tmp_path / "a.json", tmp_path / "a.json.part"
    assert run(TINY, *SMALL, "--out", str(result)) == 0
    assert not part.exists()
    part.write_text("not a part\n")
    assert run(TINY, *SMALL, "--out", str(result)) == 2
    assert "--resume goes on with it" in capsys.readouterr().err
    assert run(TINY, *SMALL, "--out", str(result), "--resume") == 2
    assert "holds no answers" in capsys.readouterr().err
    part.unlink()
    assert run(TINY, *SMALL, "--out", str(result), "--resume") == 2
    assert "nothing to --resume" in capsys.readouterr().err
    assert run(TINY, *SMALL, "--resume") == 2
    assert "--resume needs the --out" in capsys.readouterr().err
