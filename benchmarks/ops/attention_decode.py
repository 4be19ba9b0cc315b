"""Decode attention: our task map, FlashInfer, and FA3 where it can be imported."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from attention_common import (
    BANDWIDTH,
    BF16,
    CUDA,
    FLOPS,
    PAGE,
    K,
    difference,
    failed,
    graph_ms,
    layers,
    report,
    rows_of,
    sets_for,
)

from baton.attention.backend import ATTENTION
from baton.attention.spec import AttentionNeed, GQASpec, MLASpec
from baton.core.forward import ForwardBatch
from baton.ops.triton import decode_gqa as gqa
from baton.ops.triton import decode_mla as mla
from baton.ops.triton import decode_mla_hopper, split
from baton.ops.triton.split import Launch, TaskMap, Workspace, task_map

#: context lengths of the sequences that decode together, by name
Mixes = dict[str, list[int]]
MIXES: Mixes = {
    "1x1K": [K],
    "16x1K": [K] * 16,
    "64x1K": [K] * 64,
    "16x1.04K": [K + 40] * 16,
    "64x1.04K": [K + 40] * 64,
    "256x1K": [K] * 256,
    "1x64K": [64 * K],
    "8x64K": [64 * K] * 8,
    "2x32K+30x4K": [32 * K] * 2 + [4 * K] * 30,
    "1x64K+15x4K": [64 * K] + [4 * K] * 15,
    "1x128K+31x4K": [128 * K] + [4 * K] * 31,
}


def decode_batch(lengths: list[int]) -> tuple[ForwardBatch, int]:
    """A step of decode rows over shuffled pages, and how many pages there are."""
    counts = [-(-n // PAGE) for n in lengths]
    order = torch.randperm(sum(counts), device=CUDA) + 1
    pages = torch.zeros(len(lengths), max(counts), dtype=torch.int64, device=CUDA)
    start = 0
    for i, count in enumerate(counts):
        pages[i, :count] = order[start : start + count]
        start += count
    positions = torch.tensor([n - 1 for n in lengths], device=CUDA)
    slots = pages.gather(1, positions[:, None] // PAGE)[:, 0] * PAGE + positions % PAGE
    contexts = [n - 1 for n in lengths]
    return ForwardBatch([1] * len(lengths), contexts, positions, slots, pages), sum(counts) + 1


def reference_decode(
    spec: GQASpec | MLASpec, view: Any, batch: ForwardBatch, q: torch.Tensor
) -> torch.Tensor:
    outs = []
    for i in range(len(batch.query_lens)):
        k, v = rows_of(view, batch, i), rows_of(view, batch, i, 1)
        heads = q[i].float().unflatten(0, (k.shape[1], -1))
        s = torch.einsum("hgd,nhd->hgn", heads, k) * spec.scale
        outs.append(torch.einsum("hgn,nhd->hgd", s.softmax(-1), v).flatten(0, 1))
    return torch.stack(outs)


def decode_gqa(spec: GQASpec, title: str, mixes: Mixes, sweep: bool) -> None:
    """Every mix, and the time to plan the last one."""
    backend: Any = ATTENTION.get("triton")(AttentionNeed(spec, BF16, CUDA))
    for shape, lengths in mixes.items():
        batch, num_pages = decode_batch(lengths)
        gqa_mix(spec, title, shape, lengths, batch, num_pages, backend, sweep)
        torch.cuda.empty_cache()
    ms = graph_ms([lambda: backend.plan_decode(batch, range(len(lengths)), PAGE)] * 16)
    report(title, shape, "plan, per step", ms, 0.0)


def gqa_mix(
    spec: GQASpec,
    title: str,
    shape: str,
    lengths: list[int],
    batch: ForwardBatch,
    num_pages: int,
    backend: Any,
    sweep: bool,
) -> None:
    size, count = sum(lengths) * spec.kv_shape.width * 2, len(lengths)
    views = layers(spec, num_pages, sets_for(size))
    q = torch.randn(count, spec.num_heads, spec.head_dim, device=CUDA, dtype=BF16)
    limit = size / BANDWIDTH * 1e3
    want = reference_decode(spec, views[0], batch, q)
    plan = backend.plan_decode(batch, range(count), PAGE)
    error = difference(backend.decode_gqa(plan, views[0], q), want)
    ms = graph_ms([lambda v=v: backend.decode_gqa(plan, v, q) for v in views])
    report(title, shape, "task map", ms, limit, error=error, TBps=size / ms / 1e9)

    def run(view: Any, shares: TaskMap, space: Workspace) -> torch.Tensor:
        cache = view.paged()
        return gqa.decode_gqa(q, *cache, batch.pages, shares, space, spec.scale, backend._launch)[0]

    def mapped(programs: int, **options: int) -> tuple[TaskMap, Workspace]:
        space = Workspace.make(2 * programs, backend._launch.rows, spec.head_dim, CUDA)
        size = backend._launch.tile, spec.num_kv_heads
        return task_map(batch.positions, *size, programs, **options), space

    if sweep:
        cores = torch.cuda.get_device_properties(CUDA).multi_processor_count
        tries: list[tuple[str, int, dict[str, int]]]
        tries = [(f"{n} per SM", cores * n, {}) for n in (1, 2, 3, 4)]
        for name, value in (("least", 2), ("least", 4), ("slack", 2), ("slack", 8)):
            tries.append((f"{name} {value}", backend.programs, {name: value}))
        for name, programs, options in tries:
            how = mapped(programs, **options)
            ms = graph_ms([lambda v=v: run(v, *how) for v in views])
            report(title, shape, f"  {name}", ms, limit)
    peer_flashinfer(spec, title, shape, batch, views, q, limit)
    del views
    peer_fa3_gqa(spec, title, shape, lengths, q, limit)


def peer_flashinfer(
    spec: GQASpec,
    title: str,
    shape: str,
    batch: ForwardBatch,
    views: list[Any],
    q: torch.Tensor,
    limit: float,
) -> None:
    """FlashInfer's paged decode on the same pages (it compiles its kernel at the first call)."""
    try:
        import flashinfer
    except ImportError:
        return
    try:
        lengths = torch.tensor([n + 1 for n in batch.context_lens], dtype=torch.int32)
        counts = (lengths + PAGE - 1) // PAGE
        indices = [batch.pages[i, :n] for i, n in enumerate(counts.tolist())]
        starts = torch.cat((torch.zeros(1), counts.cumsum(0))).int()
        space = torch.empty(512 << 20, dtype=torch.uint8, device=CUDA)
        decode = flashinfer.BatchDecodeWithPagedKVCacheWrapper(space, "HND", use_tensor_cores=True)
        decode.plan(
            starts.to(CUDA), torch.cat(indices).int(), ((lengths - 1) % PAGE + 1).to(CUDA),
            spec.num_heads, spec.num_kv_heads, spec.head_dim, PAGE,
            q_data_type=BF16, kv_data_type=BF16, sm_scale=spec.scale,
        )  # fmt: skip
        pairs = [tuple(part.transpose(1, 2) for part in view.paged()) for view in views]
        ms = graph_ms([lambda p=p: decode.run(q, p) for p in pairs])
        report(title, shape, "FlashInfer", ms, limit)
    except Exception as error:
        failed(title, shape, "FlashInfer", error)


