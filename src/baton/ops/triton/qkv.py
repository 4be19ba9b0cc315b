"""From a projection's output to rotated queries and stored keys and values, in one pass.

GQA reads the qkv GEMM's output once and writes queries, keys (for prefill) and both pages; the
chain in PyTorch moves the same values five to seven times. A program takes one token and a block
of heads of one kind. Each head is loaded as the two halves that rotate into each other (or the
neighbours, parted in registers) and the rest that does not rotate, so no exchange between threads
is needed. MLA: programs of a few tokens, for the shared latents (RMSNorm, rotated key, store) and
for the queries, which are rotated in place.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from baton.ops.triton.common import follow, overlapping

_TILE_HEADS = 16


@triton.jit
def _load_pairs(
    at, live, SIDE: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr,
    INTERLEAVED: tl.constexpr,
):  # fmt: skip
    """The pairs' first members and their second ones, `[ROWS, BLOCK]` each, of the rows at
    `at [ROWS, 1]`. Interleaved ones are loaded together and parted in registers."""
    if INTERLEAVED:
        col = tl.arange(0, 2 * BLOCK)[None, :]
        both = tl.load(at + col, mask=live & (col < 2 * SIDE), other=0.0)
        return tl.split(tl.reshape(both, (ROWS, BLOCK, 2)))
    else:
        col = tl.arange(0, BLOCK)[None, :]
        inside = live & (col < SIDE)
        return (
            tl.load(at + col, mask=inside, other=0.0),
            tl.load(at + SIDE + col, mask=inside, other=0.0),
        )


@triton.jit
def _cos_sin(cos, sin, token, SIDE: tl.constexpr, BLOCK: tl.constexpr):
    lane = tl.arange(0, BLOCK)[None, :]
    c = tl.load(cos + token * SIDE + lane, mask=lane < SIDE, other=0.0)
    s = tl.load(sin + token * SIDE + lane, mask=lane < SIDE, other=0.0)
    return c, s


@triton.jit
def _scaled(x, scale, weight):
    """The normed value, rounded before and after the weight, like the reference."""
    normed = (x.to(tl.float32) * scale).to(x.dtype).to(tl.float32)
    return (normed * weight.to(tl.float32)).to(x.dtype)


@triton.jit
def _norm_rope(
    at, live, weight, eps, c, s,
    DIM: tl.constexpr, SIDE: tl.constexpr, BLOCK: tl.constexpr, REST: tl.constexpr,
    ROWS: tl.constexpr, INTERLEAVED: tl.constexpr, NORM: tl.constexpr,
):  # fmt: skip
    """Heads at `at [ROWS, 1]`: their rotated pairs, and their unrotated rest."""
    first, second = _load_pairs(at, live, SIDE, BLOCK, ROWS, INTERLEAVED)
    rest_col = 2 * SIDE + tl.arange(0, REST)[None, :]
    rest = first
    if DIM > 2 * SIDE:
        rest = tl.load(at + rest_col, mask=live & (rest_col < DIM), other=0.0)
    if NORM:
        a, b = first.to(tl.float32), second.to(tl.float32)
        squares = tl.sum(a * a, 1) + tl.sum(b * b, 1)
        if DIM > 2 * SIDE:
            squares += tl.sum(rest.to(tl.float32) * rest.to(tl.float32), 1)
        scale = tl.rsqrt(squares / DIM + eps)[:, None]
        start = weight + tl.zeros([1, 1], tl.int32)
        w_first, w_second = _load_pairs(start, True, SIDE, BLOCK, 1, INTERLEAVED)
        first = _scaled(first, scale, w_first)
        second = _scaled(second, scale, w_second)
        if DIM > 2 * SIDE:
            w_rest = tl.load(weight + rest_col, mask=rest_col < DIM, other=0.0)
            rest = _scaled(rest, scale, w_rest)
    a, b = first.to(tl.float32), second.to(tl.float32)
    return a * c - b * s, b * c + a * s, rest


@triton.jit
def _put(
    at, live, first, second, rest,
    DIM: tl.constexpr, SIDE: tl.constexpr, BLOCK: tl.constexpr, REST: tl.constexpr,
    ROWS: tl.constexpr, INTERLEAVED: tl.constexpr,
):  # fmt: skip
    """The inverse of `_norm_rope`'s loads."""
    dtype = at.dtype.element_ty
    if INTERLEAVED:
        col = tl.arange(0, 2 * BLOCK)[None, :]
        both = tl.reshape(tl.join(first.to(dtype), second.to(dtype)), (ROWS, 2 * BLOCK))
        tl.store(at + col, both, mask=live & (col < 2 * SIDE))
    else:
        col = tl.arange(0, BLOCK)[None, :]
        inside = live & (col < SIDE)
        tl.store(at + col, first.to(dtype), mask=inside)
        tl.store(at + SIDE + col, second.to(dtype), mask=inside)
    if DIM > 2 * SIDE:
        rest_col = 2 * SIDE + tl.arange(0, REST)[None, :]
        tl.store(at + rest_col, rest.to(dtype), mask=live & (rest_col < DIM))


