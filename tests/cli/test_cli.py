"""The commands: help, refusals in one line, and what they hand on."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from baton.cli.app import main
from baton.config.options import EngineOptions
from baton.core.errors import ModelError
from baton.core.request import Completion, FinishReason, Output

COMMANDS = (
    ["serve"], ["generate"], ["chat"], ["models", "list"], ["models", "pull"], ["doctor"],
    ["bench", "engine"], ["bench", "run"], ["bench", "grid"], ["bench", "mixed"],
    ["bench", "prefix"], ["bench", "replay"], ["bench", "session"], ["bench", "synth"],
)  # fmt: skip


@pytest.fixture(autouse=True)
def _plain(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("BATON_DEBUG", raising=False)
    monkeypatch.setenv("COLUMNS", "100")


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    """(exit code, standard output, standard error)."""
    with pytest.raises(SystemExit) as end:
        main(arguments)
    said = capsys.readouterr()
    return int(end.value.code or 0), said.out, said.err


def test_help_lists_the_commands_without_torch() -> None:
    code = (
        "import sys, time; begin = time.process_time()\n"
        "from baton.cli import main\n"
        "try: main(['--help'])\n"
        "except SystemExit: pass\n"
        "assert 'torch' not in sys.modules and 'transformers' not in sys.modules\n"
        "print('seconds', time.process_time() - begin)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    for name in ("serve", "generate", "chat", "models", "doctor", "bench", "version"):
        assert name in done.stdout
    assert float(done.stdout.split()[-1]) < 0.7


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help_with_examples_that_fits(
    command: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    code, text, _ = run(capsys, *command, "--help")
    assert code == 0
    assert "Examples:" in text
    assert f"baton {' '.join(command)}" in text
    assert max(len(line) for line in text.splitlines()) <= 100


def test_help_is_grouped(capsys: pytest.CaptureFixture[str]) -> None:
    text = run(capsys, "serve", "-h")[1]
    for panel in ("Server", "Model", "KV cache", "Scheduler", "Parallelism", "Device"):
        assert f"─ {panel} ─" in text
    for flag in ("--tensor-parallel-size", "-tp", "--no-enable-prefix-caching", "--port"):
        assert flag in text


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert re.fullmatch(r"\d+\.\d+\.\d+\n", run(capsys, "version")[1])


@pytest.mark.parametrize(
    "arguments, words",
    [
        (["serv"], "serv"),
        (["serve"], "MODEL"),
        (["serve", "m", "--max-model-length", "1"], "--max-model-len"),
        (["serve", "m", "--dtype", "int3"], "float32"),
        (["serve", "m", "--port", "99999"], "port must be in"),
        (["chat"], "MODEL or --url"),
        (["generate", "m", "-p", " "], "the prompt is empty"),
        (["generate", "m", "-p", "x", "--temperature", "-1"], "temperature must be in"),
        (["generate", "m", "--file", "/nowhere/at/all"], "--file /nowhere/at/all"),
        (["bench", "engine"], "MODEL"),
        (["bench", "engine", "m", "--decode", "1x"], "--decode '1x'"),
        (["bench", "engine", "m", "--decode", "0x10"], "--decode '0x10'"),
        (["bench", "engine", "m", "--ttft", "abc"], "--ttft 'abc'"),
        (["bench", "engine", "m", "--ttft", ""], "nothing to measure"),
        (["bench", "engine", "m", "--ttft", "9", "--max-model-len", "9"], "ttft 9 needs 10"),
        (["bench", "engine", "m", "--decode", "2x9", "--max-num-seqs", "1"], "max_num_seqs of 1"),
        (["bench", "engine", "m", "--repeats", "0"], "--repeats"),
        (["bench", "engine", "m", "--copy-rate", "-1"], "rates above 0"),
        (["bench", "replay", "synthetic", "--length-scale", "0"], "--length-scale must be"),
        (["bench", "replay", "synthetic", "--length-scale", "x"], "--length-scale 'x'"),
        (["bench", "replay", "synthetic", "--vocab", "9"], "--vocab '9'"),
        (["bench", "replay", "synthetic", "--requests", "0"], "--requests"),
        (["bench", "replay", "synthetic", "--time-scale", "-1"], "time scale must be"),
        (["bench", "replay", "synthetic", "--max-len", "1"], "2 tokens"),
        (["bench", "run", "--isl", "4k4"], "--isl '4k4'"),
        (["bench", "run", "--rate", "0"], "a rate above 0, got 0"),
        (["bench", "run", "--rate", "1", "--ramp", "linear:1:2"], "either --rate or --ramp"),
        (["bench", "run", "--ramp", "up"], "ramp 'up'"),
        (["bench", "run", "--ttft", "soon"], "--ttft: cannot read 'soon'"),
        (["bench", "run", "--attainment", "2"], "--attainment"),
        (["bench", "run", "--pools", "gpu=1"], "--pools 'gpu=1'"),
        (["bench", "run", "--body", "[]"], "--body must be a JSON object"),
        (["bench", "run", "--body", "{"], "--body is not JSON"),
        (["bench", "grid", "--concurrency", "0"], "--concurrency '0'"),
        (["bench", "mixed", "--buckets", "1K:x"], "--buckets '1K:x'"),
        (["bench", "mixed", "--buckets", "1K:0"], "weights above 0"),
        (["bench", "prefix", "--hits", "half"], "--hits 'half'"),
        (["bench", "prefix", "--lengths", "100"], "no multiple of the cache's page"),
        (["bench", "session", "--turns", "0"], "at least 1"),
        (["bench", "synth", "/tmp/x", "--traffic", "cars"], "--traffic 'cars'"),
    ],
)
def test_what_the_user_got_wrong_exits_2(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code, _, text = run(capsys, *arguments)
    assert code == 2
    assert words in text
    assert "Traceback" not in text


def test_other_failures_exit_1_in_one_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    code, out, text = run(capsys, "bench", "run", "--base-url", "http://127.0.0.1:1")
    assert (code, out) == (1, "")
    assert "no server answers at http://127.0.0.1:1/v1" in text
    assert len(text.splitlines()) == 1

    def broken() -> str:
        raise ZeroDivisionError("a bug")

    monkeypatch.setattr("baton.cli.app.version", broken)
    code, _, text = run(capsys, "version")
    assert code == 1
    assert text == "baton: ZeroDivisionError: a bug (BATON_DEBUG=1 shows where)\n"
    monkeypatch.setenv("BATON_DEBUG", "1")
    with pytest.raises(ZeroDivisionError):
        main(["version"])


def test_serve_hands_on_both_kinds_of_options(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    got: list[Any] = []

    def serve(server: Any, engine: Any) -> int:
        got.extend((server, engine))
        return 3

    monkeypatch.setattr("baton.server.app.serve", serve)
    arguments = ["--port", "0", "--served-model-name", "a", "--served-model-name", "b", "-tp", "2"]
    assert run(capsys, "serve", "m", *arguments)[0] == 3
    server, engine = got
    assert (server.port, server.served_model_name) == (0, ("a", "b"))
    assert (engine.model.model, engine.parallel.tensor_parallel_size) == ("m", 2)


class FakeLLM:
    """Answers with the prompt in capitals."""

    made: dict[str, Any]

    def __init__(self, options: EngineOptions) -> None:
        FakeLLM.made = {"options": options}
        self.tokenizer = SimpleNamespace(chat=lambda messages: [len(messages[0]["content"])])

    def __enter__(self) -> FakeLLM:
        return self

    def __exit__(self, *_: object) -> None: ...

    def generate(self, prompts: list[Any], sampling: Any, progress: Any = None) -> list[Output]:
        FakeLLM.made["max_tokens"] = sampling.max_tokens
        return [
            Output(
                request_id="r",
                prompt_token_ids=[1, 2],
                completions=[
                    Completion(
                        index=0,
                        text=str(prompt).upper(),
                        token_ids=[3],
                        finish_reason=FinishReason.STOP,
                    )
                ],
            )
            for prompt in prompts
        ]


def test_generate(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("baton.engine.llm.LLM", FakeLLM)
    flags = ["--max-tokens", "7", "--max-model-len", "99"]
    with pytest.MonkeyPatch.context():
        main_output = run_ok(capsys, "generate", "m", "-p", "hello [bold]", *flags)
    assert main_output == "HELLO [BOLD]\n"
    expected = EngineOptions.of("m", max_model_len=99)
    assert FakeLLM.made == {"options": expected, "max_tokens": 7}
    file = tmp_path / "p.txt"
    file.write_text("one\n\ntwo\n")
    rows = run_ok(capsys, "generate", "m", "-p", "zero", "--file", str(file), "--json").splitlines()
    assert [json.loads(row)["text"] for row in rows] == ["ZERO", "ONE", "TWO"]
    assert json.loads(rows[0])["finish_reason"] == "stop"
    assert run_ok(capsys, "generate", "m", "--chat", "-p", "four") == "[4]\n"
    monkeypatch.setattr("sys.stdin", __import__("io").StringIO("from\nstdin"))
    assert run_ok(capsys, "generate", "m") == "FROM\nSTDIN\n"


def run_ok(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    code, out, err = run(capsys, *arguments)
    assert code == 0, err
    return out


def test_a_model_that_is_not_there(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Missing(FakeLLM):
        def __init__(self, options: EngineOptions) -> None:
            raise ModelError(file=options.model.model, problem="is no model")

    monkeypatch.setattr("baton.engine.llm.LLM", Missing)
    code, out, err = run(capsys, "generate", "nosuch", "-p", "x")
    assert (code, out, err) == (1, "", "baton: nosuch: is no model\n")


def test_models_list(capsys: pytest.CaptureFixture[str]) -> None:
    begin = time.process_time()
    text = run_ok(capsys, "models", "list")
    assert time.process_time() - begin < 2
    assert "smollm2-135m" in text
    assert "Apache-2.0" in text
    assert max(len(line) for line in text.splitlines()) <= 100


def test_doctor_without_a_model(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BATON_API_KEY", "a-secret")
    text = run_ok(capsys, "doctor")
    for word in ("Machine", "cores", "torch", "BATON_CACHE"):
        assert word in text
    assert max(len(line) for line in text.splitlines()) <= 100
    assert "a-secret" not in text
    report = json.loads(run_ok(capsys, "doctor", "--device", "cpu", "--json"))
    assert report["machine"]["device"] == "cpu"
    assert report["environment"]["BATON_API_KEY"] == "set"


def test_doctor_with_a_model(capsys: pytest.CaptureFixture[str], tiny: Any) -> None:
    folder = tiny("llama")
    arguments = ["doctor", folder, "--device", "cpu", "--skip-tokenizer-init"]
    text = run_ok(capsys, *arguments)
    for word in ("Decisions", "max_model_len", "Attention backends", "nothing", "digest"):
        assert word in text
    assert max(len(line) for line in text.splitlines()) <= 100
    report = json.loads(run_ok(capsys, *arguments, "--json"))
    assert report["attention"]["prefill"] == "torch"
    assert report["attention"]["against"]["torch"] == []
    assert report["kv"]["bytes"] == report["kv"]["tokens"] * report["kv"]["bytes_per_token"]
    assert {d["name"] for d in report["decisions"]} >= {"dtype", "num_kv_pages", "step_time"}
    assert len(report["fingerprint"]["digest"]) == 16


@pytest.mark.parametrize(
    "name, value", [("BATON_DEBUG", "maybe"), ("BATON_LOG_LEVEL", "loud"), ("BATON_API_KEY", "é")]
)
def test_bad_environment_names_the_variable(name: str, value: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "baton.cli", "serve", "/nowhere", "--port=0"],
        capture_output=True,
        text=True,
        env={k: v for k, v in os.environ.items() if k != "BATON_DEBUG"} | {name: value},
    )
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    assert name.removeprefix("BATON_").lower() in done.stderr.lower()


def test_no_home_matters_only_where_a_cache_is_needed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", home)
    for name in ("BATON_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    assert run(capsys, "version")[0] == 0
    code, _, said = run(capsys, "models", "list")
    assert code == 2
    assert "BATON_CACHE" in said


def test_answers_that_the_terminal_cannot_show_and_no_terminal_at_all() -> None:
    code = (
        "import sys; from baton.cli import app\n"
        "app.build_app = lambda: lambda **_: print('東京')\n"
        "app.main([])"
    )
    env = os.environ | {"PYTHONIOENCODING": "ascii"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env)
    assert done.stdout == "\\u6771\\u4eac\n", done.stderr
    closed = subprocess.run(
        ["sh", "-c", '"$0" -m baton.cli version >&- 2>&-', sys.executable], check=False
    )
    assert closed.returncode == 0


@pytest.mark.parametrize(
    "arguments",
    [
        ("bench", "replay", "synthetic", "--time-scale", "nan"),
        ("bench", "replay", "synthetic", "--time-scale", "inf"),
        ("bench", "replay", "synthetic", "--timeout", "nan"),
        ("bench", "run", "--api-key", "é"),
        ("bench", "run", "--rate", "nan"),
        ("bench", "run", "--burstiness", "nan"),
        ("chat", "--url", "http://127.0.0.1:9", "--api-key", "a\nb"),
        ("serve", "/nowhere", "--port=0", "--host", "é..x"),
        ("doctor", "/nowhere", "--expect-fingerprint", "junk"),
    ],
)
def test_odd_values_exit_2(capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...]) -> None:
    code, _, said = run(capsys, *arguments)
    assert code == 2, said
    assert said.startswith("baton: ")
