"""The engine process under supervision: it dies at every moment, and nobody waits for ever."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from baton import AsyncEngine, SamplingParams
from baton.config.options import EngineOptions
from baton.core.errors import ConfigError, RequestError, RequestFailed, Unavailable
from baton.core.request import Output
from baton.engine.async_engine import AT_ONCE
from baton.engine.child import EngineChild
from baton.engine.messages import AskStats
from helpers.proc import children

OPTIONS: dict[str, Any] = {
    "dtype": "float32",
    "block_size": 16,
    "max_model_len": 1024,
    "num_kv_pages": 256,
    "skip_tokenizer_init": True,
    "threads": 1,
}
LONG = SamplingParams(temperature=0, max_tokens=1000, ignore_eos=True)
SHORT = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)


def options_of(folder: str, **more: Any) -> EngineOptions:
    return EngineOptions.of(folder, **(OPTIONS | more))


def drive(
    folder: str, test: Callable[[AsyncEngine], Awaitable[None]], seconds: float = 60, **more: Any
) -> None:
    """Run `test` on an engine; both must end within `seconds`."""

    async def main() -> None:
        engine = await AsyncEngine.start(options_of(folder, **more))
        try:
            await test(engine)
        finally:
            await engine.stop()

    asyncio.run(asyncio.wait_for(main(), seconds))


async def until(condition: Callable[[], bool], seconds: float = 30) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        await asyncio.sleep(0.01)


async def read(engine: AsyncEngine, params: SamplingParams = SHORT) -> list[int]:
    outputs = [output async for output in engine.generate([5, 6, 7], params)]
    return [token for output in outputs for token in output.completions[0].token_ids]


async def freeze_and_kill(engine: AsyncEngine) -> None:
    """Kill the process, and keep the supervisor from noticing before the caller yields."""
    os.kill(engine.pid, signal.SIGKILL)
    time.sleep(0.3)  # not asyncio.sleep: the event loop must not run


def test_a_request_sent_to_a_dead_process_fails(tiny: Callable[[str], str]) -> None:
    async def test(engine: AsyncEngine) -> None:
        await freeze_and_kill(engine)
        assert engine.state == "ready", "nobody has noticed yet"
        stats = asyncio.create_task(engine.stats())
        with pytest.raises(Unavailable, match="SIGKILL"):
            await engine.submit([5, 6], SHORT)
        with pytest.raises(Unavailable, match="SIGKILL"):
            await stats
        await until(lambda: engine.state == "ready")
        assert len(await read(engine)) == 3

    drive(tiny("llama"), test)


def test_an_abort_for_a_dead_process_does_not_stop_the_supervisor(
    tiny: Callable[[str], str],
) -> None:
    async def test(engine: AsyncEngine) -> None:
        leaving, staying = [await engine.submit([5, 6], LONG) for _ in range(2)]
        await anext(leaving)
        await freeze_and_kill(engine)
        await asyncio.wait_for(leaving.cancel(), 5)
        with pytest.raises(Unavailable):
            async for _ in staying:
                pass
        await until(lambda: engine.state == "ready")

    drive(tiny("llama"), test)


def test_a_process_that_dies_while_starting_again_is_tried_once_more(
    tiny: Callable[[str], str],
) -> None:
    async def test(engine: AsyncEngine) -> None:
        first = engine.pid
        os.kill(first, signal.SIGKILL)
        await until(lambda: engine.state == "restarting" and engine.pid != first)
        second = engine.pid
        os.kill(second, signal.SIGKILL)
        await until(lambda: engine.state == "ready" or engine.state == "dead")
        assert engine.state == "ready", engine.reason
        assert engine.pid not in (first, second)
        assert len(await read(engine)) == 3

    drive(tiny("llama"), test)


def test_a_model_that_changed_is_not_served_after_a_restart(
    tiny: Callable[[str], str], tmp_path: Path
) -> None:
    from helpers.tiny import save_tiny

    folder = str(save_tiny("llama", tmp_path))

    async def test(engine: AsyncEngine) -> None:
        save_tiny("llama", tmp_path, seed=1)
        os.kill(engine.pid, signal.SIGKILL)
        await until(lambda: engine.state == "dead")
        assert "weights" in engine.reason
        with pytest.raises(Unavailable, match="weights"):
            await engine.submit([5], SHORT)

    drive(folder, test)


def test_a_process_that_dies_too_often_is_given_up(
    tiny: Callable[[str], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("baton.engine.async_engine.MAX_RESTARTS", 0)

    async def test(engine: AsyncEngine) -> None:
        stream = await engine.submit([5, 6], LONG)
        os.kill(engine.pid, signal.SIGKILL)
        with pytest.raises(Unavailable, match="SIGKILL"):
            async for _ in stream:
                pass
        await until(lambda: engine.state == "dead")

    drive(tiny("llama"), test)


def test_death_while_draining_starts_nothing(tiny: Callable[[str], str]) -> None:
    async def test(engine: AsyncEngine) -> None:
        stream = await engine.submit([5, 6], LONG)
        pid = engine.pid
        draining = asyncio.create_task(engine.drain(30))
        await anext(stream)
        os.kill(pid, signal.SIGKILL)
        await asyncio.wait_for(draining, 5)
        await until(lambda: engine.state == "dead")
        assert engine.pid == pid

    drive(tiny("llama"), test)


def test_an_unexpected_error_of_the_supervisor_is_the_end(
    tiny: Callable[[str], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def test(engine: AsyncEngine) -> None:
        stream = await engine.submit([5, 6], LONG)

        async def broken(self: EngineChild, most: int = 1) -> None:
            raise ValueError("broken on purpose")

        monkeypatch.setattr(EngineChild, "receive", broken)
        with pytest.raises(Unavailable, match="broken on purpose"):
            async for _ in stream:
                pass
        assert engine.state == "dead"

    drive(tiny("llama"), test)


@pytest.mark.parametrize("n", [1, 3])
def test_a_reader_that_falls_behind_gets_all_in_one_delta(
    tiny: Callable[[str], str], n: int
) -> None:
    params = SamplingParams(max_tokens=60, ignore_eos=True, seed=3, n=n, logprobs=0)

    async def test(engine: AsyncEngine) -> None:
        prompt = [output async for output in engine.generate([5, 6], params)]
        stream = await engine.submit([5, 6], params)
        late = [await anext(stream)]
        await until(lambda: not stream.answers.unfinished)
        late += [output async for output in stream]
        assert len(late) == 2
        assert late[-1].finished
        for index in range(n):
            parts = [
                [c for out in outputs for c in out.completions if c.index == index]
                for outputs in (prompt, late)
            ]
            tokens = [[token for c in part for token in c.token_ids] for part in parts]
            assert tokens[0] == tokens[1]
            assert len(tokens[1]) == 60 == sum(len(c.logprobs or ()) for c in parts[1])
            assert [part[-1].finish_reason for part in parts] == ["length", "length"]

    drive(tiny("llama"), test)


def test_messages_that_wait_are_taken_together(
    tiny: Callable[[str], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes: list[int] = []
    receive = EngineChild.receive

    async def counted(self: EngineChild, most: int = 1) -> Any:
        found = await receive(self, most)
        sizes.append(len(found))
        return found

    async def test(engine: AsyncEngine) -> None:
        stream = await engine.submit([5, 6], LONG)
        await anext(stream)
        sizes.clear()
        time.sleep(1.0)  # not asyncio.sleep: the engine goes on, and nobody listens
        async for output in stream:
            if output.finished:
                break
        assert max(sizes) > 1
        assert max(sizes) <= AT_ONCE

    monkeypatch.setattr(EngineChild, "receive", counted)
    drive(tiny("llama"), test)


def test_what_came_before_an_error_is_read_before_it(tiny: Callable[[str], str]) -> None:
    async def test(engine: AsyncEngine) -> None:
        stream = await engine.submit([5, 6], LONG)
        first = await anext(stream)
        await until(lambda: stream._delta is not None)
        await freeze_and_kill(engine)
        await until(lambda: stream._error is not None)
        behind = await anext(stream)
        assert not behind.finished
        assert len(first.completions[0].token_ids + behind.completions[0].token_ids) >= 2
        with pytest.raises(Unavailable, match="SIGKILL"):
            await anext(stream)
        with pytest.raises(StopAsyncIteration):
            await anext(stream)

    drive(tiny("llama"), test)


def test_readers_that_share_a_stream_get_each_delta_once_and_all_end(
    tiny: Callable[[str], str],
) -> None:
    params = SamplingParams(temperature=0, max_tokens=200, ignore_eos=True)

    async def test(engine: AsyncEngine) -> None:
        whole = await read(engine, params)
        stream = await engine.submit([5, 6, 7], params)

        async def share() -> list[Output]:
            return [output async for output in stream]

        shares = await asyncio.gather(*(share() for _ in range(3)))
        outputs = [output for outputs in shares for output in outputs]
        tokens = [token for output in outputs for token in output.completions[0].token_ids]
        assert sorted(tokens) == sorted(whole)
        assert sum(output.finished for output in outputs) == 1

    drive(tiny("llama"), test)


def test_a_reader_that_waits_hears_of_a_cancellation(tiny: Callable[[str], str]) -> None:
    async def test(engine: AsyncEngine) -> None:
        stream = await engine.submit([5, 6], LONG)
        os.kill(engine.pid, signal.SIGSTOP)  # soon nothing more comes
        reading = asyncio.ensure_future(anext(stream, None))
        while (await asyncio.wait({reading}, timeout=0.2))[0]:
            reading = asyncio.ensure_future(anext(stream, None))
        await stream.cancel()
        assert await asyncio.wait_for(reading, 5) is None
        os.kill(engine.pid, signal.SIGCONT)

    drive(tiny("llama"), test)


def test_a_delta_is_not_lost_to_a_cancelled_reader(tiny: Callable[[str], str]) -> None:
    params = SamplingParams(temperature=0, max_tokens=100, ignore_eos=True)

    async def test(engine: AsyncEngine) -> None:
        whole = await read(engine, params)
        stream, tokens = await engine.submit([5, 6, 7], params), list[int]()
        while len(tokens) < 100:
            reading = asyncio.ensure_future(anext(stream))
            await asyncio.sleep(0.0005)
            if reading.done() or not reading.cancel():
                tokens += reading.result().completions[0].token_ids
            else:
                with pytest.raises(asyncio.CancelledError):
                    await reading
        assert tokens == whole

    drive(tiny("llama"), test)


def test_one_bad_output_fails_one_stream(tiny: Callable[[str], str]) -> None:
    async def test(engine: AsyncEngine) -> None:
        bad, good = [
            await engine.submit([5, 6], SamplingParams(max_tokens=50, ignore_eos=True))
            for _ in range(2)
        ]

        def push(out: Any) -> Output:
            raise ValueError("broken on purpose")

        bad.answers.push = push  # type: ignore[method-assign]
        with pytest.raises(RequestFailed, match="broken on purpose"):
            async for _ in bad:
                pass
        outputs = [output async for output in good]
        assert sum(len(o.completions[0].token_ids) for o in outputs) == 50
        await asyncio.sleep(0.2)
        assert (await engine.stats()).running == 0

    drive(tiny("llama"), test)


def test_cancelled_submits_leave_nothing_behind(tiny: Callable[[str], str]) -> None:
    async def test(engine: AsyncEngine) -> None:
        tasks = [asyncio.create_task(engine.submit([5, 6], LONG)) for _ in range(50)]
        await asyncio.sleep(0)
        for task in tasks:
            task.cancel()
        done = await asyncio.gather(*tasks, return_exceptions=True)
        assert all(isinstance(result, asyncio.CancelledError) for result in done)
        begin = time.monotonic()
        while (await engine.stats()).kv_pages_used:
            assert time.monotonic() < begin + 20, "pages are still held"
        await engine.drain(5)
        assert time.monotonic() < begin + 5

    drive(tiny("llama"), test)


def test_start_that_is_cancelled_ends_at_once(tiny: Callable[[str], str]) -> None:
    async def main() -> None:
        for delay in (0.0, 0.05, 0.5):
            task = asyncio.create_task(AsyncEngine.start(options_of(tiny("llama"))))
            await asyncio.sleep(delay)
            begin = time.monotonic()
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert time.monotonic() - begin < 3

    asyncio.run(asyncio.wait_for(main(), 30))


def test_errors_while_starting_are_the_engines_own(tiny: Callable[[str], str]) -> None:
    with pytest.raises(ConfigError, match="num-kv-pages"):
        asyncio.run(AsyncEngine.start(options_of(tiny("llama"), num_kv_pages=0)))


def test_stop_ends_a_process_that_hangs(tiny: Callable[[str], str]) -> None:
    async def main() -> None:
        engine = await AsyncEngine.start(options_of(tiny("llama")))
        os.kill(engine.pid, signal.SIGSTOP)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(engine.stop(), 0.5)
        begin = time.monotonic()
        await engine.stop()
        assert time.monotonic() - begin < 5, "it was not killed when stop() was cancelled"

    asyncio.run(asyncio.wait_for(main(), 30))


def test_a_message_to_a_process_that_is_not_there_is_dropped(tiny: Callable[[str], str]) -> None:
    async def main() -> None:
        child = EngineChild(options_of(tiny("llama")))
        child.send(AskStats(0))
        os.kill(child.pid, signal.SIGKILL)
        with pytest.raises(Unavailable, match="SIGKILL"):
            await child.ready()
        child.send(AskStats(1))
        await child.stop()
        await child.stop()

    asyncio.run(asyncio.wait_for(main(), 20))


def test_request_ids_are_checked(tiny: Callable[[str], str]) -> None:
    async def test(engine: AsyncEngine) -> None:
        stream = await engine.submit([5], LONG, request_id="a")
        with pytest.raises(RequestError, match="in use"):
            await engine.submit([5], SHORT, request_id="a")
        with pytest.raises(RequestError, match="1024"):
            await engine.submit([5] * 1024, SHORT)
        await stream.cancel()
        assert len(await read(engine)) == 3

    drive(tiny("llama"), test)


@pytest.mark.parametrize("n", [1, 2])
def test_a_request_id_that_comes_again_is_another_request(
    tiny: Callable[[str], str], n: int
) -> None:
    params = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True, n=n)
    long = SamplingParams(temperature=0, max_tokens=1000, ignore_eos=True, n=n)

    async def test(engine: AsyncEngine) -> None:
        whole = await read(engine)
        for _ in range(10):
            old = await engine.submit([9, 8], long, request_id="a")
            await anext(old)
            await old.cancel()
            stream = await engine.submit([5, 6, 7], params, request_id="a")
            await old.cancel()  # harmless, as it says
            if stream.answers.unfinished:  # all of it may have come with its acceptance
                with pytest.raises(RequestError, match="in use"):
                    await engine.submit([5], SHORT, request_id="a")
            outputs = [output async for output in stream]
            assert {output.request_id for output in outputs} == {"a"}
            for index in range(n):
                parts = [c for out in outputs for c in out.completions if c.index == index]
                assert [token for c in parts for token in c.token_ids] == whole

    drive(tiny("llama"), test)


def test_values_of_wrong_types_harm_nobody_else(tiny: Callable[[str], str]) -> None:
    unsent = "the request cannot be"
    wrong: list[tuple[Any, dict[str, Any], str]] = [
        ([1.5, 2], {}, r"prompt\[0\] must be a token id .*1\.5"),
        ([5, "a"], {}, r"prompt\[1\]"),
        ([True], {}, r"prompt\[0\] .*bool"),
        ([object()], {}, r"prompt\[0\]"),
        (None, {}, "prompt must be text or a list of token ids, got None"),
        ({5: 6}, {}, "prompt must be text or a list"),
        (b"ab", {}, "prompt must be text or a list"),
        ([2**70], {}, unsent),
        ([5], {"priority": "high"}, unsent),
        ([5], {"priority": 2**70}, unsent),
        ([5], {"cache_salt": 5}, unsent),
        ([5], {"cache_salt": "\ud800"}, unsent),
    ]

    async def test(engine: AsyncEngine) -> None:
        pid = engine.pid
        other = await engine.submit([5, 6, 7], LONG)
        for prompt, more, named in wrong:
            with pytest.raises(RequestError, match=named):
                await engine.submit(prompt, SHORT, request_id="a", **more)
        assert sum([len(o.completions[0].token_ids) async for o in other]) == 1000
        assert (await engine.stats()).running == 0
        assert engine.pid == pid
        for prompt in (np.array([5, 6]), range(5, 7)):
            outputs = [output async for output in engine.generate(prompt, SHORT)]
            assert outputs[-1].prompt_token_ids == [5, 6]

    drive(tiny("llama"), test)


def test_open_streams_end_when_the_engine_is_stopped(tiny: Callable[[str], str]) -> None:
    async def test(engine: AsyncEngine) -> None:
        stream, cancelled = [await engine.submit([5, 6], LONG) for _ in range(2)]
        await anext(stream)
        await cancelled.cancel()
        assert [delta async for delta in cancelled] == []
        await engine.stop()
        with pytest.raises(Unavailable, match="has stopped"):
            async for _ in stream:
                pass
        assert [delta async for delta in stream] == []

    drive(tiny("llama"), test)


def test_death_of_a_rank_is_noticed_when_idle(tiny: Callable[[str], str]) -> None:
    async def test(engine: AsyncEngine) -> None:
        first = engine.pid
        os.kill(rank_of(first), signal.SIGKILL)
        await until(lambda: engine.pid != first and engine.state == "ready")
        assert len(await read(engine)) == 3
        stream = await engine.submit([5, 6], LONG)
        await anext(stream)
        os.kill(rank_of(engine.pid), signal.SIGKILL)
        with pytest.raises(Unavailable):
            async for _ in stream:
                pass
        await until(lambda: engine.state == "ready")

    drive(tiny("llama"), test, tensor_parallel_size=2)


def rank_of(parent: int) -> int:
    """The worker process of an engine process."""
    (found,) = children(parent, "baton.engine.worker")
    return found
