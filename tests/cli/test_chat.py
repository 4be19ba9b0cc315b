"""Chat in a terminal: turns, commands, failures; against an engine and against a server."""

from __future__ import annotations

import io
import json
from collections.abc import AsyncIterator, Iterator
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from baton.bench.stub.process import stub_server
from baton.bench.stub.profile import Profile
from baton.cli.app import main
from baton.core.errors import RequestFailed
from baton.core.request import Completion, Output


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


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    """URL of a stub server."""
    with stub_server(Profile(block=16)) as url:
        yield url


def test_turns_with_a_server(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], server: str
) -> None:
    flags = ["--url", server, "--max-tokens", "2", "--api-key", "k"]
    out, err = chat(monkeypatch, capsys, "hello\nagain\n", *flags)
    assert out.count(" t t") == 2
    assert "stub" in err
    last = httpx.get(f"{server}/stats").json()["last"]
    body = json.loads(last["body"])
    assert body["messages"][1] == {"role": "assistant", "content": " t t"}
    assert body["temperature"] == 0.0
    assert last["headers"]["authorization"] == "Bearer k"
