"""Processes that die at bad moments, interrupts in the middle of a step, engines not closed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from baton import LLM, SamplingParams
from baton.core.errors import ConfigError, Unavailable
from baton.core.request import Request
from baton.engine import executor
from baton.models.decoder import CausalLM
from helpers.deep import fix_cost

Tiny = Callable[[str], str]
OPTIONS: dict[str, Any] = {
    "dtype": "float32",
    "max_model_len": 600,
    "num_kv_pages": 128,
    "threads": 1,
    "skip_tokenizer_init": True,
}
SHORT = SamplingParams(max_tokens=4, temperature=0, ignore_eos=True)
LONG = SamplingParams(max_tokens=500, temperature=0, ignore_eos=True)


def ids(llm: LLM, sampling: SamplingParams = SHORT) -> list[int]:
    return llm.generate([[5, 6]], sampling)[0].completions[0].token_ids


@pytest.fixture
def interruptible() -> Iterator[None]:
    """Python's own answer to Ctrl-C: a shell lets what it runs in the background ignore it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interruptible")
def test_an_interrupt_waits_for_the_end_of_a_step(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    with LLM(tiny("llama"), **OPTIONS) as llm:
        expected = ids(llm)
        launch, launched = llm.core.executor.launch, 0

        def interrupted(plan: Any) -> Any:
            nonlocal launched
            launched += 1
            if launched == 5:
                signal.raise_signal(signal.SIGINT)
            return launch(plan)

        monkeypatch.setattr(llm.core.executor, "launch", interrupted)
        with pytest.raises(KeyboardInterrupt):
            ids(llm, LONG)
        assert launched < 10
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
        assert ids(llm) == expected
        assert llm.stats().kv_pages_used == 0


@pytest.mark.parametrize("late", [False, True])
def test_a_chunk_that_fails_between_layers_fails_alone(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch, late: bool
) -> None:
    """One request decodes; another's chunk goes by layers beside it and breaks in the second, with
    its next part planned already, or in the last, with a decode of it planned already."""

    fix_cost(monkeypatch, 2e-3)
    long = [7 + i % 90 for i in range(80)]
    options = OPTIONS | {"max_num_seqs": 2, "step_time": "60ms", "enable_prefix_caching": False}
    with LLM(tiny("hy_v3"), **options) as llm:
        alone, after = ids(llm, LONG), llm.generate([long], SHORT)[0].completions[0].token_ids
        through, broken = CausalLM.through, 0

        def breaking(model: CausalLM, hidden: Any, context: Any, first: int, last: int) -> Any:
            nonlocal broken
            wanted = last == llm.config.model.num_layers if late else first == 1
            if first and wanted and not broken:
                broken += 1
                raise RuntimeError("out of something")
            return through(model, hidden, context, first, last)

        monkeypatch.setattr(CausalLM, "through", breaking)
        core, found = llm.core, dict[str, list[Any]](decode=[], long=[])
        core.add([Request(request_id="decode", prompt=[5, 6], sampling=LONG)])
        added = False
        while core.has_work():
            for output in core.step():
                found[output.request_id].append(output)
            if found["decode"] and not added:
                core.add([Request(request_id="long", prompt=long, sampling=SHORT)])
                added = True
        core.scheduler.check()
        assert broken == 1
        assert "out of something" in (found["long"][-1].error or "")
        assert [t for out in found["decode"] for t in out.token_ids] == alone
        assert llm.generate([long], SHORT)[0].completions[0].token_ids == after
        assert llm.stats().kv_pages_used == 0


def test_a_closed_llm_says_so(tiny: Tiny) -> None:
    llm = LLM(tiny("llama"), **OPTIONS)
    llm.close()
    llm.close()
    with pytest.raises(Unavailable, match="closed"):
        ids(llm)


def test_a_device_out_of_step_with_the_host_ends_the_engine(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: Any) -> None:
        raise RuntimeError("broken on purpose")

    for owner, name in (("slots", "apply"), ("sampler", "admit")):
        with LLM(tiny("llama"), **OPTIONS) as llm:
            monkeypatch.setattr(getattr(llm.core.executor.runner, owner), name, broken)
            for _ in range(2):
                with pytest.raises(Unavailable, match=r"out of step with the host.*on purpose"):
                    ids(llm)


def test_a_rank_that_ends_while_loading_stops_the_start(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    def spawn(*arguments: str, **more: Any) -> subprocess.Popen[bytes]:
        return subprocess.Popen([sys.executable, "-c", "exit(3)"], stdin=subprocess.PIPE)

    monkeypatch.setattr(executor, "spawn", spawn)
    begin = time.monotonic()
    with pytest.raises(Unavailable, match="rank 1 ended with exit code 3"):
        LLM(tiny("llama"), **OPTIONS, tensor_parallel_size=2)
    assert time.monotonic() - begin < 20


SPLIT = """
import sys
from baton import LLM, SamplingParams
from baton.core.errors import ConfigError, Unavailable
options = dict(eval(sys.argv[2]), tensor_parallel_size=2)
llm = LLM(sys.argv[1], **options)
llm.generate([[5, 6]], SamplingParams(max_tokens=4))
try:
    LLM(sys.argv[1], **options)
except ConfigError as error:
    print(error)
worker = llm.core.executor._ranks._workers[0]
worker.kill()
worker.wait()
for _ in range(2):
    try:
        llm.generate([[5, 6]], SamplingParams(max_tokens=400, ignore_eos=True))
    except Unavailable as error:
        print(error)
if sys.argv[3] == "close":
    llm.close()
"""


@pytest.mark.parametrize("end", [pytest.param("close", marks=pytest.mark.slow), "forget"])
def test_a_killed_rank_fails_requests_and_nothing_hangs(
    tiny: Tiny, tmp_path: Path, end: str
) -> None:
    done = _python(SPLIT, tiny("llama"), repr(OPTIONS), end, tmp=tmp_path)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert "close it first" in lines[0]
    assert all("rank 1 ended with signal SIGKILL" in line for line in lines[1:]), lines
    assert len(lines) == 3
    assert list(tmp_path.glob("baton-*")) == []


FORGOTTEN = """
import asyncio, sys
from baton import SamplingParams
from baton.config.options import EngineOptions
from baton.engine.async_engine import AsyncEngine

async def main():
    engine = await AsyncEngine.start(EngineOptions.of(sys.argv[1], **eval(sys.argv[2])))
    await engine.submit([5], SamplingParams(max_tokens=500, ignore_eos=True))
    print(engine.pid)

asyncio.run(main())
"""


def test_an_engine_never_stopped_does_not_hold_up_the_exit(tiny: Tiny, tmp_path: Path) -> None:
    done = _python(FORGOTTEN, tiny("llama"), repr(OPTIONS), tmp=tmp_path)
    assert done.returncode == 0, done.stderr
    deadline = time.monotonic() + 10
    while Path(f"/proc/{int(done.stdout)}").exists():
        assert time.monotonic() < deadline, "the engine process outlives its owner"
        time.sleep(0.05)
    assert list(tmp_path.glob("baton-*")) == []


def _python(code: str, *arguments: str, tmp: Path) -> subprocess.CompletedProcess[str]:
    env = dict(os.environ, PYTHONPATH=os.pathsep.join(sys.path), TMPDIR=str(tmp))
    command = [sys.executable, "-c", code, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=90, env=env)


def test_the_api_process_does_not_load_torch(tmp_path: Path) -> None:
    code = "import sys, baton.engine.async_engine; print('torch' in sys.modules)"
    assert _python(code, tmp=tmp_path).stdout == "False\n"


def test_a_second_group_in_one_process_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch
    import torch.distributed

    from baton.parallel.group import make_group

    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    with pytest.raises(ConfigError, match="close it first"):
        make_group(0, 2, "file:///nowhere", torch.device("cpu"))
