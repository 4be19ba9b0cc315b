"""Compiles every attention kernel for Hopper at production shapes, without a GPU: registers and
spills within bounds, matrix and asynchronous copy instructions where they are meant to be."""

from __future__ import annotations

import os
from typing import Any

import pytest

pytest.importorskip("triton")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("kernels are interpreted in this process", allow_module_level=True)

from baton.ops.triton import decode_mla_hopper, merge, mla_keys, pages, split
from baton.ops.triton.decode_gqa import _decode_gqa_kernel, gqa_launch
from baton.ops.triton.decode_mla import _decode_mla_kernel, mla_launch
from helpers.sm90 import Compiled, compile_sm90, gluon_descriptor

SHARED = 232448 // 1024 * 1024  # bytes a program may have; a multiprocessor has 1 KB more
#: not specialised on, so that a kernel is compiled once for all batches
SMALL = (
    "batch",
    "blocks",
    "picked",
    "least",
    "slack",
    "programs",
    "table_row",
    "positions",
    "rows",
)


def types(names: str, **pointers: str) -> dict[str, str]:
    """Arguments: the given pointers, and `names` as 32-bit integers."""
    return pointers | dict.fromkeys(names.split(), "i32")


COMMON = {
    "pages": "*i64", "lengths": "*i32", "bounds": "*i32", "out": "*bf16", "lse": "*fp32",
    "part": "*fp32", "part_lse": "*fp32", "batch": "i32", "scale_log2": "fp32",
}  # fmt: skip


def gqa(group: int, heads: int, dim: int, page: int) -> tuple[Compiled, int]:
    config = gqa_launch(group, dim)
    strides = "q_row q_head k_page k_head k_token v_page v_head v_token table_row"
    args = types(strides, q="*bf16", k_pages="*bf16", v_pages="*bf16", **COMMON)
    padded = 1 << (dim - 1).bit_length()
    constants = {
        "HK": heads, "G": group, "G_PAD": config.rows, "D": dim, "D_PAD": padded,
        "TILE": config.tile, "PAGE": page, "B_PAD": 64, "STAGES": config.stages,
        "PRECISION": "tf32",
    }  # fmt: skip
    return compile_sm90(_decode_gqa_kernel, args, constants, SMALL), config.residents


@pytest.mark.parametrize(
    "group, heads, dim, page",
    [(8, 8, 128, 64), (12, 1, 128, 16), (4, 8, 96, 64), (8, 4, 256, 64), (3, 3, 64, 64),
     (64, 1, 128, 64)],
)  # fmt: skip
def test_decode_gqa(group: int, heads: int, dim: int, page: int) -> None:
    found, residents = gqa(group, heads, dim, page)
    report(f"gqa {group}x{heads} d{dim} page {page}", found)
    assert found.local == 0
    assert found.shared * residents <= SHARED
    if page == 64:  # smaller pages need a page id per token: fewer programs fit, no more
        assert found.registers * 128 * residents <= 65536
    assert found.count("LDGSTS.E.BYPASS.128") >= 12  # loaded ahead, 16 bytes a thread
    assert found.count("HGMMA" if group >= 64 else "HMMA") > 0


@pytest.mark.parametrize(
    "heads, config",
    [(heads, mla_launch(heads)) for heads in (16, 32, 64, 128)],
    ids=str,
)
def test_decode_mla(heads: int, config: split.Launch) -> None:
    strides = "q_row q_head rope_row rope_head k_page k_token table_row"
    args = types(strides, q="*bf16", q_rope="*bf16", k_pages="*bf16", **COMMON)
    constants = {
        "H": heads, "R": config.rows, "L": 512, "L_PAD": 512, "ROPE": 64, "ROPE_PAD": 64,
        "TILE": config.tile, "PAGE": 64, "B_PAD": 64, "STAGES": config.stages,
        "PRECISION": "tf32",
    }  # fmt: skip
    found = compile_sm90(_decode_mla_kernel, args, constants, SMALL, num_warps=config.warps)
    report(f"mla {heads}", found)
    # 64 rows: what a program knows of its share, put aside while it goes over tiles
    assert found.local <= (48 if config.rows == 64 else 8)  # 0 with Triton 3.6
    assert found.shared * config.residents <= SHARED
    assert found.registers * 32 * config.warps * config.residents <= 65536
    assert found.count("LDGSTS.E.BYPASS.128") >= 18
    assert found.count("HGMMA" if config.rows == 64 else "HMMA") > 0


