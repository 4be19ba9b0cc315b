"""An engine process that hangs is noticed, and an idle or busy one is not taken for it."""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
import time
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from baton import AsyncEngine, SamplingParams
from baton.config.options import EngineOptions
from baton.core.errors import Unavailable
from baton.engine import async_engine, pulse
from baton.engine.messages import AskStats, ToEngine
from baton.engine.pulse import Pulse

LONG = SamplingParams(temperature=0, max_tokens=600, ignore_eos=True)


def test_a_sign_of_life_is_owed_from_the_question_on(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(pulse.time, "monotonic", lambda: now)
    made = Pulse(longest_step=5.0)
    assert made.patience == 45.0
    now += 9.9
    assert not made.due, "it was asked not long ago"
    now += 0.1
    assert made.due
    assert made.due, "nobody has asked yet"
    made.asked()
    assert not made.due, "one question at a time"
    now += 45.0
    assert not made.lost
    now += 0.1
    assert made.lost
    made.longest_step = 6.0
    assert not made.lost, "a step may take longer, as is known by now"
    now += 3.0
    assert made.lost
    made.heard()
    assert not made.lost
    now += 1000.0
    assert not made.lost, "nobody asked"


def drive(
    folder: str, monkeypatch: pytest.MonkeyPatch, test: Callable[[AsyncEngine], Awaitable[None]]
) -> None:
    """Run `test` on an engine that is asked every 0.2 s, and has a second or so to answer."""
    for module in (async_engine, pulse):
        monkeypatch.setattr(module, "INTERVAL", 0.2)
    monkeypatch.setattr(pulse, "PATIENCE", 1.0)
    options = EngineOptions.of(
        folder, dtype="float32", max_model_len=1024, num_kv_pages=256, skip_tokenizer_init=True,
        threads=1,
    )  # fmt: skip

    async def main() -> None:
        engine = await AsyncEngine.start(options)
        try:
            await test(engine)
        finally:
            os.kill(engine.pid, signal.SIGCONT)
            await engine.stop()

    asyncio.run(asyncio.wait_for(main(), 60))


async def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        await asyncio.sleep(0.01)


def test_a_stopped_process_is_not_ready_until_it_goes_on(
    tiny: Callable[[str], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def test(engine: AsyncEngine) -> None:
        stream = await engine.submit([5, 6], LONG)
        await anext(stream)
        os.kill(engine.pid, signal.SIGSTOP)
        await until(lambda: engine.state == "unresponsive")
        assert "no sign of life from the engine" in engine.reason
        with pytest.raises(Unavailable, match="no sign of life"):
            await engine.submit([5], LONG)
        os.kill(engine.pid, signal.SIGCONT)
        await until(lambda: engine.state == "ready")
        assert engine.reason == ""
        found = [token async for out in stream for token in out.completions[0].token_ids]
        assert 590 < len(found) <= 600, "what was open goes on"

    drive(tiny("llama"), monkeypatch, test)


def test_the_bound_follows_the_cost_model(
    tiny: Callable[[str], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a busy engine, which nobody needs to ask whether it is there."""

    async def test(engine: AsyncEngine) -> None:
        first = engine.info.longest_step
        stream = await engine.submit([5, 6], LONG)
        await until(lambda: engine._pulse.longest_step != first)
        assert engine._pulse.longest_step > 0
        assert engine._streams, "it was asked while it was busy"
        await stream.cancel()
        assert (await engine.stats()).longest_step == engine._pulse.longest_step

    drive(tiny("llama"), monkeypatch, test)


def test_a_look_that_fails_is_not_the_last_one(
    tiny: Callable[[str], str], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def test(engine: AsyncEngine) -> None:
        child: Any = engine._child
        send, failed = child.send, 0

        def fail_twice(message: ToEngine) -> None:
            nonlocal failed
            if isinstance(message, AskStats) and failed < 2:
                failed += 1
                raise OSError("broken on purpose")
            send(message)

        child.send = fail_twice
        await until(lambda: failed == 2)
        assert engine.state == "ready"
        os.kill(engine.pid, signal.SIGSTOP)
        await until(lambda: engine.state == "unresponsive")

    drive(tiny("llama"), monkeypatch, test)
    assert "broken on purpose" in caplog.text


def test_an_unresponsive_process_that_dies_is_started_again(
    tiny: Callable[[str], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def test(engine: AsyncEngine) -> None:
        first = engine.pid
        os.kill(first, signal.SIGSTOP)
        await until(lambda: engine.state == "unresponsive")
        os.kill(first, signal.SIGKILL)
        await until(lambda: engine.state == "ready" and engine.pid != first)

    drive(tiny("llama"), monkeypatch, test)


def test_an_idle_engine_stays_ready_and_is_asked_now_and_then(
    tiny: Callable[[str], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def test(engine: AsyncEngine) -> None:
        asked: list[float] = []
        send = engine._child.send

        def note(message: ToEngine) -> None:
            if isinstance(message, AskStats):
                asked.append(time.monotonic())
            send(message)

        child: Any = engine._child
        child.send = note
        begin = time.monotonic()
        while time.monotonic() - begin < 3:  # three times its patience
            assert engine.state == "ready"
            await asyncio.sleep(0.02)
        assert asked
        assert min(b - a for a, b in itertools.pairwise(asked)) >= 0.2

    drive(tiny("llama"), monkeypatch, test)