def peer_fa3_gqa(
    spec: GQASpec, title: str, shape: str, lengths: list[int], q: torch.Tensor, limit: float
) -> None:
    """FA3 over contiguous caches: it is spared the pages."""
    try:
        import fa3_fwd_interface as fa3
    except ImportError:
        return
    size = 2 * len(lengths) * max(lengths) * spec.kv_shape.width
    sets = sets_for(size)
    dims = len(lengths), max(lengths), spec.num_kv_heads, spec.head_dim
    caches = [
        tuple(torch.randn(dims, device=CUDA, dtype=BF16) for _ in range(2)) for _ in range(sets)
    ]
    lens = torch.tensor(lengths, dtype=torch.int32, device=CUDA)
    try:
        ms = graph_ms(
            [
                lambda c=c: fa3.flash_attn_with_kvcache(
                    q[:, None], *c, cache_seqlens=lens, softmax_scale=spec.scale, causal=True
                )
                for c in caches
            ]
        )
        report(title, shape, "FA3 contiguous", ms, limit)
    except Exception as error:
        failed(title, shape, "FA3 contiguous", error)


def decode_mla(spec: MLASpec, title: str, mixes: Mixes, sweep: bool) -> None:
    """Every mix."""
    backend: Any = ATTENTION.get("triton")(AttentionNeed(spec, BF16, CUDA))
    up = torch.randn(
        spec.num_heads, spec.nope_dim + spec.value_dim, spec.latent_dim, device=CUDA, dtype=BF16
    ) / spec.latent_dim**0.5  # fmt: skip
    for shape, lengths in mixes.items():
        mla_mix(spec, title, shape, lengths, backend, up, sweep)
        torch.cuda.empty_cache()


