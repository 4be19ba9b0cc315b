"""Chat in a terminal: turns, commands, failures; against an engine and against a server."""

from __future__ import annotations

import asyncio
import io
import threading
from collections.abc import AsyncIterator, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from baton.cli.app import main
from baton.core.errors import RequestFailed
from baton.core.request import Completion, Output
from helpers.stub_server import Stub


@pytest.fixture(autouse=True)
def _plain(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("BATON_DEBUG", raising=False)


def chat(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], text: str, *flags: str
) -> tuple[str, str]:
    monkeypatch.setattr("sys.stdin", io.StringIO(text))
    with pytest.raises(SystemExit) as end:
        main(["chat", *flags])
    assert not end.value.code
    said = capsys.readouterr()
    return said.out, said.err


class FakeEngine:
    """Says how many messages there were; fails when told to."""

    stopped = False
    seen: list[list[dict[str, str]]]

    @classmethod
    async def start(cls, options: Any) -> FakeEngine:
        FakeEngine.stopped, FakeEngine.seen = False, []
        engine = cls()
        engine.tokenizer = SimpleNamespace(chat=engine.remember)
        return engine

    tokenizer: Any

    def remember(self, messages: list[dict[str, str]]) -> list[int]:
        FakeEngine.seen.append(messages)
        return [len(messages)]

    async def submit(self, prompt: list[int], sampling: Any) -> FakeStream:
        return FakeStream(prompt[0], fail="fail" in FakeEngine.seen[-1][-1]["content"])

    async def stop(self) -> None:
        FakeEngine.stopped = True


class FakeStream:
    def __init__(self, count: int, fail: bool) -> None:
        self.count, self.fail = count, fail

    async def __aiter__(self) -> AsyncIterator[Output]:
        for piece in ("got ", str(self.count)):
            if self.fail:
                raise RequestFailed("this one broke")
            yield Output(
                request_id="r",
                prompt_token_ids=[],
                completions=[Completion(index=0, text=piece, token_ids=[1])],
            )

    async def cancel(self) -> None: ...


def test_turns_with_an_engine(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("baton.engine.async_engine.AsyncEngine", FakeEngine)
    text = "one\n\ntwo\nfail\nthree\n/what\n/clear\nfour\n/exit\nnever\n"
    out, err = chat(monkeypatch, capsys, text, "m", "--system", "be brief")
    # a failed turn leaves no trace; /clear keeps the system message
    assert [line for line in out.splitlines() if line] == ["got 2", "got 4", "got 6", "got 2"]
    assert "this one broke" in err
    assert FakeEngine.seen[-1][0] == {"role": "system", "content": "be brief"}
    assert FakeEngine.seen[1][2] == {"role": "assistant", "content": "got 2"}
    assert FakeEngine.stopped


@pytest.fixture
def server() -> Iterator[Stub]:
    """A stub server in a thread of its own."""
    stub, loop = Stub(), asyncio.new_event_loop()
    ready, done = threading.Event(), asyncio.Event()

    async def serve() -> None:
        async with stub.serving():
            ready.set()
            await done.wait()

    thread = threading.Thread(target=loop.run_until_complete, args=(serve(),))
    thread.start()
    ready.wait()
    yield stub
    loop.call_soon_threadsafe(done.set)
    thread.join()
    loop.close()


def test_turns_with_a_server(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], server: Stub
) -> None:
    flags = ["--url", server.url, "--max-tokens", "2", "--api-key", "k"]
    out, err = chat(monkeypatch, capsys, "hello\nagain\n", *flags)
    assert out.count("t0 t1") == 2
    assert "stub-model" in err
    assert server.bodies[1]["messages"][1] == {"role": "assistant", "content": " t0 t1"}
    assert server.bodies[0]["temperature"] == 0.0
    assert "bearer k" in server.headers[-1].lower()


def test_replay_command(capsys: pytest.CaptureFixture[str], server: Stub, tmp_path: Any) -> None:
    flags = ["--requests", "5", "--length-scale", "1/64", "--time-scale", "0", "--max-len", "64"]
    out = tmp_path / "r.json"
    with pytest.raises(SystemExit) as end:
        main(["replay", "synthetic", "--base-url", server.url, *flags, "--out", str(out)])
    assert not end.value.code
    text = capsys.readouterr().out
    assert "5 answered, 0 failed" in text
    assert max(len(line) for line in text.splitlines()) <= 100
    assert '"length_scale": "1/64"' in out.read_text()
    assert all(len(b["prompt"]) + b["max_tokens"] <= 64 for b in server.bodies)
    assert len({tuple(b["prompt"][:8]) for b in server.bodies}) == 1
