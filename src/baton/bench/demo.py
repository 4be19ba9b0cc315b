"""`make demo`: start a server, talk to it, load it with a small trace, print what clients saw.

Everything goes through the doors that users have: the command line, HTTP, the openai client.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import IO

import httpx
from rich.console import Console

from baton.bench.paper import paper_lru
from baton.bench.replay import Result, Target, replay
from baton.bench.replay_report import summarize, table
from baton.bench.run import run
from baton.bench.sse import ServerError
from baton.bench.synth import Conversations, synthesize
from baton.bench.trace import Job, PromptMaker, make_jobs, span
from baton.core.errors import BatonError

QUESTIONS = (
    "In one sentence, what is a large language model?",
    "Name three uses of a paged key-value cache.",
    "Write a short poem about passing a baton.",
)
#: a page of KV on the CPU; the paper's figure counts in pages as the engine does
PAGE = 16


@dataclass(frozen=True)
class Speed:
    """What one request alone sees: prompt tokens per second, seconds per output token."""

    prefill: float
    per_token: float


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the demo; the exit code is 0 when every request was answered."""
    parser = argparse.ArgumentParser(prog="demo", description="Baton from start to numbers.")
    parser.add_argument("--model", default="smollm2-135m", help="what to serve")
    parser.add_argument("--seconds", type=float, default=30.0, help="length of the replay")
    options = parser.parse_args(arguments)
    console = Console(width=100, highlight=False)
    began = time.monotonic()
    try:
        with serving([sys.executable, "-m", "baton.cli"], options.model, console) as url:
            chat(url, options.model, console)
            results = load(url, options.model, options.seconds, console)
    except BatonError as error:
        console.print(f"demo: {error}", style="red", markup=False)
        return 1
    failed = sum(result.error is not None for result in results)
    console.print(f"Done in {time.monotonic() - began:.0f} s; the server has stopped.")
    console.print("Next: `make serve`, and what README.md says about talking to it.")
    return 1 if failed else 0


@contextlib.contextmanager
def serving(baton: Sequence[str], model: str, console: Console) -> Iterator[str]:
    """A server of our own on a free port; yields its URL when it is ready and stops it after.

    Raises:
        ServerError: the server failed, or what the caller did with it; with the end of its log.
    """
    _step(console, f"Fetch {model} (once) and start `baton serve {model}`")
    if subprocess.run([*baton, "models", "pull", model]).returncode:
        raise ServerError(f"{model} could not be fetched")
    port = _free_port()
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as log:
        server = subprocess.Popen(
            [*baton, "serve", model, "--port", str(port)], stdout=log, stderr=subprocess.STDOUT
        )
        try:
            url = f"http://127.0.0.1:{port}"
            seconds = _await_ready(url, server)
            console.print(f"ready on {url} after {seconds:.1f} s (process {server.pid})")
            yield url
        except ServerError as error:
            raise ServerError(f"{error}\nThe server's last lines:\n{_tail(log)}") from None
        finally:
            _stop(server)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _await_ready(url: str, server: subprocess.Popen[bytes], limit: float = 300.0) -> float:
    begin = time.monotonic()
    while time.monotonic() - begin < limit:
        if server.poll() is not None:
            raise ServerError(f"the server ended with {server.returncode}")
        with contextlib.suppress(httpx.HTTPError):
            if httpx.get(f"{url}/health", timeout=5.0).is_success:
                return time.monotonic() - begin
        time.sleep(0.2)
    raise ServerError(f"the server was not ready within {limit:.0f} s")


def _tail(log: IO[str], lines: int = 15) -> str:
    log.seek(0)
    return "\n".join(log.read().splitlines()[-lines:])


def _stop(server: subprocess.Popen[bytes]) -> None:
    """Ask the process to end, by its own id; insist when it does not."""
    server.terminate()
    try:
        server.wait(timeout=45.0)
    except subprocess.TimeoutExpired:
        server.kill()
        server.wait()


def chat(url: str, model: str, console: Console) -> None:
    """Ask QUESTIONS with the openai client and print the answers as they come.

    Raises:
        ServerError: the server refused, or broke an answer off.
    """
    import openai

    _step(console, "Ask through the official openai client")
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
    try:
        for question in QUESTIONS:
            console.print(f"> {question}", style="cyan", markup=False)
            stream = client.chat.completions.create(
                model=model,
                messages=[{"role": "user", "content": question}],
                max_tokens=48,
                temperature=0.0,
                stream=True,
            )
            for event in stream:
                if event.choices:
                    print(event.choices[0].delta.content or "", end="", flush=True)
            print()
    except openai.OpenAIError as error:
        raise ServerError(f"the openai client says: {error}") from None


def load(url: str, model: str, seconds: float, console: Console) -> list[Result]:
    """Replay a synthetic conversation trace as heavy as this machine can take; print a table."""
    target = Target(url)
    speed = asyncio.run(measure(target, model))
    _step(console, "Replay a synthetic conversation trace (shared prefixes, open loop)")
    console.print(
        f"alone: {speed.prefill:,.0f} prompt tokens/s, {speed.per_token * 1000:.1f} ms per token"
    )
    jobs = plan(speed, seconds)
    results = run(jobs, target, model, console)
    summary = summarize(results)
    console.print(table(summary, f"{len(jobs)} requests over {jobs[-1].at:.0f} s"))
    paper = paper_lru([job.prompt for job in jobs], PAGE, None)
    console.print(f"On paper an endless prefix cache would hit {paper.ratio:.1%}.")
    return results


async def measure(target: Target, model: str) -> Speed:
    """Speed of one request alone, from a long prompt and from a long answer.

    Raises:
        ServerError: one of them failed.
    """
    maker = PromptMaker(Fraction(1), seed=1)
    prompt = maker.prompt(synthesize(1, seed=1)[0])[:256]
    first, second = Job(0.0, prompt, 1), Job(0.0, prompt[::-1][:16], 24)
    long = (await replay([first], target, model))[0]
    answer = (await replay([second], target, model))[0]
    for result in (long, answer):
        if result.error is not None:
            raise ServerError(result.error)
    return Speed(len(prompt) / long.ttft, answer.tpot or (answer.end - answer.due) / 24)


def plan(speed: Speed, seconds: float) -> list[Job]:
    """Requests that keep the machine busy for about `seconds`, at about 70% of what it can do."""
    scale, output_scale = Fraction(1, 64), Fraction(1, 32)
    shape = Conversations()
    # three in five prompt tokens are new to the cache
    prompt = 0.6 * 12_000 * float(scale) / speed.prefill
    output = shape.output_mean * float(output_scale) * speed.per_token
    count = max(12, min(300, int(0.7 * seconds / (prompt + output))))
    shape = Conversations(rate=count / seconds, turns=3.0, pause_median=seconds / 12)
    requests = synthesize(count, seed=7, shape=shape)
    jobs = make_jobs(
        requests,
        PromptMaker(scale),
        time_scale=seconds / span(requests),
        output_scale=output_scale,
        max_tokens=2048,
    )
    return list(jobs)


def _step(console: Console, text: str) -> None:
    console.print(f"\n== {text}", style="bold", markup=False)


if __name__ == "__main__":
    sys.exit(main())