@triton.jit(do_not_specialize_on_alignment=["slots"])
def _gqa(
    qkv, q_out, k_out, key, value, slots, cos, sin, q_weight, k_weight, eps, qkv_stride,
    key_page, key_offset, key_head, value_page, value_offset, value_head,
    Q: tl.constexpr, KV: tl.constexpr, DIM: tl.constexpr, SIDE: tl.constexpr,
    BLOCK: tl.constexpr, REST: tl.constexpr, WIDE: tl.constexpr, HEADS: tl.constexpr,
    PAGE: tl.constexpr, INTERLEAVED: tl.constexpr, NORM: tl.constexpr,
):  # fmt: skip
    follow()
    token = tl.program_id(0).to(tl.int64)
    tile = tl.program_id(1)
    lane = tl.arange(0, HEADS)[:, None]
    source = qkv + token * qkv_stride
    q_tiles = tl.cdiv(Q, HEADS)
    kv_tiles = tl.cdiv(KV, HEADS)
    if tile < q_tiles:
        head = tile * HEADS + lane
        c, s = _cos_sin(cos, sin, token, SIDE, BLOCK)
        first, second, rest = _norm_rope(
            source + head * DIM, head < Q, q_weight, eps, c, s,
            DIM, SIDE, BLOCK, REST, HEADS, INTERLEAVED, NORM,
        )  # fmt: skip
        target = q_out + token * (Q * DIM)
        _put(target + head * DIM, head < Q, first, second, rest,
             DIM, SIDE, BLOCK, REST, HEADS, INTERLEAVED)  # fmt: skip
    else:
        slot = tl.load(slots + token)
        stored = slot >= 0
        slot = tl.where(stored, slot, 0).to(tl.int64)
        page, offset = slot // PAGE, slot % PAGE
        if tile < q_tiles + kv_tiles:
            head = (tile - q_tiles) * HEADS + lane
            c, s = _cos_sin(cos, sin, token, SIDE, BLOCK)
            first, second, rest = _norm_rope(
                source + (Q + head) * DIM, head < KV, k_weight, eps, c, s,
                DIM, SIDE, BLOCK, REST, HEADS, INTERLEAVED, NORM,
            )  # fmt: skip
            target = k_out + token * (KV * DIM)
            _put(target + head * DIM, head < KV, first, second, rest,
                 DIM, SIDE, BLOCK, REST, HEADS, INTERLEAVED)  # fmt: skip
            # Rounded to the compute dtype first: what is stored is what k_out holds.
            target = key + page * key_page + offset * key_offset
            dtype = k_out.dtype.element_ty
            _put(target + head * key_head, (head < KV) & stored, first.to(dtype),
                 second.to(dtype), rest, DIM, SIDE, BLOCK, REST, HEADS, INTERLEAVED)  # fmt: skip
        else:
            head = (tile - q_tiles - kv_tiles) * HEADS + lane
            col = tl.arange(0, WIDE)[None, :]
            inside = (head < KV) & (col < DIM)
            v = tl.load(source + (Q + KV + head) * DIM + col, mask=inside, other=0.0)
            place = value + page * value_page + offset * value_offset + head * value_head + col
            tl.store(place, v.to(value.dtype.element_ty), mask=inside & stored)


