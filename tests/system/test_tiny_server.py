"""The whole server on a tiny random model: load, faults, drains, and a real trace."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from fractions import Fraction
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from baton import LLM, SamplingParams
from baton.bench.load.run import run_load
from baton.bench.load.target import Target
from baton.bench.metrics import metrics
from baton.bench.record import Load
from baton.bench.workload.prompts import TokenPrompts
from baton.bench.workload.replay import Scales, replay
from baton.bench.workload.trace import read_trace
from helpers.paper import paper_lru
from helpers.served import Served, served

TRACE = Path(__file__).parents[2] / "../shared/traces/mooncake_conversation_trace.jsonl"
FLAGS = (
    "--skip-tokenizer-init",
    "--dtype=float32",
    "--max-model-len=2000",
    "--num-kv-pages=1024",
    "--threads=1",
    "--served-model-name=tiny",
)


@pytest.fixture(scope="module")
def server(tiny: Callable[[str], str]) -> Iterator[Served]:
    with served(tiny("llama"), *FLAGS) as running:
        yield running


@pytest.fixture
def client(server: Served) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


def body(prompt: list[int], **more: Any) -> dict[str, Any]:
    return {"model": "tiny", "prompt": prompt, "temperature": 0, "return_token_ids": True} | more


def test_http_equals_offline(server: Served, tiny: Callable[[str], str]) -> None:
    prompts = [[(7 * i + j) % 310 + 3 for j in range(5 + 11 * i)] for i in range(5)]
    with LLM(
        tiny("llama"),
        dtype="float32",
        max_model_len=2000,
        num_kv_pages=1024,
        threads=1,
        skip_tokenizer_init=True,
    ) as llm:
        params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
        offline = [o.completions[0].token_ids for o in llm.generate(prompts, params)]
    for prompt, expected in zip(prompts, offline, strict=True):
        answer = httpx.post(
            f"{server.url}/v1/completions",
            json=body(prompt, max_tokens=20, ignore_eos=True),
            timeout=60,
        ).json()
        assert answer["choices"][0]["token_ids"] == expected
        assert answer["usage"]["completion_tokens"] == 20


def test_two_hundred_streams(server: Served) -> None:
    async def one(client: openai.AsyncOpenAI, number: int) -> int:
        prompt = [3 + number % 300, 5, 6 + number // 300]
        stream = await client.completions.create(
            model="tiny",
            prompt=prompt,
            max_tokens=30,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
            extra_body={"ignore_eos": True},
        )
        tokens = 0
        async for event in stream:
            if event.usage is not None:
                tokens = event.usage.completion_tokens
        return tokens

    async def everyone() -> list[int]:
        async with openai.AsyncOpenAI(
            base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=120
        ) as client:
            return await asyncio.gather(*(one(client, number) for number in range(200)))

    assert asyncio.run(everyone()) == [30] * 200
    assert server.metric("num_requests_running") == 0


def test_disconnect_frees_pages(server: Served) -> None:
    with httpx.stream(
        "POST",
        f"{server.url}/v1/completions",
        json=body([9] * 100, max_tokens=1800, ignore_eos=True, stream=True),
        timeout=60,
    ) as response:
        lines = response.iter_lines()  # kept, since dropping it closes the connection
        assert [next(lines) for _ in range(5)]
        assert server.metric("num_requests_running") == 1
    deadline = time.monotonic() + 10
    while server.metric("num_requests_running") > 0:
        assert time.monotonic() < deadline, "the request went on after its client had left"
        time.sleep(0.05)
    assert server.metric("kv_cache_usage_perc") == 0


def test_kill_engine_during_streams(server: Served, client: openai.OpenAI) -> None:
    """Every open stream ends with an error at once; the engine comes back and serves."""
    results: list[str] = []

    def read(number: int) -> None:
        try:
            stream = client.completions.create(
                model="tiny",
                prompt=[number + 3, 4],
                max_tokens=1900,
                temperature=0,
                stream=True,
                extra_body={"ignore_eos": True},
            )
            for _ in stream:
                started.set()
            results.append("ended")
        except openai.APIError as error:
            results.append(str(error))

    started = threading.Event()
    threads = [threading.Thread(target=read, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    assert started.wait(30)
    os.kill(server.engine_pid(), signal.SIGKILL)
    for thread in threads:
        thread.join(20)
        assert not thread.is_alive(), "a stream hangs after the engine died"
    assert len(results) == 8
    assert all("engine process died" in text for text in results), results
    refused = httpx.post(f"{server.url}/v1/completions", json=body([5]), timeout=30)
    if refused.status_code != 200:  # unless it is back already
        assert refused.status_code == 503
        assert "Retry-After" in refused.headers
    server.await_ready()
    assert "restarted" in server.log()
    answer = httpx.post(f"{server.url}/v1/completions", json=body([5], max_tokens=3), timeout=60)
    assert answer.status_code == 200


def test_sigterm_drains(tiny: Callable[[str], str]) -> None:
    with served(tiny("llama"), *FLAGS) as server:
        events: list[str] = []

        def read() -> None:
            with httpx.stream(
                "POST",
                f"{server.url}/v1/completions",
                json=body([5, 6], max_tokens=1500, ignore_eos=True, stream=True),
                timeout=120,
            ) as response:
                for line in response.iter_lines():
                    events.append(line)
                    started.set()

        started = threading.Event()
        thread = threading.Thread(target=read)
        thread.start()
        assert started.wait(30)
        server.process.send_signal(signal.SIGTERM)
        time.sleep(0.3)
        late = httpx.post(f"{server.url}/v1/completions", json=body([5]), timeout=30)
        assert late.status_code == 503
        thread.join(60)
        assert "data: [DONE]" in events
        assert server.process.wait(30) == 0


def test_real_trace_hits_what_an_lru_hits_on_paper(tiny: Callable[[str], str]) -> None:
    """600 consecutive requests of a production trace, at 1/64 of their lengths and 1/8 of their
    time, on a pool that must evict."""
    if not TRACE.exists():
        pytest.skip("the Mooncake conversation trace is not beside this checkout")
    scale = Fraction(1, 64)
    scales = Scales(time=1 / 8, length=scale, output=scale)
    workload = replay(read_trace(TRACE, 600), scales, "conversation")
    pages = 6000
    flags = [f for f in FLAGS if "pages" not in f and "model-len" not in f]
    flags += [f"--num-kv-pages={pages}", "--block-size=8", "--max-model-len=2048"]
    with served(tiny("llama"), *flags) as server:
        target = Target(server.url, vocab=(3, 320))
        run = run_load(workload, Load(), target)
    assert [r.error for r in run.records if r.error is not None] == []
    measured = metrics(run)["hit"]["token"]
    generated = [r.output_tokens or 0 for r in run.records]
    prompts = [TokenPrompts((3, 320)).ids(job.segments) for job in workload.jobs]
    paper = paper_lru(prompts, 8, pages, generated)
    endless = paper_lru(prompts, 8, None)
    assert paper.ratio < endless.ratio, "the pool must be small enough to evict"
    print(f"hit {measured:.1%}, on paper {paper.ratio:.1%}, endless {endless.ratio:.1%}")
    assert abs(measured - paper.ratio) <= 0.02