def mla_mix(
    spec: MLASpec,
    title: str,
    shape: str,
    lengths: list[int],
    backend: Any,
    up: torch.Tensor,
    sweep: bool,
) -> None:
    batch, num_pages = decode_batch(lengths)
    width, count = spec.latent_dim + spec.rope_dim, len(lengths)
    size = sum(lengths) * width * 2
    views = layers(spec, num_pages, sets_for(size))
    q = torch.randn(count, spec.num_heads, width, device=CUDA, dtype=BF16)
    limit = max(
        size / BANDWIDTH,
        2 * sum(lengths) * spec.num_heads * (width + spec.latent_dim) / FLOPS,
    ) * 1e3  # fmt: skip
    want = reference_decode(spec, views[0], batch, q)[..., : spec.latent_dim]
    kept, supports = split.COMBINERS, decode_mla_hopper.supports
    for name, launch, combiners in mla_tries(spec, backend, sweep):
        split.COMBINERS = combiners  # read at each launch, like the next
        decode_mla_hopper.supports = (lambda *_: False) if name == IN_TRITON else supports
        run = mla_call(spec, batch, q, launch)
        try:
            error = difference(run(views[0]), want)
            ms = graph_ms([lambda v=v: run(v) for v in views])
            report(title, shape, name, ms, limit, error=error, TBps=size / ms / 1e9)
        except Exception as problem:
            failed(title, shape, name, problem)
    split.COMBINERS, decode_mla_hopper.supports = kept, supports
    plan = backend.plan_decode(batch, range(count), PAGE)
    whole = q[..., : spec.nope_dim + spec.rope_dim].contiguous()
    ms = graph_ms([lambda v=v: backend.decode_mla(plan, v, whole, up) for v in views])
    report(title, shape, "with absorbing", ms, limit)
    del views
    peer_fa3_mla(spec, title, shape, lengths, q, limit)


IN_TRITON = "  in Triton"


def mla_tries(spec: MLASpec, backend: Any, sweep: bool) -> list[tuple[str, Launch, int]]:
    """Names, launches and numbers of combiners: what serves, and with `sweep` others."""
    kept = split.COMBINERS
    tries: list[tuple[str, Launch, int]] = [("task map", backend._launch, kept)]
    if sweep and spec.num_heads <= 16:
        tries += [
            (IN_TRITON, backend._launch, kept),
            ("  no slack", replace(backend._launch, slack=-1), kept),
            ("  32x4w, 5 tiles", Launch(16, 32, 4, 6, 1, slack=4), kept),
            ("  32x4w, 2 per SM", Launch(16, 32, 4, 3, 2, slack=4), kept),
            *((f"  {n} combiners", backend._launch, n) for n in (64, 128, 256, 1024)),
        ]
    return tries


def mla_call(
    spec: MLASpec, batch: ForwardBatch, q: torch.Tensor, launch: Launch
) -> Callable[[Any], torch.Tensor]:
    """The kernel on a layer's view, planned for `launch`."""
    cores = torch.cuda.get_device_properties(CUDA).multi_processor_count
    programs = cores * launch.residents
    space = Workspace.make(2 * programs, launch.rows, spec.latent_dim, CUDA)
    shares = task_map(
        batch.positions, launch.tile, -(-spec.num_heads // launch.rows), programs, None,
        launch.least, launch.slack,
    )  # fmt: skip
    moved, turned = q[..., : spec.latent_dim], q[..., spec.latent_dim :]
    return lambda view: mla.decode_mla(
        moved, turned, view.paged()[0], batch.pages, shares, space, spec.scale, launch
    )[0]


def peer_fa3_mla(
    spec: MLASpec, title: str, shape: str, lengths: list[int], q: torch.Tensor, limit: float
) -> None:
    """FA3's latent form: rope as keys, latents as values, over contiguous caches."""
    try:
        import fa3_fwd_interface as fa3
    except ImportError:
        return
    width, latent = spec.latent_dim + spec.rope_dim, spec.latent_dim
    sets = sets_for(2 * len(lengths) * max(lengths) * width)
    dims = len(lengths), max(lengths), 1, width
    caches = [torch.randn(dims, device=CUDA, dtype=BF16) for _ in range(sets)]
    lens = torch.tensor(lengths, dtype=torch.int32, device=CUDA)
    turn, moved = q[:, None, :, latent:].contiguous(), q[:, None, :, :latent].contiguous()
    try:
        ms = graph_ms(
            [
                lambda c=c: fa3.flash_attn_with_kvcache(
                    turn, c[..., latent:], c[..., :latent], qv=moved, cache_seqlens=lens,
                    softmax_scale=spec.scale, causal=True,
                )
                for c in caches
            ]
        )  # fmt: skip
        report(title, shape, "FA3 contiguous", ms, limit)
    except Exception as error:
        failed(title, shape, "FA3 contiguous", error)
