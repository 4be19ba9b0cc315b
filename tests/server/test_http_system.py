"""Models, tokenize, health, version, API key, CORS, metrics, options."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable
from typing import Any

import openai
import pytest

from baton.core.errors import ConfigError
from baton.core.request import Completion, FinishReason, Output, Timing
from baton.core.sampling import SamplingParams
from baton.server import openai as openai_routes
from baton.server import prompts
from baton.server.generate import Job
from baton.server.metrics import Histogram, Metrics, StreamMeter
from baton.server.options import ServerOptions
from baton.server.process import bind
from baton.server.prompts import Prompt
from baton.server.schemas import ChatMessage
from baton.server.state import ServerState
from helpers.fake_engine import FakeEngine, FakeTokenizer, Script
from helpers.serving import Running, running

TEXT, CHAT = "/v1/completions", "/v1/chat/completions"


def test_models(server: Running) -> None:
    cards = server.client.models.list().data
    assert [card.id for card in cards] == ["fake", "alias"]
    extra = cards[0].model_extra
    assert extra is not None
    assert extra["max_model_len"] == 4096
    assert extra["fingerprint"]["digest"] == server.engine.fingerprint.digest
    assert server.client.models.retrieve("alias").id == "alias"


def test_tokenize_and_detokenize(server: Running) -> None:
    answer = server.post("/tokenize", prompt="hé", return_token_strs=True).json()
    assert answer["tokens"] == [256, 104, 195, 169]
    assert (answer["count"], answer["max_model_len"]) == (4, 4096)
    assert answer["token_strs"][:2] == ["<s>", "h"]
    plain = server.post("/tokenize", prompt="h", add_special_tokens=False).json()
    assert plain["tokens"] == [104]
    assert plain["token_strs"] is None
    chat = server.post("/tokenize", messages=[{"role": "user", "content": "x"}]).json()
    assert chat["count"] == len("user: x\nassistant: ") + 1
    assert server.post("/detokenize", tokens=[104, 105]).json() == {"prompt": "hi"}
    assert server.post("/tokenize").status_code == 400
    assert server.post("/detokenize", tokens="hi").json()["error"]["param"] == "tokens"


LONG = [97] * 5000
SAID = [{"role": "user", "content": "x"}]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/tokenize", {"prompt": "x" * 5000}),
        ("/tokenize", {"messages": SAID * 1000}),
        ("/detokenize", {"tokens": LONG}),
        (CHAT, {"messages": SAID * 1000}),
        (TEXT, {"prompt": "x" * 5000}),
        (TEXT, {"prompt": ["x" * 100] * 100}),
        (TEXT, {"prompt": LONG}),
        (TEXT, {"prompt": [LONG[:100]] * 100}),
    ],
)
def test_what_is_long_is_handled_off_the_loop(
    path: str, body: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: list[int] = []

    def recorded(function: Callable[..., Any]) -> Callable[..., Any]:
        def record(*args: Any) -> Any:
            threads.append(threading.get_ident())
            return function(*args)

        return record

    monkeypatch.setattr(ChatMessage, "plain", recorded(ChatMessage.plain))
    monkeypatch.setattr(FakeTokenizer, "encode", recorded(FakeTokenizer.encode))
    for room in (prompts, openai_routes):
        monkeypatch.setattr(room, "check_ids", recorded(prompts.check_ids))
    loop: list[int] = []
    with running(FakeEngine(max_model_len=1 << 20)) as server:
        server.call(lambda: loop.append(threading.get_ident()))
        assert server.http.post(path, json={"max_tokens": 1, **body}).status_code == 200
        assert threads
        assert not set(threads) & set(loop)
        assert server.http.post("/tokenize", json={"prompt": "x"}).status_code == 200
        assert threads[-1] == loop[0], "a thread costs more than a few characters"


def test_tokenize_and_detokenize_have_limits() -> None:
    with running(FakeEngine(max_model_len=100)) as server:
        for path, field, some in (
            ("/tokenize", "prompt", "x"),
            ("/tokenize", "messages", SAID),
            ("/detokenize", "tokens", [97]),
        ):
            error = server.http.post(path, json={field: some * 101}).json()["error"]
            assert error["param"] == field
            assert error["code"] == "context_length_exceeded"
        assert server.post("/tokenize", prompt="x" * 100).json()["count"] == 101
        assert server.post("/detokenize", tokens=[97] * 100).json()["prompt"] == "a" * 100


def test_health_version_and_openapi(server: Running) -> None:
    assert server.http.get("/health").json() == {"status": "ready"}
    assert server.http.get("/health/live").status_code == 200
    assert "version" in server.http.get("/version").json()
    paths = server.http.get("/openapi.json").json()["paths"]
    schema = paths[TEXT]["post"]["requestBody"]["content"]["application/json"]["schema"]
    assert "prompt" in schema["properties"]
    assert "$ref" not in str(schema)


def test_api_key(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG), running(api_key="s3cret") as server:
        for path in ("/v1/models", "/metrics", "/version", "/openapi.json"):
            assert server.http.get(path).status_code == 401
        assert server.post(TEXT, prompt="x").json()["error"]["code"] == "invalid_api_key"
        for value in ("Bearer wrong", "Bearer s3cret2", "s3cret", "Basic s3cret", "Bearer \xff"):
            headers = {"Authorization": value.encode("latin-1")}
            assert server.http.get("/v1/models", headers=headers).status_code == 401
        assert server.http.get("/health").status_code == 200
        assert server.http.get("/health/live").status_code == 200
        with pytest.raises(openai.AuthenticationError):
            server.client.models.list()
        good = server.client.with_options(api_key="s3cret")
        assert good.models.list().data
    assert "s3cret" not in caplog.text
    assert "s3cret" not in repr(ServerOptions(api_key="s3cret"))


def test_cors() -> None:
    with running(cors_origins=("https://app.example",), api_key="key") as server:
        ask = {
            "Origin": "https://app.example",
            "Access-Control-Request-Method": "POST",
            "Access-Control-Request-Headers": "authorization,content-type",
        }
        answer = server.http.options(TEXT, headers=ask)
        assert answer.status_code == 200
        assert answer.headers["access-control-allow-origin"] == "https://app.example"
        refused = server.http.post(TEXT, headers={"Origin": "https://app.example"}, json={})
        assert refused.status_code == 401
        assert refused.headers["access-control-allow-origin"] == "https://app.example"
        other = server.http.options(TEXT, headers=ask | {"Origin": "https://evil.example"})
        assert "access-control-allow-origin" not in other.headers


def test_metrics() -> None:
    engine = FakeEngine(script=Script(first_delay=0.03, token_delay=0.01))
    engine.totals.prefix_queries, engine.totals.prefix_hits = 40, 30
    engine.totals.kv_pages_used, engine.totals.preemptions = 25, 2
    engine.totals.waiting = 3
    engine.totals.graph_passes, engine.totals.eager_passes = 70, 8
    engine.totals.finished, engine.totals.aborted = 4, 5
    engine.totals.failed, engine.totals.rejected = 6, 7
    engine.totals.host_seconds, engine.totals.kv_pages_cached = 1.5, 33
    with running(engine) as server:
        server.post(TEXT, prompt="abc", max_tokens=5)
        server.post(TEXT, prompt="abc", max_tokens=5, stop="b", stream=True)
        engine.script.fail_after = 1
        server.post(TEXT, prompt="abc", max_tokens=5)
        server.post(TEXT, prompt=5)
        server.http.get("/nowhere")
        value = server.metric
        assert value("request_success_total", finished_reason="length") == 1
        assert value("request_success_total", finished_reason="stop") == 1
        assert value("request_success_total", finished_reason="error") == 1
        assert value("time_to_first_token_seconds_count") == 3
        assert value("time_to_first_token_seconds_bucket", le="0.02") == 0
        assert value("time_to_first_token_seconds_bucket", le="+Inf") == 3
        assert value("inter_token_latency_seconds_count") == 5
        assert 0.05 <= value("inter_token_latency_seconds_sum") < 1
        assert value("request_time_per_output_token_seconds_count") == 2
        assert value("e2e_request_latency_seconds_count", model_name="fake") == 2
        assert value("request_queue_time_seconds_sum") >= 0.06
        assert value("num_requests_running") == 0
        assert value("num_requests_waiting") == 3
        assert value("kv_cache_usage_perc") == 0.25
        assert value("prefix_cache_queries_total") == 40
        assert value("prefix_cache_hits_total") == 30
        assert value("num_preemptions_total") == 2
        assert value("engine_graph_passes_total") == 70
        assert value("engine_eager_passes_total") == 8
        assert value("engine_finished_total") == 4
        assert value("engine_aborted_total") == 5
        assert value("engine_failed_total") == 6
        assert value("engine_rejected_total") == 7
        assert value("engine_host_seconds_total") == 1.5
        assert value("kv_pages_cached") == 33
        assert value("prompt_tokens_total") == 12
        assert value("generation_tokens_total") == 8
        assert value("engine_ready") == 1
        assert value("http_requests_total", path=TEXT, status="200") == 2
        assert value("http_requests_total", path=TEXT, status="400") == 1
        assert value("http_requests_total", path="other", status="404") == 1
        openmetrics = {"Accept": "application/openmetrics-text; version=1.0.0"}
        assert server.http.get("/metrics", headers=openmetrics).text.endswith("# EOF\n")


def test_meter_counts_tokens_of_a_delta() -> None:
    metrics = Metrics()
    meter = StreamMeter(metrics, 0.0)
    for tokens, finish in (([1, 6], None), ([2, 3, 4], None), ([5], FinishReason.STOP)):
        completion = Completion(index=0, text="", token_ids=tokens, finish_reason=finish)
        output = Output(
            request_id="r",
            prompt_token_ids=[],
            completions=[completion],
            finished=finish is not None,
            timing=Timing(1.0, 3.0, 4.0, 5.0),
        )
        meter.update(output)
    assert sum(metrics.between_tokens.counts) == 5
    assert metrics.between_tokens.counts[0] >= 1, "the two that came at once"
    assert sum(metrics.per_token.counts) == 1
    assert metrics.queue.sum == 2.0


def test_streams_of_one_request_are_read_no_faster_than_its_client_reads() -> None:
    engine = FakeEngine()
    state = ServerState(engine, ServerOptions())
    job = Job(state, [Prompt([65, 66]), Prompt([67])], 1)

    async def read() -> None:
        await job.submit(engine, SamplingParams(max_tokens=50), "r", 0, "")
        tokens, most = 0, 0
        async for _, output in job.outputs(0.0):
            tokens += len(output.completions[0].token_ids)
            for _ in range(20):
                await asyncio.sleep(0)
            most = max(most, engine.totals.generation_tokens - tokens)
        assert tokens == 100
        assert most <= 3, "deltas wait in a queue, not in their streams where they are joined"
        await job.close()

    asyncio.run(read())


def test_histogram_bounds_are_inclusive() -> None:
    histogram = Histogram("x", "help", (1, 2))
    for value in (0.5, 1, 1.5, 2, 3):
        histogram.observe(value)
    assert histogram.counts == [2, 2, 1]


@pytest.mark.parametrize(
    "options",
    [
        {"port": 70000},
        {"port": -1},
        {"max_body": "lots"},
        {"max_body": "0"},
        {"drain_timeout": "soon"},
        {"api_key": ""},
    ],
)
def test_options_that_cannot_be(options: dict) -> None:
    with pytest.raises(ConfigError, match=next(iter(options)).split("_")[0] + "|cannot read"):
        ServerOptions(**options)


def test_busy_port_and_unknown_host() -> None:
    with bind("127.0.0.1", 0) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"127.0.0.1:{port}: another program"):
            bind("127.0.0.1", port)
    with pytest.raises(ConfigError, match="cannot listen on"):
        bind("no such host", 0)
