"""Kernels compiled for sm_90 at production shapes, without a GPU: no spills, the right units."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("triton")

from baton.ops.triton import (
    activation,
    align,
    angles,
    combine,
    heads,
    moe,
    moe_hopper,
    norm,
    qkv,
    router,
    sample,
    step,
)
from baton.ops.triton.moe_tiles import Tiles, tiles_for
from helpers.sm90 import Compiled, compile_sm90, gluon_descriptor

SHARED = 227 * 1024  # bytes of shared memory that one program can have
B, F, L = "*bf16", "*fp32", "*i64"


def ints(names: str, kind: str = "i32") -> dict[str, str]:
    return dict.fromkeys(names.split(), kind)


def gemm(width: int, inner: int, tiles: Tiles, gated: bool, direct: bool) -> Compiled:
    index = L if direct else "*i32"
    block = f"tensordesc<bf16[{tiles.n if gated else tiles.m},{tiles.k}]>"
    return compile_sm90(
        moe._grouped_gemm,
        {
            "x": B, "a": block, "w": f"tensordesc<bf16[{tiles.n},{tiles.k}]>", "out": B,
            "rows": index, "experts": index, "ends": index,
            **ints("pairs blocks count top_k routed x_stride"),
        },
        {
            "N": width, "K": inner, "BM": tiles.m, "BN": tiles.n, "BK": tiles.k,
            "GROUP": tiles.group, "GATED": gated, "SWAP": tiles.swap, "DIRECT": direct,
            "HALF": tiles.half,
        },
        unaligned=("pairs", "blocks", "count", "top_k", "routed"),
        num_warps=tiles.warps, num_stages=tiles.stages,
    )  # fmt: skip


#: (routed experts, top k, shared experts, hidden, intermediate)
SHAPES = {
    "hy3": (192, 8, 1, 4096, 1536),
    "moonlight": (64, 6, 2, 2048, 1408),
    "qwen3": (128, 8, 0, 2048, 768),
}
TOKENS = [1, 64, 256, 1024, 16384]


@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize(
    "tokens, shape",
    [(t, "hy3") for t in TOKENS]
    + [pytest.param(t, s, marks=pytest.mark.slow) for t in TOKENS for s in ("moonlight", "qwen3")],
)
def test_grouped_gemm(tokens: int, shape: str, gated: bool) -> None:
    experts, top_k, _, hidden, inner = SHAPES[shape]
    pairs = tokens * top_k
    tiles = tiles_for(pairs, experts, gated, 2)
    size = (inner, hidden) if gated else (hidden, inner)
    made = gemm(*size, tiles, gated, pairs <= moe.DIRECT_PAIRS)
    assert made.local == 0
    assert made.count("HGMMA") >= (8 if tiles.half else 4)  # both heights
    assert made.count("UTMALDG") >= 1
    assert made.count("ACQBULK") == 1  # waits for the kernel ahead
    # Decode hides a program's start behind another's stream: two must fit an SM.
    programs = 2 if pairs <= 20 * experts else 1
    assert made.shared <= SHARED // programs
    assert made.registers * 32 * tiles.warps <= 65536 // programs


@pytest.mark.parametrize("gated", [True, False])
def test_grouped_gemm_of_roles(gated: bool) -> None:
    block = gluon_descriptor(moe_hopper.ROWS, moe_hopper.INNER)
    made = compile_sm90(
        moe_hopper._grouped_gemm_hopper,
        {
            "x": B, "a": block, "w": gluon_descriptor(moe_hopper.COLUMNS, moe_hopper.INNER),
            "out": B, **dict.fromkeys(("rows", "experts", "ends", "taken"), "*i32"),
            **ints("pairs count top_k x_stride"),
        },
        {"N": 1536 if gated else 4096, "K": 4096 if gated else 1536, "GATED": gated},
        unaligned=("pairs", "count", "top_k", "x_stride"),
    )  # fmt: skip
    assert made.count("HGMMA.64x128x16") == moe_hopper.PARTS * 2 * moe_hopper.INNER // 16
    assert made.count("USETMAXREG") > 0  # registers go from those that fetch to the others
    assert made.count("ACQBULK") == 1  # waits for the kernel ahead
    assert made.registers == 128
    assert made.shared <= SHARED
    # The warpgroup that fetches keeps a tile's beginnings in local memory, for all its steps.
    assert made.local <= (64 if gated else 0)
    products = made.sass.split("HGMMA")[1:8]
    assert not any("LDL" in between or "STL" in between for between in products)


KERNELS: dict[str, tuple[Any, dict[str, str], dict[str, Any], dict[str, Any]]] = {
    f"align {chunk}": (
        align._align,
        {
            "ids": L,
            **dict.fromkeys(("rows", "place", "experts", "ends", "taken"), "*i32"),
            **ints("pairs block_m"),
        },
        {"LANES": 256, "CHUNK": chunk},
        {"num_warps": warps, "unaligned": ("pairs", "block_m")},
    )
    for chunk, warps in ((512, 4), (2048, 8))
}
KERNELS["align count"] = (
    align._count,
    {"ids": L, "counts": "*i32", **ints("pairs chunk_size")},
    {"LANES": 256, "STEP": align.STEP},
    {"unaligned": ("pairs", "chunk_size")},
)
KERNELS["align place"] = (
    align._place,
    {
        "ids": L,
        **dict.fromkeys(("counts", "rows", "place", "experts", "ends", "taken"), "*i32"),
        **ints("pairs chunks chunk_size count block_m"),
    },
    {"LANES": 256, "STEP": align.STEP, "READ": align.READ},
    {"num_warps": 8, "unaligned": ("pairs", "chunks", "chunk_size", "count", "block_m")},
)
KERNELS["combine"] = (
    combine._combine,
    {"y": B, "weights": F, "place": "*i32", "shared": B, "out": B, "shared_stride": "i32"},
    {"WIDTH": 4096, "TOP_K": 8, "ROUTED": 8, "BLOCK": 1024, "DIRECT_M": 0, "SHARED": True},
    {"maxnreg": combine.REGISTERS},
)
KERNELS["combine direct"] = (
    *KERNELS["combine"][:2],
    {"WIDTH": 4096, "TOP_K": 9, "ROUTED": 8, "BLOCK": 1024, "DIRECT_M": 16, "SHARED": False},
    {"maxnreg": combine.REGISTERS},
)
KERNELS["norm"] = (
    norm._rms_norm,
    {
        **dict.fromkeys(("x", "residual", "weight", "out", "total"), B),
        **ints("rows x_stride residual_stride"),
        "eps": "fp32",
    },
    {"DIM": 4096, "BLOCK": 4096, "ROWS": 1, "ADD": True},
    {"num_warps": 8, "unaligned": ("rows",)},
)
EMBED_TYPES = {
    "ids": L, **dict.fromkeys(("table", "weight", "out", "rows"), B), **ints("count stride"),
    "eps": "fp32",
}  # fmt: skip
KERNELS["embed+norm"] = (
    norm._embed_rms_norm,
    EMBED_TYPES,
    {"DIM": 4096, "BLOCK": 4096, "ROWS": 1},
    {"num_warps": 8, "unaligned": ("ids", "count")},
)
for half in (32, 64):
    KERNELS[f"angles {half}"] = (
        angles._angles,
        {
            "positions": L, **dict.fromkeys(("frequencies", "cosines", "sines"), F),
            "total": "i32", "scaling": "fp32",
        },
        {"HALF": half, "BLOCK": 256},
        {"unaligned": ("positions", "total")},
    )  # fmt: skip
KERNELS["inputs"] = (
    step._decode_inputs,
    ints("slots last_token computed pages ids positions kv_slots tables", L),
    {"PAGE": 64, "P": 8192, "CHUNK": 1024},
    {"unaligned": ("slots",)},
)
KERNELS["prompt inputs"] = (
    step._prompt_inputs,
    {**ints("head computed pages kv_slots tables last", L), "size": "i32", "scrap": "i32"},
    {"PAGE": 64, "P": 8192, "BLOCK": 256},
    {"unaligned": ("size", "scrap")},
)
KERNELS["finish"] = (
    step._advance,
    {
        **ints("slots live tokens last_token computed generated chosen", L),
        "bad": "*i1", "rows": "i32",
    },
    {"BLOCK": 128},
    {"unaligned": ("slots", "live", "tokens", "bad", "rows")},
)  # fmt: skip
for tokens, inner, width in ((16, 128, 512), (64, 128, 512), (16, 512, 128), (64, 512, 128)):
    KERNELS[f"head products {tokens} {inner}"] = (
        heads._head_products,
        {
            **dict.fromkeys(("x", "w", "out"), B),
            **ints("tokens x_token x_head w_head w_row w_column"),
        },
        {
            "w_column" if inner == 128 else "w_row": 1,
            "H": 16, "K": inner, "N": width, "BK": inner, "BN": 8192 // inner, "BT": tokens,
        },
        {"unaligned": ("tokens",)},
    )  # fmt: skip
KERNELS["silu_mul"] = (
    activation._silu_mul,
    {"x": B, "out": B, "stride": "i32"},
    {"WIDTH": 1536, "BLOCK": 1024},
    {},
)
KERNELS["gqa"] = (
    qkv._gqa,
    {
        **dict.fromkeys(("qkv", "q_out", "k_out", "key", "value", "q_weight", "k_weight"), B),
        "slots": L, "cos": F, "sin": F, "eps": "fp32",
        **ints("qkv_stride key_page key_offset key_head value_page value_offset value_head"),
    },
    {
        "Q": 64, "KV": 8, "DIM": 128, "SIDE": 64, "BLOCK": 64, "REST": 1, "WIDE": 128,
        "HEADS": 16, "PAGE": 64, "INTERLEAVED": False, "NORM": True,
    },
    {},
)  # fmt: skip
for many in (1, 4):
    KERNELS[f"mla {many}"] = (
        qkv._mla,
        {
            **dict.fromkeys(("q", "kv", "key", "weight"), B),
            "slots": L, "cos": F, "sin": F, "eps": "fp32",
            **ints("tokens q_stride kv_stride key_page key_offset"),
        },
        {
            "HEADS": 16, "NOPE": 128, "SIDE": 32, "BLOCK": 32, "RANK": 512, "WIDE": 512,
            "TILE": 16, "TOKENS": many, "PAGE": 64, "INTERLEAVED": True,
        },
        {"unaligned": ("tokens",)},
    )  # fmt: skip
for tokens, inner, once in (
    (16, 128, False), (16, 128, True), (16, 256, True), (64, 64, False),
):  # fmt: skip
    KERNELS[f"gate {tokens} {inner}{' once' * once}"] = (
        router._gate,
        {"x": B, "w": F, "out": F, **ints("tokens share x_stride")},
        {"E": 192, "H": 4096, "BE": 64, "BT": tokens, "BK": inner, "ONCE": once},
        {"unaligned": ("tokens",)},
    )
for experts, groups, top_groups in ((192, 1, 1), (64, 1, 1), (256, 8, 4)):
    KERNELS[f"choose {experts}"] = (
        router._choose,
        {
            **dict.fromkeys(("logits", "bias", "weights"), F),
            "experts": L, **ints("parts part_stride stride"), "scale": "fp32",
        },
        {
            "PARTS": 16, "E": experts, "LANES": 256 if experts > 64 else 64, "TOP_K": 8,
            "SHARED": 1, "SIGMOID": True, "BIAS": True, "NORMALISE": True, "GROUPS": groups,
            "TOP_GROUPS": top_groups, "PAIR": True,
        },
        {"num_warps": 1, "unaligned": ("parts", "part_stride")},
    )  # fmt: skip
VOCAB = {"V": 120832, "BLOCKS": 59, "B": 2048}
TABLES = {"slots": L, "temperatures": "*fp64"}
KERNELS["sample: maxima"] = (
    sample._maxima,
    {"logits": F, "best": F, "where": "*i32", "stride": "i32"},
    VOCAB,
    {},
)
KERNELS["sample: noisy"] = (
    sample._noisy,
    {
        "logits": F, "best": F, "noisy": F, "where": "*i32", **TABLES, "seeds": L, "counts": L,
        **ints("stride temperature_stride seed_stride"),
    },
    {**VOCAB, "LANES": 64},
    {"unaligned": ("temperature_stride", "seed_stride")},
)  # fmt: skip
KERNELS["sample: pick"] = (
    sample._pick,
    {
        "best": F, "noisy": F, "best_at": "*i32", "noisy_at": "*i32", **TABLES,
        "temperature_stride": "i32", "tokens": L, "bad": "*i1",
    },
    {"BLOCKS": 59, "LANES": 64, "RANDOM": True},
    {"num_warps": 1},
)  # fmt: skip


def combine_norm(
    tokens: int, dim: int, top_k: int, tile: int, shared: bool, aligned: bool = True
) -> Compiled:
    _, block, warps = norm.program(tokens, dim)
    return compile_sm90(
        combine._combine_norm,
        {
            **dict.fromkeys(("y", "shared", "residual", "norm", "out", "total"), B),
            "weights": F, "place": "*i32", **ints("shared_stride residual_stride"), "eps": "fp32",
        },
        {
            "WIDTH": dim, "TOP_K": top_k, "ROUTED": top_k - 1, "BLOCK": block, "DIRECT_M": tile,
            "SHARED": shared,
        },
        () if aligned else ("shared_stride", "residual_stride"),
        num_warps=warps, maxnreg=combine.REGISTERS,
    )  # fmt: skip


@pytest.mark.parametrize("dim, top_k", [(2048, 8), (4096, 9), (7168, 9), (2880, 4), (16384, 9)])
@pytest.mark.parametrize("tokens", [64, 1024])
@pytest.mark.parametrize("tile, shared", [(0, True), (0, False), (16, False)])
def test_combine_norm(tokens: int, dim: int, top_k: int, tile: int, shared: bool) -> None:
    made = combine_norm(tokens, dim, top_k, tile, shared)
    assert made.local == 0
    # All rows, norm and residual are on their way before anything waits for one of them.
    _, block, warps = norm.program(tokens, dim)
    pieces = max(1, block // (warps * 256))
    assert made.count("LDG.E.128") == (top_k + 2 + shared) * pieces
    if pieces == 1:
        assert made.last("LDG.E.128") < made.first("FFMA")


#: One row to a program: where there are several, the norm behind experts is a kernel of its own.
ONE_ROW = [
    (tokens, dim)
    for tokens in (64, 1024)
    for dim in (64, 2048, 2056, 2880, 4096, 7168, 16384)
    if norm.program(tokens, dim)[0] == 1
]


@pytest.mark.parametrize("tokens, dim", ONE_ROW)
def test_norms_alone_and_behind_the_experts_add_in_the_same_order(tokens: int, dim: int) -> None:
    _, block, warps = norm.program(tokens, dim)
    strides = ("x_stride", "residual_stride") if dim % 16 else ()
    alone = compile_sm90(
        *KERNELS["norm"][:2], {"DIM": dim, "BLOCK": block, "ROWS": 1, "ADD": True},
        ("rows", *strides), num_warps=warps,
    )  # fmt: skip
    behind = combine_norm(tokens, dim, 8, 0, True, aligned=dim % 16 == 0)
    assert len(alone.reductions) == 1
    assert alone.reductions == behind.reductions


@pytest.mark.parametrize("tokens", [64, 1024])
@pytest.mark.parametrize("dim", [64, 512, 2048, 2056, 2880, 4096, 7168, 16384])
def test_norms_alone_and_of_embedded_tokens_add_in_the_same_order(tokens: int, dim: int) -> None:
    rows, block, warps = norm.program(tokens, dim)
    constants = {"DIM": dim, "BLOCK": block, "ROWS": rows}
    strides = ("x_stride", "residual_stride", "stride") if dim % 16 else ()
    alone = compile_sm90(
        *KERNELS["norm"][:2], {**constants, "ADD": False}, ("rows", *strides), num_warps=warps
    )
    embedded = compile_sm90(
        norm._embed_rms_norm, EMBED_TYPES, constants, ("ids", "count", *strides), num_warps=warps
    )
    assert embedded.local == 0
    assert len(alone.reductions) == 1
    assert alone.reductions == embedded.reductions


@pytest.mark.parametrize("name", KERNELS)
def test_small_kernels(name: str) -> None:
    kernel, types, constants, options = KERNELS[name]
    made = compile_sm90(kernel, types, constants, **options)
    # Digits of 2 / pi for large angles, twice: indexed, so never in registers.
    assert made.local <= (64 if name.startswith("angles") else 0)
    assert made.shared <= SHARED // 2
    if name.startswith("gate"):
        assert made.count("HGMMA") >= 4
        if name.endswith("once"):  # all weights are there, and split, before it waits
            ahead = made.sass[: made.sass.index("ACQBULK")]
            size = int(name.split()[2])
            assert ahead.count("LDG.E.128") == size // 8
            assert ahead.count("FADD") >= 0.8 * size  # two remainders of size / 2 weights a thread
    if name in ("embed+norm", "inputs", "finish") or name.startswith("angles"):
        assert made.count("ACQBULK") == 1  # waits for the kernel ahead
    wide = ("combine", "combine direct", "norm", "silu_mul", "gqa", "sample: maxima", "mla 4")
    wide += ("embed+norm", "inputs")
    if name in wide:
        assert made.count("LDG.E.128") >= 2  # 16 bytes a thread
