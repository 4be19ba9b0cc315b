"""FlashAttention libraries on Hopper: FA4 (`flash-attn-4`, CuTe DSL) and FA3 (`fa3-fwd`).

Both take packed rows, align the causal mask to the lower right corner, share KV heads, return
the log-sum-exp, and accept the MLA shape (192 wide keys, 128 wide values). FA4 compiles a kernel
for every kind of call (`warm_up`; seconds each), whatever the lengths are, and keeps them on disk.
"""

from __future__ import annotations

import functools
import importlib
from typing import Any

import torch

from baton.attention.needs import against_cuda
from baton.attention.packed import PackedBackend, Piece
from baton.attention.spec import AttentionNeed, GQASpec
from baton.core import env


def _lengths(piece: Piece) -> dict[str, Any]:
    """What both libraries are told of packed rows `[T, H, D]`."""
    return {
        "cu_seqlens_q": piece.cu_q,
        "cu_seqlens_k": piece.cu_k,
        "max_seqlen_q": max(piece.q_lens),
        "max_seqlen_k": max(piece.k_lens),
    }


def _against_dims(need: AttentionNeed) -> list[str]:
    spec = need.spec
    dim = spec.head_dim if isinstance(spec, GQASpec) else spec.nope_dim + spec.rope_dim
    value = dim if isinstance(spec, GQASpec) else spec.value_dim
    if dim > 256 or dim % 8 or value % 8:
        return [f"heads of {dim} (values {value}) are not multiples of 8 up to 256"]
    return []


@functools.cache
def _cute() -> Any:
    """The library, told to keep compiled kernels on disk: else every start compiles them again."""
    env.default("FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED", "1")
    env.default("FLASH_ATTENTION_CUTE_DSL_CACHE_DIR", str(env.CACHE.get() / "flash-attn-4"))
    return importlib.import_module("flash_attn.cute")


class FA4Backend(PackedBackend):
    """`flash_attn.cute`."""

    @classmethod
    def limits(cls, need: AttentionNeed) -> list[str]:
        """See AttentionBackend."""
        packages = "flash_attn.cute", "cutlass", "quack"
        dtypes = torch.bfloat16, torch.float16
        return against_cuda(need, (9, 0), dtypes, *packages) + _against_dims(need)

    def attend(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, piece: Piece, need_lse: bool
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """See PackedBackend. The log-sum-exp always comes, so that there is one kernel less."""
        cute = _cute()
        kind: dict[str, Any] = {
            "softmax_scale": self.need.spec.scale,
            "causal": piece.causal,
            "return_lse": True,
        }
        if len(piece.q_lens) == 1:
            out, lse = cute.flash_attn_func(q[None], k[None], v[None], **kind)
            return out[0], lse[0].t()
        out, lse = cute.flash_attn_varlen_func(q, k, v, **_lengths(piece), **kind)
        return out, lse.t()


@functools.cache
def _fa3() -> Any:
    """The library's operator. Its Python interface around it, for training, imports torch's
    compiler, which takes seconds."""
    importlib.import_module("fa3_fwd._C")
    return torch.ops.fa3_fwd.fwd


class FA3Backend(PackedBackend):
    """`fa3_fwd`."""

    @classmethod
    def limits(cls, need: AttentionNeed) -> list[str]:
        """See AttentionBackend."""
        dtypes = torch.bfloat16, torch.float16
        reasons = against_cuda(need, (9, 0), dtypes, "fa3_fwd._C", newest=9)
        return reasons + _against_dims(need)

    def attend(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, piece: Piece, need_lse: bool
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """See PackedBackend."""
        kind: dict[str, Any] = {
            "softmax_scale": self.need.spec.scale,
            "is_causal": piece.causal,
            "num_splits": 1,
        }
        if len(piece.q_lens) == 1:
            out, lse, *_ = _fa3()(q[None], k[None], v[None], **kind)
            return out[0], lse[0].t()
        out, lse, *_ = _fa3()(q, k, v, **_lengths(piece), **kind)
        return out, lse.t()
