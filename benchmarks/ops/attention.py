"""Attention on the card: error and speed of every path beside its limit and beside peers.

    python benchmarks/ops/attention.py --out attention.json
    python benchmarks/ops/attention.py --only decode_gqa,decode_mla --sweep

Decode is timed by replaying a CUDA graph that walks over as many layers' pages as it takes to
leave the L2 cache behind; prefill by events around a call. Medians. "limit" is bytes at 4.25 TB/s
or FLOPs at 660 TFLOP/s, whichever is longer; "error" is relative to float32 on the same inputs.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable

import torch
from attention_common import (
    BANDWIDTH,
    BF16,
    CUDA,
    FLOPS,
    HY3,
    HY3_TP8,
    MOONLIGHT,
    PAGE,
    K,
    difference,
    event_ms,
    failed,
    graph_ms,
    layers,
    report,
    results,
    rows_of,
)
from attention_decode import MIXES, decode_gqa, decode_mla

from baton.attention.backend import ATTENTION, AttentionBackend
from baton.attention.spec import AttentionNeed, GQASpec, MLASpec
from baton.core.forward import ForwardBatch
from baton.core.kv import KVView

# -- prefill -------------------------------------------------------------------------------

PREFILL = {
    "1K": (0, K),
    "4K": (0, 4 * K),
    "16K": (0, 16 * K),
    "64K": (0, 64 * K),
    "128K": (0, 128 * K),
    "16K after 128K": (128 * K, 16 * K),
}


def prefill(spec: GQASpec | MLASpec, title: str) -> None:
    need = AttentionNeed(spec, BF16, CUDA, "prefill")
    backends: dict[str, AttentionBackend] = {}
    for name in ("fa4", "fa3", "sdpa"):
        kind = ATTENTION.get(name)
        reasons = kind.why_not(need)
        if reasons:
            print(f"{title:12} {name}: {'; '.join(reasons)}", flush=True)
            continue
        try:
            backends[name] = kind(need)
            begin = time.perf_counter()
            backends[name].warm_up()
            torch.cuda.synchronize()
            print(f"{title:12} {name}: warm-up {time.perf_counter() - begin:.1f} s", flush=True)
        except Exception as error:
            failed(title, "warm-up", name, error)
            del backends[name]
    for shape, (context, new) in PREFILL.items():
        prefill_shape(spec, title, shape, context, new, backends)
        torch.cuda.empty_cache()


def prefill_shape(
    spec: GQASpec | MLASpec,
    title: str,
    shape: str,
    context: int,
    new: int,
    backends: dict[str, AttentionBackend],
) -> None:
    total = context + new
    count = -(-total // PAGE)
    pages = (torch.randperm(count, device=CUDA) + 1)[None]
    positions = torch.arange(context, total, device=CUDA)
    slots = pages[0, positions // PAGE] * PAGE + positions % PAGE
    batch = ForwardBatch([new], [context], positions, slots, pages)
    (view,) = layers(spec, count + 1, 1)
    if isinstance(spec, MLASpec):
        dim, value = spec.nope_dim + spec.rope_dim, spec.value_dim
        latent = torch.randn(new, spec.latent_dim + spec.rope_dim, device=CUDA, dtype=BF16)
        up = torch.randn(
            spec.num_heads, spec.nope_dim + value, spec.latent_dim, device=CUDA, dtype=BF16
        ) / spec.latent_dim**0.5  # fmt: skip
        args: tuple[torch.Tensor, ...] = (latent, up)
        view.store(slots, latent[:, None], None)
    else:
        dim = value = spec.head_dim
        args = tuple(
            torch.randn(new, spec.num_kv_heads, dim, device=CUDA, dtype=BF16) for _ in range(2)
        )
        view.store(slots, *args)
    q = torch.randn(new, spec.num_heads, dim, device=CUDA, dtype=BF16)
    pairs = new * context + new * (new + 1) / 2
    limit = 2 * spec.num_heads * pairs * (dim + value) / FLOPS * 1e3
    picked = torch.tensor([0, 1, new // 3, new - 2, new - 1], device=CUDA)
    want = reference_prefill(spec, view, batch, q, picked, args)
    for name, backend in backends.items():
        call = backend.prefill_mla if isinstance(spec, MLASpec) else backend.prefill_gqa
        try:
            plan = backend.plan_prefill(batch, [0], PAGE)
            error = difference(call(plan, view, q, *args)[picked], want)
            few = 3 if limit > 50 else 10
            ms = event_ms(lambda c=call, p=plan: c(p, view, q, *args), few)
            report(title, shape, name, ms, limit, error=error, TFLOPs=limit * 660 / ms)
        except Exception as problem:
            failed(title, shape, name, problem)


def reference_prefill(
    spec: GQASpec | MLASpec,
    view: KVView,
    batch: ForwardBatch,
    q: torch.Tensor,
    picked: torch.Tensor,
    args: tuple[torch.Tensor, ...],
) -> torch.Tensor:
    """Float32 attention of the `picked` rows, a few heads at a time."""
    context, new = batch.context_lens[0], batch.query_lens[0]
    whole = ForwardBatch([1], [context + new - 1], batch.positions, batch.slots, batch.pages)
    keys, values = rows_of(view, whole, 0), rows_of(view, whole, 0, 1)
    hidden = torch.arange(context + new, device=CUDA) > (context + picked)[:, None]
    outs = []
    for h in range(spec.num_heads):
        if isinstance(spec, MLASpec):
            up, n = args[1][h].float(), spec.nope_dim
            both = values[:, 0] @ up.t()
            k, v = torch.cat((both[:, :n], keys[:, 0, spec.latent_dim :]), -1), both[:, n:]
        else:
            group = h // (spec.num_heads // spec.num_kv_heads)
            k, v = keys[:, group], values[:, group]
        s = (q[picked, h].float() @ k.t()) * spec.scale
        outs.append(s.masked_fill(hidden, -torch.inf).softmax(-1) @ v)
    return torch.stack(outs, 1)


# -- copies --------------------------------------------------------------------------------


def copies() -> None:
    """Store and gather beside the card's copy speed."""
    from baton.ops.attention import merge_into
    from baton.ops.kv_pages import gather_tokens

    for title, spec in (("hy3", HY3), ("moonlight", MOONLIGHT)):
        shape = spec.kv_shape
        count = 128 * K // PAGE
        (view,) = layers(spec, count + 1, 1)
        pages = (torch.randperm(count, device=CUDA) + 1)[None]
        for tokens in (64, 16 * K):
            slots = pages[0].repeat_interleave(PAGE)[:tokens] * PAGE
            slots = slots + torch.arange(tokens, device=CUDA) % PAGE
            key = torch.randn(tokens, shape.heads, shape.key_dim, device=CUDA, dtype=BF16)
            value = None if shape.shared_value else torch.randn_like(key)
            size = 2 * tokens * shape.width * 2
            ms = graph_ms([lambda k=key, v=value, s=slots: view.store(s, k, v)] * 8)
            report("store", f"{title} {tokens}", "triton", ms, size / BANDWIDTH * 1e3)
        tokens = 128 * K
        out = torch.empty(tokens, shape.heads, shape.key_dim, device=CUDA, dtype=BF16)
        cu = torch.tensor([0, tokens], dtype=torch.int32, device=CUDA)
        ms = graph_ms([lambda o=out, c=cu: gather_tokens(view.paged()[0], pages, [128 * K], c, o)])
        report("gather", f"{title} 128K", "triton", ms, 2 * out.nbytes / BANDWIDTH * 1e3)
    acc = torch.randn(16 * K, 64, 128, device=CUDA)
    lse = torch.randn(16 * K, 64, device=CUDA)
    out = acc.to(BF16)
    ms = graph_ms([lambda: merge_into(acc, lse, out, lse.clone())])
    report("merge", "16K x 64 x 128", "triton", ms, acc.numel() * 10 / BANDWIDTH * 1e3)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", help="write results as JSON")
    parser.add_argument("--only", default="copies,decode_gqa,decode_mla,prefill")
    parser.add_argument(
        "--mixes", default=",".join(MIXES), help="of lengths in decode (default: %(default)s)"
    )
    parser.add_argument("--sweep", action="store_true", help="also try other launch shapes")
    options = parser.parse_args()
    chosen = options.mixes.split(",")
    if unknown := set(chosen) - set(MIXES):
        parser.error(f"--mixes {','.join(sorted(unknown))}: not one of {', '.join(MIXES)}")
    mixes = {name: lengths for name, lengths in MIXES.items() if name in chosen}
    torch.manual_seed(0)
    parts: dict[str, list[Callable[[], None]]] = {
        "copies": [copies],
        "decode_gqa": [
            lambda: decode_gqa(HY3, "hy3", mixes, options.sweep),
            lambda: decode_gqa(HY3_TP8, "hy3 tp8", mixes, options.sweep),
        ],
        "decode_mla": [lambda: decode_mla(MOONLIGHT, "moonlight", mixes, options.sweep)],
        "prefill": [
            lambda: prefill(HY3, "hy3"),
            lambda: prefill(MOONLIGHT, "moonlight"),
        ],
    }
    print(torch.cuda.get_device_name(), "torch", torch.__version__, flush=True)
    with torch.inference_mode():
        for part in options.only.split(","):
            for run in parts[part]:
                begin = time.perf_counter()
                try:
                    run()
                except Exception as error:
                    failed(part, "-", "-", error)
                print(f"# {part}: {time.perf_counter() - begin:.0f} s", flush=True)
                torch.cuda.empty_cache()
                if options.out:
                    head = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__}
                    with open(options.out, "w") as file:
                        json.dump(head | {"results": results}, file, indent=1)


if __name__ == "__main__":
    main()
