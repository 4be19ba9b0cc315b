"""Do short decodes stream on while very long prompts are computed beside them?

Starts `--decodes` short requests that keep decoding, then queues `--prompts` prompts of
`--length` tokens, and records every gap between tokens of the decodes until the last prompt has
its first token. Prints percentiles of the gaps beside the objective, and peak memory beside the
budget.

    python benchmarks/interference.py MODEL_DIR --length 524288 --prompts 1 --step-time 100ms
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from flags import count

from baton import LLM, SamplingParams
from baton.core.request import Request


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--length", type=count, default=131072, help="tokens of a long prompt")
    parser.add_argument("--prompts", type=count, default=1, help="long prompts queued at once")
    parser.add_argument("--decodes", type=count, default=16, help="short requests beside them")
    parser.add_argument("--step-time", default="100ms", help="objective of the scheduler")
    parser.add_argument("--objective", type=float, default=0.15, help="p99 gap, in seconds")
    parser.add_argument("--budget", type=float, default=400.0, help="give up after seconds")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    llm = LLM(
        options.model,
        load_format="dummy",
        max_model_len=options.length + 8192,
        enable_prefix_caching=False,
        skip_tokenizer_init=True,
        step_time=options.step_time,
        max_num_seqs=64,
    )
    with llm:
        result = measure(llm, options)
    print(json.dumps(result, indent=1))
    if options.out:
        options.out.write_text(json.dumps(result, indent=1) + "\n")


def request(name: str, length: int, tokens: int, vocab: int, seed: int) -> Request:
    """A request of random ids that ignores the end of text."""
    rng = random.Random(seed)
    sampling = SamplingParams(temperature=1.0, max_tokens=tokens, ignore_eos=True, seed=seed)
    prompt = [rng.randrange(vocab) for _ in range(length)]
    return Request(request_id=name, prompt=prompt, sampling=sampling, arrival=time.monotonic())


def measure(llm: LLM, options: argparse.Namespace) -> dict[str, Any]:
    """Run the scenario on a started engine."""
    core, vocab = llm.core, llm.config.model.vocab_size
    # Made before anything is timed: drawing half a million ids takes longer than a step.
    prompts = [
        request(f"long{number}", options.length, 1, vocab, 1000 + number)
        for number in range(options.prompts)
    ]
    for number in range(options.decodes):
        core.add([request(f"d{number}", 256, 8000, vocab, number)])
    last: dict[str, float] = {}
    while len(last) < options.decodes:
        note(core.step(), last, [])
    alone: list[float] = []
    for _ in range(50):
        note(core.step(), last, alone)
    core.add(prompts)
    begin, first = time.perf_counter(), {}
    gaps: list[float] = []
    steps = core.stats().steps
    while len(first) < options.prompts and time.perf_counter() - begin < options.budget:
        outputs = core.step()
        note(outputs, last, gaps)
        for out in outputs:
            if out.request_id.startswith("long") and out.token_ids:
                first[out.request_id] = time.perf_counter() - begin
    return summary(llm, options, core.stats().steps - steps, alone, sorted(gaps), [*first.values()])


def summary(
    llm: LLM,
    options: argparse.Namespace,
    steps: int,
    alone: list[float],
    gaps: list[float],
    first: list[float],
) -> dict[str, Any]:
    """What is printed and kept. Seconds: gaps between tokens of a decode `alone` and beside the
    prompts (ascending), and until each prompt's first token."""
    cuda = llm.config.device == "cuda"
    return {
        "model": options.model,
        "fingerprint": llm.fingerprint.digest,
        "device": torch.cuda.get_device_name() if cuda else "cpu",
        "length": options.length,
        "prompts": options.prompts,
        "finished": len(first),
        "decodes": options.decodes,
        "gap_count": len(gaps),
        "step_time": options.step_time,
        "steps": steps,
        "seconds_to_first_tokens": [round(value, 3) for value in first],
        "gap_alone_ms": round(statistics.median(alone) * 1e3, 2) if alone else None,
        "gap_ms": {
            name: round(at(gaps, share) * 1e3, 2) if gaps else None
            for name, share in (("p50", 0.5), ("p90", 0.9), ("p99", 0.99), ("max", 1.0))
        },
        "objective_ms": options.objective * 1e3,
        # without a gap nothing was seen, neither that it is met nor that it is not
        "met": at(gaps, 0.99) <= options.objective if gaps else None,
        "peak_gib": round(torch.cuda.max_memory_allocated() / 2**30, 2) if cuda else None,
        "budget_gib": round(
            torch.cuda.mem_get_info()[1] * llm.config.gpu_memory_utilization / 2**30, 2
        )
        if cuda
        else None,
    }


def at(gaps: list[float], share: float) -> float:
    """The gap, of at least one in ascending order, that a share of them are below."""
    return gaps[min(len(gaps) - 1, int(share * len(gaps)))]


def note(outputs: list[Any], last: dict[str, float], gaps: list[float]) -> None:
    """Record the time since each decode's previous token."""
    now = time.perf_counter()
    for out in outputs:
        if out.request_id.startswith("d") and out.token_ids:
            if out.request_id in last:
                gaps.append(now - last[out.request_id])
            last[out.request_id] = now


if __name__ == "__main__":
    main()
