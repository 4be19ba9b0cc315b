"""The stub does what its profile says."""

from __future__ import annotations

import json
import statistics
from pathlib import Path

import httpx
import openai
import pytest

from baton.bench.load.run import run_load
from baton.bench.load.target import Target
from baton.bench.metrics import ttft
from baton.bench.record import Load
from baton.bench.stub.__main__ import main
from baton.bench.stub.process import stub_server
from baton.bench.stub.profile import Curve, Profile
from baton.bench.stub.state import State
from baton.bench.workload.job import Job, Workload


def test_curves_by_tokens_and_load() -> None:
    curve = Curve(base=1.0, per_token=0.01, per_request=0.1, knee=4, over_knee=2.0)
    assert curve.at(0, 1) == 1.0
    assert curve.at(100, 1) == 2.0
    assert curve.at(0, 4) == pytest.approx(1.3)
    assert curve.at(0, 6) == pytest.approx(1.5 + 4.0)


def test_noise_keeps_the_mean_and_its_seed() -> None:
    first, again = State(Profile(noise=0.3)), State(Profile(noise=0.3))
    values = [first._noisy(2.0) for _ in range(20_000)]
    assert statistics.mean(values) == pytest.approx(2.0, rel=0.02)
    assert statistics.stdev(values) == pytest.approx(0.61, rel=0.05)
    assert [again._noisy(2.0) for _ in range(9)] == values[:9]
    assert State(Profile())._noisy(2.0) == 2.0


def test_prefill_is_one_after_another() -> None:
    """Four prompts of 100 tokens at 1,000 a second: 0.1 s more for each."""
    jobs = [Job(((i, 100),), 1, at=0.0) for i in range(4)]
    with stub_server(Profile(prefill_rate=1000.0, ttft=Curve())) as url:
        run = run_load(Workload(jobs, {}), Load(), Target(url))
    waits = sorted(ttft(record) or 0.0 for record in run.records)
    assert all(wait >= 0.099 * n for n, wait in enumerate(waits, start=1))


def test_load_slows_tokens() -> None:
    profile = Profile(ttft=Curve(base=0.05), itl=Curve(base=0.01, per_request=0.02))
    jobs = [Job(((i, 8),), 6) for i in range(4)]
    with stub_server(profile) as url:
        run_load(Workload(jobs, {}), Load(kind="closed", concurrency=4), Target(url))
        stats = httpx.get(f"{url}/stats").json()
    assert stats["most_running"] == 4
    # five gaps with four at once, but for the ends
    assert all(last - first >= 0.2 for _, first, last, *_ in stats["answers"])


def test_cache_keeps_the_most_recent_blocks() -> None:
    with stub_server(Profile(block=4, cache_blocks=4)) as url, httpx.Client(base_url=url) as client:

        def cached(*ids: int) -> int:
            body = {"prompt": list(ids), "max_tokens": 1}
            usage = client.post("/v1/completions", json=body).json()["usage"]
            return int(usage["prompt_tokens_details"]["cached_tokens"])

        a, b = (1, 2, 3, 4, 5, 6, 7, 8, 9), tuple(range(20, 33))
        assert cached(*a) == 0
        assert cached(*a) == 8
        assert cached(*a[:8]) == 4  # one token is always computed
        assert cached(*b) == 0
        assert cached(*a) == 4  # three blocks came, one of the two went: the last
        client.post("/reset_prefix_cache")
        assert cached(*a) == 0


def test_the_official_client_reads_it() -> None:
    with stub_server(Profile(model="m")) as url:
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
        assert [card.id for card in client.models.list()] == ["m"]
        made = client.completions.create(model="m", prompt="a long enough prompt", max_tokens=3)
        assert (made.choices[0].text, made.usage and made.usage.prompt_tokens) == (" t t t", 5)
        messages = [{"role": "user", "content": "x"}]
        chat = client.chat.completions.create(model="m", messages=messages, max_tokens=2)  # type: ignore[call-overload]
        assert chat.choices[0].message.content == " t t"
        stream = client.chat.completions.create(  # type: ignore[call-overload]
            model="m", messages=messages, max_tokens=3, stream=True
        )
        assert "".join(c.choices[0].delta.content or "" for c in stream) == " t t t"


def test_bad_requests_are_refused() -> None:
    with stub_server() as url:
        for body in (b"{", b'{"prompt": "x", "max_tokens": "many"}'):
            answer = httpx.post(f"{url}/v1/completions", content=body)
            assert answer.status_code == 400
        assert httpx.get(f"{url}/nowhere").status_code == 404
        assert httpx.get(f"{url}/health").json() == {"status": "ready"}


def test_profiles_that_are_none(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "profile.json"
    file.write_text(json.dumps({"ttft": {"base": "soon"}}))
    for profile in (
        "{",
        '{"tftt": {}}',
        '{"faults": {"explode": 1}}',
        str(file),
        str(tmp_path / "absent"),
    ):
        assert main(["--profile", profile]) == 2
        assert "stub: --profile: " in capsys.readouterr().err