def gqa_heads(
    qkv: torch.Tensor,
    widths: tuple[int, int],
    norms: tuple[torch.Tensor, torch.Tensor] | None,
    eps: float,
    rotation: tuple[torch.Tensor, torch.Tensor, bool],
    pages: tuple[torch.Tensor, torch.Tensor],
    slots: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """See `ops.qkv.gqa_heads`; a slot below 0 is not stored.

    Args:
        qkv: `[T, (Hq + 2 Hk) D]`, rows contiguous.
        widths: Hq, Hk.
        norms: q and k weights `[D]`.
        eps: of the norms.
        rotation: cos, sin float32 `[T, half]`, and whether pairs interleave.
        pages: keys and values `[pages, page_size, Hk, D]`, any strides with D contiguous.
        slots: int64 `[T]`.
    """
    (heads, kv_heads), (cos, sin, interleaved), (key, value) = widths, rotation, pages
    tokens, dim, side = qkv.shape[0], key.shape[-1], cos.shape[-1]
    q = torch.empty(tokens, heads, dim, dtype=qkv.dtype, device=qkv.device)
    k = torch.empty(tokens, kv_heads, dim, dtype=qkv.dtype, device=qkv.device)
    v = qkv[:, (heads + kv_heads) * dim :].unflatten(-1, (kv_heads, dim))
    if tokens == 0:
        return q, k, v
    many = min(_TILE_HEADS, triton.next_power_of_2(max(heads, kv_heads)))
    tile = many if tokens >= 128 else max(1, many // 2)
    grid = tokens, triton.cdiv(heads, tile) + 2 * triton.cdiv(kv_heads, tile)
    q_weight, k_weight = (qkv, qkv) if norms is None else norms
    _gqa[grid](
        qkv, q, k, key, value, slots, cos, sin, q_weight, k_weight, eps, qkv.stride(0),
        key.stride(0), key.stride(1), key.stride(2),
        value.stride(0), value.stride(1), value.stride(2),
        Q=heads, KV=kv_heads, DIM=dim, SIDE=side, BLOCK=triton.next_power_of_2(side),
        REST=triton.next_power_of_2(max(1, dim - 2 * side)), WIDE=triton.next_power_of_2(dim),
        HEADS=tile, PAGE=key.shape[1], INTERLEAVED=interleaved, NORM=norms is not None,
        num_warps=4, launch_pdl=overlapping(),
    )  # fmt: skip
    return q, k, v


@triton.jit(do_not_specialize=["tokens"], do_not_specialize_on_alignment=["slots"])
def _mla(
    q, kv, key, slots, cos, sin, weight, eps, tokens, q_stride, kv_stride, key_page, key_offset,
    HEADS: tl.constexpr, NOPE: tl.constexpr, SIDE: tl.constexpr, BLOCK: tl.constexpr,
    RANK: tl.constexpr, WIDE: tl.constexpr, TILE: tl.constexpr, TOKENS: tl.constexpr,
    PAGE: tl.constexpr, INTERLEAVED: tl.constexpr,
):  # fmt: skip
    follow()
    if tl.program_id(1) > 0:
        _turn(q, cos, sin, tokens, q_stride, HEADS, NOPE, SIDE, BLOCK, TILE, TOKENS, INTERLEAVED)
    else:
        _latents(kv, key, slots, cos, sin, weight, eps, tokens, kv_stride, key_page, key_offset,
                 SIDE, BLOCK, RANK, WIDE, TOKENS, PAGE, INTERLEAVED)  # fmt: skip


@triton.jit
def _turn(
    q, cos, sin, tokens, q_stride,
    HEADS: tl.constexpr, NOPE: tl.constexpr, SIDE: tl.constexpr, BLOCK: tl.constexpr,
    TILE: tl.constexpr, TOKENS: tl.constexpr, INTERLEAVED: tl.constexpr,
):  # fmt: skip
    """Rotate a tile of heads of some tokens in place."""
    row = tl.arange(0, TOKENS * TILE)[:, None]
    token = tl.program_id(0) * TOKENS + row // TILE
    head = (tl.program_id(1) - 1) * TILE + row % TILE
    live = (token < tokens) & (head < HEADS)
    token = tl.where(live, token, 0).to(tl.int64)
    c, s = _cos_sin(cos, sin, token, SIDE, BLOCK)
    at = q + token * q_stride + head * (NOPE + 2 * SIDE) + NOPE
    first, second, rest = _norm_rope(
        at, live, q, 0.0, c, s, 2 * SIDE, SIDE, BLOCK, BLOCK, TOKENS * TILE, INTERLEAVED, False
    )
    _put(at, live, first, second, rest, 2 * SIDE, SIDE, BLOCK, BLOCK, TOKENS * TILE, INTERLEAVED)


@triton.jit
def _latents(
    kv, key, slots, cos, sin, weight, eps, tokens, kv_stride, key_page, key_offset,
    SIDE: tl.constexpr, BLOCK: tl.constexpr, RANK: tl.constexpr, WIDE: tl.constexpr,
    TOKENS: tl.constexpr, PAGE: tl.constexpr, INTERLEAVED: tl.constexpr,
):  # fmt: skip
    """Norm some tokens' latents and rotate the keys behind them, in place and into the pages."""
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)[:, None]
    live = token < tokens
    token = tl.where(live, token, 0).to(tl.int64)
    slot = tl.load(slots + token, mask=live, other=-1)
    stored = slot >= 0
    slot = tl.where(stored, slot, 0).to(tl.int64)
    source = kv + token * kv_stride
    target = key + slot // PAGE * key_page + slot % PAGE * key_offset
    # Everything is loaded before anything is stored: the compiler keeps their order.
    col = tl.arange(0, WIDE)[None, :]
    inside = live & (col < RANK)
    latent = tl.load(source + col, mask=inside, other=0.0)
    w = tl.load(weight + col, mask=col < RANK, other=0.0)
    c, s = _cos_sin(cos, sin, token, SIDE, BLOCK)
    first, second, rest = _norm_rope(
        source + RANK, live, weight, eps, c, s,
        2 * SIDE, SIDE, BLOCK, BLOCK, TOKENS, INTERLEAVED, False,
    )  # fmt: skip
    # Rounded to the compute dtype first: what is stored is what attention gets.
    turned, other = first.to(latent.dtype), second.to(latent.dtype)
    wide = latent.to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide, 1) / RANK + eps)[:, None]
    latent = _scaled(latent, scale, w)
    tl.store(source + col, latent, mask=inside)
    tl.store(target + col, latent.to(target.dtype.element_ty), mask=inside & stored)
    _put(source + RANK, live, turned, other, rest,
         2 * SIDE, SIDE, BLOCK, BLOCK, TOKENS, INTERLEAVED)  # fmt: skip
    _put(target + RANK, live & stored, turned, other, rest,
         2 * SIDE, SIDE, BLOCK, BLOCK, TOKENS, INTERLEAVED)  # fmt: skip


