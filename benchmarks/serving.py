"""What does HTTP cost beside the offline engine?

First an engine in a process of its own answers the requests offline, then `baton serve` does with
the same options, one stream each; both in one run on one machine. Prints the time to first token of
one prompt both ways, and the rate of output tokens with all streams at once.

    python benchmarks/serving.py MODEL_DIR --load-format dummy --prompt 4096 --streams 256
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from served import served

from baton.bench.load.run import run_load
from baton.bench.load.target import Target
from baton.bench.metrics import measured, ttft
from baton.bench.record import Load
from baton.bench.workload.shapes import fixed

REPEATS = 9
VOCAB = (256, 32000)


def main() -> None:
    """Measure both and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--load-format", default="auto")
    parser.add_argument("--prompt", type=int, default=4096, help="tokens of the timed prompt")
    parser.add_argument("--streams", type=int, default=256, help="requests at once")
    parser.add_argument("--isl", type=int, default=256, help="prompt tokens of each of them")
    parser.add_argument("--osl", type=int, default=256, help="output tokens of each of them")
    parser.add_argument("--rounds", type=int, default=2, help="requests for each stream")
    parser.add_argument("--offline", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    if options.offline:
        print(json.dumps(offline(options)))
        return
    again = [sys.executable, __file__, "--offline", *sys.argv[1:]]
    done = subprocess.run(again, stdout=subprocess.PIPE, text=True, check=True)
    alone = json.loads(done.stdout.splitlines()[-1])
    with served(command(options)) as (url, _):
        http = through_http(options, url)
    result = {
        "model": options.model,
        "prompt": options.prompt,
        "streams": options.streams,
        "shape": [options.isl, options.osl],
        "offline": alone,
        "http": http,
        "ttft_added_ms": round(http["ttft_ms"] - alone["ttft_ms"], 2),
        "throughput_share": round(http["tokens_per_s"] / alone["tokens_per_s"], 4),
    }
    print(json.dumps(result, indent=1))
    if options.out:
        options.out.write_text(json.dumps(result, indent=1) + "\n")


def flags(options: argparse.Namespace) -> dict[str, Any]:
    """Engine options of both."""
    return {
        "load_format": options.load_format,
        "max_model_len": max(options.prompt, options.isl + options.osl) + 64,
        "max_num_seqs": options.streams,
    }


def offline(options: argparse.Namespace) -> dict[str, float]:
    """Time to first token in milliseconds, and output tokens per second."""
    from baton import LLM, SamplingParams

    rng = random.Random(0)

    def prompts(count: int, length: int) -> list[list[int]]:
        return [[rng.randrange(*VOCAB) for _ in range(length)] for _ in range(count)]

    with LLM(
        options.model, skip_tokenizer_init=True, enable_prefix_caching=False, **flags(options)
    ) as llm:
        first = []
        for number in range(REPEATS + 2):
            prompt = prompts(1, options.prompt)
            begin = time.perf_counter()
            llm.generate(prompt, SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True))
            if number >= 2:
                first.append(time.perf_counter() - begin)
        asked = SamplingParams(max_tokens=options.osl, temperature=0.0, ignore_eos=True)
        count = options.streams * options.rounds
        llm.generate(prompts(options.streams, options.isl), asked)
        batch = prompts(count, options.isl)
        begin = time.perf_counter()
        llm.generate(batch, asked)
        seconds = time.perf_counter() - begin
    return {
        "ttft_ms": round(statistics.median(first) * 1e3, 2),
        "tokens_per_s": round(count * options.osl / seconds, 1),
    }


def command(options: argparse.Namespace) -> list[str]:
    """`baton serve` with those options."""
    given = [
        word
        for name, value in flags(options).items()
        for word in (f"--{name.replace('_', '-')}", str(value))
    ]
    serve = [sys.executable, "-m", "baton.cli", "serve", options.model]
    return [*serve, "--no-enable-prefix-caching", *given]


def through_http(options: argparse.Namespace, url: str) -> dict[str, float]:
    """The same two figures at a client."""
    one = Load(kind="closed", concurrency=1)
    target = Target(url, vocab=VOCAB)
    first = run_load(fixed(options.prompt, 1, REPEATS, warm=2), one, target, workers=1)
    target = Target(url, vocab=VOCAB, seed=1)
    shape = fixed(options.isl, options.osl, options.streams * options.rounds, options.streams)
    many = Load(kind="closed", concurrency=options.streams)
    run = run_load(shape, many, target, workers=4)
    failed = [record.error for record in first.records + run.records if record.status != "ok"]
    if failed:
        raise SystemExit(f"{len(failed)} requests failed, the first one: {failed[0]}")
    times = [value for record in measured(first) if (value := ttft(record)) is not None]
    made = sum(record.output_tokens or 0 for record in measured(run))
    return {
        "ttft_ms": round(statistics.median(times) * 1e3, 2),
        "tokens_per_s": round(made / run.seconds, 1),
    }


if __name__ == "__main__":
    main()