@pytest.mark.parametrize("heads, page", [(16, 64), (12, 64), (16, 128)])
def test_decode_mla_hopper(heads: int, page: int) -> None:
    args = types("q_row q_head rope_row rope_head table_row", q="*bf16", q_rope="*bf16", **COMMON)
    tile = decode_mla_hopper.TILE
    args["latents"] = gluon_descriptor(tile, decode_mla_hopper.LATENT)
    args["ropes"] = gluon_descriptor(tile, 64)
    constants = {"H": heads, "ROPE": 64, "PAGE": page, "B_PAD": 64}
    kernel = decode_mla_hopper._decode_mla_kernel
    found = compile_sm90(kernel, args, constants, SMALL, num_warps=decode_mla_hopper.WARPS)
    report(f"mla hopper {heads} page {page}", found)
    assert found.local <= 16  # outside the loop, and only where not all rows are heads
    assert found.shared <= SHARED
    assert found.count("UTMALDG") > 0
    # Queries are read once: the Triton kernel has 74 such reads a tile, this one 38.
    assert found.count("LDSM") < 120


@pytest.mark.parametrize("batch", [1, 16, 64])
@pytest.mark.parametrize("dim, heads, block_heads", [(128, 64, 8), (512, 16, 16)])
def test_map_and_combine(dim: int, heads: int, block_heads: int, batch: int) -> None:
    args = types("batch", **{k: COMMON[k] for k in ("lengths", "bounds", "out", "lse")})
    args |= {"part": "*fp32", "part_lse": "*fp32"}
    columns, together, pieces, stages = split.combine_shape(batch * heads, dim, block_heads)
    constants = {
        "heads": heads, "BLOCK_HEADS": block_heads, "R": 16, "D": dim, "HEADS": together,
        "COLUMNS": columns, "PIECES": pieces, "STAGES": stages, "TILE": 64, "MOST": 256,
    }  # fmt: skip
    found = compile_sm90(split._combine_kernel, args, constants, SMALL)
    assert found.count("LDGSTS.E.BYPASS.128") >= 8  # on their way at once
    report(f"combine {dim}", found)
    assert found.local == 0
    args = types(
        "batch blocks picked programs least slack",
        positions="*i64",
        rows="*i64",
        lengths="*i32",
        bounds="*i32",
    )
    found = compile_sm90(split._map_kernel, args, {"TILE": 64, "B_PAD": 1024}, SMALL)
    report("map", found)
    assert found.local == 0


@pytest.mark.parametrize("heads, dim, block", [(8, 128, 8), (8, 128, 1), (1, 576, 8)])
def test_store(heads: int, dim: int, block: int) -> None:
    args = types(
        "rows k_row k_head kp_page kp_token kp_head v_row v_head vp_page vp_token vp_head",
        slots="*i64", key_pages="*bf16", key="*bf16", value_pages="*bf16", value="*bf16",
    )  # fmt: skip
    padded = 1 << (dim - 1).bit_length()
    constants: dict[str, Any] = {
        "H": heads, "DK": dim, "DK_PAD": padded, "DV": dim, "DV_PAD": padded, "PAGE": 64,
        "BLOCK": block, "HAS_VALUE": dim == 128,
    }  # fmt: skip
    warps = 1 if block == 1 else 4
    found = compile_sm90(pages._store_kernel, args, constants, ("rows", "slots"), num_warps=warps)
    report(f"store {heads}x{dim} block {block}", found)
    assert found.local == 0
    if dim == 128 and block > 1:
        assert found.count("STG.E.128") > 0


@pytest.mark.parametrize("heads, dim", [(8, 128), (1, 576)])
def test_gather(heads: int, dim: int) -> None:
    args = types("table_row s_page s_token s_head",
                 source="*bf16", pages="*i64", bounds="*i32", out="*bf16")  # fmt: skip
    width = min(dim & -dim, 128)
    constants = {"H": heads, "D": dim, "D_BLOCK": width, "PAGE": 64, "BLOCK": 4096 // width}
    found = compile_sm90(pages._gather_kernel, args, constants, ("table_row", "pages"))
    report(f"gather {heads}x{dim}", found)
    assert found.local == 0
    assert found.count("LDG.E.128") > 0
    assert found.count("STG.E.128") > 0


def test_merge() -> None:
    args = types("rows o_row o_head l_row l_head",
                 acc="*fp32", acc_lse="*fp32", out="*bf16", lse="*fp32")  # fmt: skip
    found = compile_sm90(
        merge._merge_kernel,
        args,
        {"H": 64, "D": 128, "D_PAD": 128, "BLOCK": 16},
        ("rows", "l_row", "l_head"),
    )
    report("merge", found)
    assert found.local == 0
    assert found.count("STG.E.128") > 0


def test_join_keys() -> None:
    args = types("rows own_token own_head shared_token", own="*bf16", shared="*bf16", out="*bf16")
    constants = {"H": 16, "N": 128, "N_PAD": 128, "R": 64, "R_PAD": 64, "BLOCK": 32}
    found = compile_sm90(mla_keys._join_kernel, args, constants, ("rows",))
    report("join keys", found)
    assert found.local == 0
    assert found.count("STG.E.128") > 0


def report(name: str, found: Compiled) -> None:
    """Shown with `pytest -s`."""
    print(f"{name}: {found.registers} registers, {found.local} local, {found.shared} shared")