def mla_heads(
    q: torch.Tensor,
    kv: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    rotation: tuple[torch.Tensor, torch.Tensor, bool],
    pages: torch.Tensor,
    slots: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `ops.qkv.mla_heads`; overwrites `q` and `kv` and returns them. `pages` `[pages,
    page_size, 1, rank + rope]` with any strides; a slot below 0 is not stored. Of `q` and `kv` a
    token's row must be contiguous."""
    cos, sin, interleaved = rotation
    tokens, heads, width = q.shape
    side, rank = cos.shape[-1], kv.shape[-1] - 2 * cos.shape[-1]
    if tokens == 0:
        return q, kv
    tile = min(16, triton.next_power_of_2(heads))
    many = mla_tokens(tokens)
    _mla[(triton.cdiv(tokens, many), 1 + triton.cdiv(heads, tile))](
        q, kv, pages, slots, cos, sin, weight, eps, tokens, q.stride(0), kv.stride(0),
        pages.stride(0), pages.stride(1),
        HEADS=heads, NOPE=width - 2 * side, SIDE=side, BLOCK=triton.next_power_of_2(side),
        RANK=rank, WIDE=triton.next_power_of_2(rank), TILE=tile, TOKENS=many,
        PAGE=pages.shape[1], INTERLEAVED=interleaved, num_warps=4,
        launch_pdl=overlapping(),
    )  # fmt: skip
    return q, kv


def mla_tokens(tokens: int) -> int:
    """Tokens of a program: several where there are programs enough, so that each thread has
    several 16-byte accesses under way."""
    return 4 if tokens >= 1024 else 2 if tokens >= 256 else 1
