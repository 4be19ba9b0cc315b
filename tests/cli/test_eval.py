"""`baton eval`, from the command line."""

from __future__ import annotations

import fcntl
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from baton.cli.app import main
from baton.core.errors import BatonError, ConfigError
from baton.evals.document import Answer
from baton.evals.exam import Exam
from baton.evals.resume import alone
from baton.evals.subject import Engine, Progress

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


@pytest.mark.parametrize(
    ("error", "code"), [(KeyboardInterrupt(), 130), (BatonError("the engine is gone"), 1)]
)
def test_one_that_is_stopped_says_how_to_go_on(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    error: BaseException,
    code: int,
) -> None:
    result = tmp_path / "a.json"
    take, taken = Engine.take, 0

    def stop(self: Engine, exam: Exam, progress: Progress) -> list[Answer]:
        nonlocal taken
        taken += 1
        if taken == stop_at:
            raise error
        return take(self, exam, progress)

    monkeypatch.setattr(Engine, "take", stop)
    stop_at = 1  # nothing is kept yet
    assert run(TINY, *SMALL, "--out", str(result)) == code
    assert "--resume" not in capsys.readouterr().err
    stop_at, taken = 3, 0
    assert run(TINY, *SMALL, "--out", str(result)) == code
    said = capsys.readouterr().err
    assert f"the same command with --resume goes on from {result}.part" in said
    stop_at, taken = 0, 0
    assert run(TINY, *SMALL, "--out", str(result), "--resume") == 0
    assert taken == 6 - 2, "of 2 tasks with 3 contexts, 2 were answered"
    assert {file.name for file in tmp_path.iterdir()} == {"a.json", ".a.json.lock"}


def test_two_at_once_do_not_share_a_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    result = tmp_path / "a.json"
    with alone(result):
        assert run(TINY, *SMALL, "--out", str(result)) == 2
        assert f"another evaluation is writing {result}" in capsys.readouterr().err
    with alone(result):
        pass


def test_who_opened_the_lock_before_it_was_released_has_the_same_one(tmp_path: Path) -> None:
    """As a process does that looks at the lock while another evaluation ends."""
    result = tmp_path / "a.json"
    with alone(result):
        (file,) = tmp_path.iterdir()
        late = os.open(file, os.O_RDWR)
    fcntl.flock(late, fcntl.LOCK_EX | fcntl.LOCK_NB)
    try:
        with pytest.raises(ConfigError, match="another evaluation"), alone(result):
            pass
    finally:
        os.close(late)
    with alone(result):
        pass


def test_a_lock_of_a_dead_process_is_in_nobodys_way(tmp_path: Path) -> None:
    result = tmp_path / "a.json"
    script = (
        "import pathlib, sys, time\nfrom baton.evals.resume import alone\n"
        "with alone(pathlib.Path(sys.argv[1])):\n    print(1, flush=True)\n    time.sleep(60)\n"
    )
    other = subprocess.Popen([sys.executable, "-c", script, str(result)], stdout=subprocess.PIPE)
    assert other.stdout is not None
    assert other.stdout.readline() == b"1\n"
    with pytest.raises(ConfigError, match="another evaluation"), alone(result):
        pass
    other.send_signal(signal.SIGKILL)
    other.communicate()
    with alone(result):
        pass
