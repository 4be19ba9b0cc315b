"""CPU speed beside transformers' `generate`: same weights, dtype and threads, in one process.

Prints ratios only, since absolute times say more about the machine than about the code. The two
sides take turns, and the medians of the ratios are quoted.

    python benchmarks/cpu.py [--model smollm2-135m] [--rounds 5] [--out FILE]
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

import torch
import transformers

from baton import LLM, SamplingParams

PROMPTS = [
    "The capital of France is",
    "Write a haiku about the sea.",
    "def fibonacci(n):",
    "Explain photosynthesis to a child.",
    "Once upon a time, in a village by the river,",
    "What is 12 times 11?",
    "List three uses of a paperclip.",
    "The quick brown fox",
]
TOKENS = 64


def theirs(model: Any, ids: list[int]) -> float:
    """Seconds of TOKENS greedy tokens through transformers."""
    batch = torch.tensor([ids])
    begin = time.perf_counter()
    with torch.inference_mode():
        model.generate(
            batch,
            attention_mask=torch.ones_like(batch),
            do_sample=False,
            max_new_tokens=TOKENS,
            min_new_tokens=TOKENS,
            eos_token_id=None,
            pad_token_id=0,
        )
    return time.perf_counter() - begin


def ours(llm: LLM, prompts: list[list[int]]) -> float:
    """Seconds of TOKENS greedy tokens for each prompt, all at once, through Baton."""
    params = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True)
    begin = time.perf_counter()
    llm.generate(prompts, params)
    return time.perf_counter() - begin


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    with LLM(options.model, max_model_len=1024, enable_prefix_caching=False) as llm:
        torch.set_num_threads(llm.config.threads)
        assert llm.tokenizer is not None
        prompts = [llm.tokenizer.encode(text) for text in PROMPTS]
        path = Path(llm.config.model_path)
        reference = transformers.AutoModelForCausalLM.from_pretrained(
            str(path.parent), gguf_file=path.name, dtype=getattr(torch, llm.config.dtype)
        ).eval()
        ours(llm, prompts)
        theirs(reference, prompts[0])
        single, eight = [], []
        for number in range(options.rounds):
            alone, peer, batch = (
                ours(llm, prompts[:1]),
                theirs(reference, prompts[0]),
                ours(llm, prompts),
            )
            single.append(peer / alone)
            eight.append(len(prompts) * peer / batch)
            print(f"round {number + 1}: single {single[-1]:.2f}x, 8 streams {eight[-1]:.2f}x")
        result = {
            "model": options.model,
            "dtype": llm.config.dtype,
            "threads": llm.config.threads,
            "transformers": transformers.__version__,
            "fingerprint": llm.fingerprint.digest,
            "single_stream_ratio": statistics.median(single),
            "eight_streams_ratio": statistics.median(eight),
        }
    print(
        f"decode throughput over transformers {transformers.__version__}, {result['threads']} "
        f"threads, {result['dtype']}: one stream {result['single_stream_ratio']:.2f}x, "
        f"8 streams over its sequential {result['eight_streams_ratio']:.2f}x (medians)"
    )
    if options.out:
        options.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
