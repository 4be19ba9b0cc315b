"""`make demo`: start a server, talk to it, load it with a small trace, print what clients saw.
`make bench-demo`: the same server under small workloads of every kind, kept in a folder.

Everything goes through the doors that users have: the command line, HTTP, the openai client.
"""

from __future__ import annotations

import argparse
import contextlib
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import IO

import httpx
from rich.console import Console

from baton.bench.load.run import run_load
from baton.bench.load.target import Target
from baton.bench.metrics import by_group, metrics, output_tokens, tpot, ttft
from baton.bench.record import Load, Run
from baton.bench.sse import ServerError
from baton.bench.sweep import Keep, sweep
from baton.bench.table import problems, rows_table, run_table
from baton.bench.workload.job import Job, Workload
from baton.bench.workload.prefix import prefix
from baton.bench.workload.replay import Scales, replay
from baton.bench.workload.session import Sessions, session
from baton.bench.workload.shapes import Point, control, grid, mixed
from baton.bench.workload.synth import Traffic, synthesize
from baton.core.errors import BatonError

QUESTIONS = (
    "In one sentence, what is a large language model?",
    "Name three uses of a paged key-value cache.",
    "Write a short poem about passing a baton.",
)
#: a block of the trace becomes a page of KV on the CPU, so that all that is shared can be hit
SCALE = Fraction(1, 32)


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
    parser.add_argument("--bench", type=Path, help="instead, keep runs of small workloads here")
    options = parser.parse_args(arguments)
    console = Console(width=100, highlight=False)
    began = time.monotonic()
    try:
        with serving([sys.executable, "-m", "baton.cli"], options.model, console) as url:
            if options.bench is not None:
                runs = bench(url, options.model, options.bench, console)
            else:
                chat(url, options.model, console)
                runs = [load(url, options.model, options.seconds, console)]
    except BatonError as error:
        console.print(f"demo: {error}", style="red", markup=False)
        return 1
    failed = sum(record.status != "ok" for run in runs for record in run.records)
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


def load(url: str, model: str, seconds: float, console: Console) -> Run:
    """Replay a synthetic conversation trace as heavy as this machine can take; print a table."""
    target = Target(url, model)
    speed = measure(target)
    _step(console, "Replay a synthetic conversation trace (shared prefixes, open loop)")
    console.print(
        f"alone: {speed.prefill:,.0f} prompt tokens/s, {speed.per_token * 1000:.1f} ms per token"
    )
    workload = plan(speed, seconds)
    run = sweep([Point("replay", workload, Load())], target, console)[0]
    title = f"{len(workload.jobs)} requests over {workload.jobs[-1].at:.0f} s"
    console.print(run_table(run, metrics(run), title))
    return run


def bench(url: str, model: str, folder: Path, console: Console) -> list[Run]:
    """Small workloads of every kind, sized for a minute or two on two CPU cores.

    Raises:
        ConfigError: the folder holds runs already.
    """
    _step(console, f"Measure small workloads; everything is kept in {folder}")
    mixture = mixed({64: 3, 192: 1}, 16, 8)
    hits = prefix([128], (0.0, 0.5, 0.8), osl=4, requests=2, prefixes=1, page=16, concurrency=1)
    talk = Sessions(sessions=3, turns=3, system=32, first=64, message=16, osl=8, think=1.0)
    trace = replay(
        synthesize(6, seed=7), Scales(time=2.0, length=SCALE, output=SCALE, max_tokens=512), "made"
    )
    points = [
        *grid([64], [16], [1, 4], rounds=2),
        Point("mixed", mixture, Load(rate=0.7)),
        Point("control", control(mixture), Load(rate=0.7)),
        Point("prefix", hits, Load(kind="closed", concurrency=1)),
        Point("session", session(talk), Load(kind="closed", concurrency=3)),
        Point("replay", trace, Load()),
    ]
    runs = sweep(points, Target(url, model), console, keep=Keep(folder))
    rows = {run.name: metrics(run) for run in runs}
    console.print(rows_table(rows, f"{len(runs)} runs (latencies in ms)", "run"))
    groups = by_group(next(run for run in runs if run.name == "prefix"))
    console.print(rows_table(groups, "prefix groups (latencies in ms)", "prefix and hit"))
    for run in runs:
        for line in problems(run):
            console.print(f"{run.name}:", line)
    return runs


def measure(target: Target) -> Speed:
    """Speed of one request alone, from a long prompt and from a long answer.

    Raises:
        ServerError: one of them failed.
    """
    ids = 2**40  # of no trace
    jobs = [Job(((ids, 256),), 1), Job(((ids + 1, 16),), 24)]
    run = run_load(Workload(jobs, {"name": "alone"}), Load(kind="closed", concurrency=1), target)
    for record in run.records:
        if record.status != "ok":
            raise ServerError(record.error or record.status)
    long, answer = run.records
    each = tpot(answer) or (answer.end - answer.sent) / max(output_tokens(answer), 1)
    return Speed(256 / (ttft(long) or long.end - long.sent), each)


def plan(speed: Speed, seconds: float) -> Workload:
    """Requests that keep the machine busy for about `seconds`, at about 70% of what it can do."""
    shape = Traffic()
    # three in five prompt tokens are new to the cache
    prompt = 0.6 * 12_000 * float(SCALE) / speed.prefill
    output = shape.output_mean * float(SCALE) * speed.per_token
    count = max(12, min(300, int(0.7 * seconds / (prompt + output))))
    shape = Traffic(rate=count / seconds, turns=3.0, pause_median=seconds / 12)
    jobs = synthesize(count, seed=7, traffic=shape)
    span = (jobs[-1].at or 0.0) - (jobs[0].at or 0.0)
    scales = Scales(seconds / span, SCALE, SCALE, max_tokens=2048)
    return replay(jobs, scales, "synthetic")


def _step(console: Console, text: str) -> None:
    console.print(f"\n== {text}", style="bold", markup=False)


if __name__ == "__main__":
    sys.exit(main())
