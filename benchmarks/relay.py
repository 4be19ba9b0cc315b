"""How many tokens per second does the API process pass on to its streams?

The engine is replaced by one that makes a token for every running request each `--period` seconds,
so that nothing but HTTP, detokenisation and the event loop is measured. Prints the rate at the
client beside the rate of that engine, and the API process's CPU time per token.

    python benchmarks/relay.py MODEL_DIR --streams 256 --period 0.0167,0.01
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import json
import math
import os
import random
import sys
import time
from pathlib import Path

import msgspec
from flags import count
from served import served

from baton.bench.load.run import run_load
from baton.bench.load.target import Target
from baton.bench.metrics import measured
from baton.bench.record import Load
from baton.bench.workload.shapes import fixed
from baton.config.fingerprint import Fingerprint
from baton.config.options import EngineOptions
from baton.core.request import FinishReason, TokenOutput
from baton.engine.messages import Abort, Accepted, Add, EngineInfo, FromEngine, Outputs, ToEngine

VOCAB = 300, 20000


class PacedEngine:
    """An `EngineChild` whose steps come on time; its messages are encoded and decoded as real."""

    pid = 0

    def __init__(self, period: float) -> None:
        self._period, self._start, self._steps = period, time.monotonic(), 0
        self._left: dict[str, int] = {}
        self._said: list[FromEngine] = []
        self._tokens = random.Random(0)
        self._encode = msgspec.msgpack.Encoder().encode
        self._decode = msgspec.msgpack.Decoder(FromEngine).decode

    async def ready(self) -> EngineInfo:
        fields = dataclasses.fields(Fingerprint)
        empty: dict[str, str | int] = {f.name: 0 if f.type == "int" else "0" * 16 for f in fields}
        return EngineInfo("paced", VOCAB[1], 4096, empty)

    def send(self, message: ToEngine) -> None:
        if isinstance(message, Add):
            for request in message.requests:
                self._left[request.request_id] = request.sampling.max_tokens or 16
            self._said.append(Accepted(message.requests[0].request_id))
        elif isinstance(message, Abort):
            for one in message.request_ids:
                self._left.pop(one, None)

    async def receive(self, most: int = 1) -> list[FromEngine]:
        await asyncio.sleep(0)
        while True:
            found, self._said = self._said[:most], self._said[most:]
            due = int((time.monotonic() - self._start) / self._period) - self._steps
            if not self._left:
                self._steps += due
            elif not found:
                found = [self._step() for _ in range(min(due, most))]
            if found:
                return found
            at = self._start + (self._steps + 1) * self._period
            await asyncio.sleep(max(0.0005, at - time.monotonic()))

    def _step(self) -> FromEngine:
        self._steps += 1
        outputs = []
        for one in list(self._left):
            self._left[one] -= 1
            reason = None if self._left[one] else FinishReason.LENGTH
            token = [self._tokens.randrange(*VOCAB)]
            outputs.append(TokenOutput(request_id=one, token_ids=token, finish_reason=reason))
            if reason is not None:
                del self._left[one]
        return self._decode(self._encode(Outputs(outputs)))

    def how_it_ended(self) -> str:
        return "it does not end"

    async def stop(self, patience: float = 10.0) -> None:
        pass


def main() -> None:
    """Measure each period and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", help="folder with a config.json and a tokenizer")
    parser.add_argument("--streams", type=count, default=256)
    parser.add_argument("--osl", type=count, default=256, help="tokens of each stream")
    parser.add_argument(
        "--period", type=_seconds, default="0.0167,0.01", help="seconds of a step, several"
    )
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--port", help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    if options.serve:
        serve(options)
        return
    if options.out and not os.access(options.out.parent, os.W_OK):
        parser.error(f"--out: cannot write to the folder {options.out.parent}")
    rows = []
    for period in options.period:
        rows.append(measure(options, period))
        print(json.dumps(rows[-1]), flush=True)
    if options.out:
        options.out.write_text(json.dumps(rows, indent=1) + "\n")


def _seconds(text: str) -> list[float]:
    """Several, above zero."""
    try:
        found = [float(part) for part in text.split(",")]
    except ValueError:
        found = []
    if not found or not all(0 < seconds < math.inf for seconds in found):
        raise argparse.ArgumentTypeError(f"{text!r} is no list of seconds such as 0.0167,0.01")
    return found


def measure(options: argparse.Namespace, period: float) -> dict[str, float]:
    """All streams at once, to their ends."""
    command = [sys.executable, __file__, options.model, "--serve", "--period", str(period)]
    with served(command) as (url, pid):
        shape = fixed(16, options.osl, options.streams, 1)
        load = Load(kind="closed", concurrency=options.streams)
        before = cpu_seconds(pid)
        run = run_load(shape, load, Target(url, vocab=VOCAB), workers=2)
        spent = cpu_seconds(pid) - before
    failed = [record.error for record in run.records if record.status != "ok"]
    if failed:
        raise SystemExit(f"{len(failed)} requests failed, the first one: {failed[0]}")
    tokens = sum(record.output_tokens or 0 for record in measured(run))
    passed = sum(record.output_tokens or 0 for record in run.records)  # the warm-up's, too
    made = options.streams / period
    return {
        "streams": options.streams,
        "engine_tokens_per_s": round(made),
        "client_tokens_per_s": round(tokens / run.seconds),
        "share": round(tokens / run.seconds / made, 3),
        "cpu_us_per_token": round(spent / passed * 1e6, 1),
    }


def serve(options: argparse.Namespace) -> None:
    """`baton serve` in front of a `PacedEngine`."""
    from baton.cli.app import main as baton
    from baton.engine import async_engine

    def paced(_: EngineOptions) -> PacedEngine:
        return PacedEngine(options.period[0])

    async_engine.EngineChild = paced  # type: ignore[assignment,misc]
    sys.argv = ["baton", "serve", options.model, "--port", options.port]
    baton()


def cpu_seconds(pid: int) -> float:
    """Processor time of a process so far (Linux)."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


if __name__ == "__main__":
    main()
