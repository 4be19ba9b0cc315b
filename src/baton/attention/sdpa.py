"""Prefill with what torch itself carries: cuDNN attention for long chunks, FlashAttention-2 else.

The fallback that is always there on a GPU. cuDNN is the faster one on Hopper (550-600 against
about 400 TFLOP/s) but plans every new shape for milliseconds and masks from the upper left
corner, so it takes long single sequences, in two parts where there is context. FA2 takes packed
rows and masks from the lower right corner; values narrower than keys (MLA) are padded for it.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from baton.attention.needs import against_cuda
from baton.attention.packed import PackedBackend, Piece
from baton.attention.spec import AttentionNeed, GQASpec
from baton.core.log import get_logger
from baton.ops.attention import merge_into

LONG = 1024  # rows of one sequence from which cuDNN is worth its planning

log = get_logger("attention")


class SDPABackend(PackedBackend):
    """torch's attention operators, called below `scaled_dot_product_attention` for the LSE."""

    def __init__(self, need: AttentionNeed) -> None:
        super().__init__(need)
        self.cudnn = True  # until it refuses this model's heads

    @classmethod
    def limits(cls, need: AttentionNeed) -> list[str]:
        """See AttentionBackend."""
        spec = need.spec
        reasons = against_cuda(need, (8, 0), (torch.bfloat16, torch.float16))
        dim = spec.head_dim if isinstance(spec, GQASpec) else spec.nope_dim + spec.rope_dim
        if dim > 256 or dim % 8:
            reasons.append(f"heads of {dim} are not a multiple of 8 up to 256")
        if not isinstance(spec, GQASpec) and spec.value_dim > dim:
            reasons.append("values are wider than keys")
        return reasons

    def attend(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, piece: Piece, need_lse: bool
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """See PackedBackend."""
        if self.cudnn and len(piece.q_lens) == 1 and piece.q_lens[0] >= LONG:
            try:
                return self._in_parts(q, k, v, piece, need_lse)
            except RuntimeError as error:
                self.cudnn = False
                log.warning(
                    "cuDNN attention refuses these heads, FlashAttention-2 serves: %s", error
                )
        return self._packed(q, k, v, piece)

    def _in_parts(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, piece: Piece, need_lse: bool
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        context = k.shape[0] - q.shape[0]
        if not piece.causal or context == 0:
            return self._cudnn(q, k, v, piece.causal, need_lse)
        out, lse = self._cudnn(q, k[context:], v[context:], True, True)
        assert lse is not None
        acc = out.to(torch.float32, memory_format=torch.contiguous_format)
        acc_lse = lse.contiguous()
        more, more_lse = self._cudnn(q, k[:context], v[:context], False, True)
        assert more_lse is not None
        merge_into(acc, acc_lse, more, more_lse)
        return acc.to(q.dtype), acc_lse

    def _cudnn(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, need_lse: bool
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        found = torch.ops.aten._scaled_dot_product_cudnn_attention(
            *(x.transpose(0, 1)[None] for x in (q, k, v)), None, need_lse, 0.0, causal, False,
            scale=self.need.spec.scale,
        )  # fmt: skip
        out = found[0][0].transpose(0, 1)
        return out, found[1].reshape(q.shape[1], q.shape[0]).t() if need_lse else None

    def _packed(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, piece: Piece
    ) -> tuple[torch.Tensor, torch.Tensor]:
        width = v.shape[-1]
        if width < q.shape[-1]:
            v = F.pad(v, (0, q.shape[-1] - width))
        found = torch.ops.aten._flash_attention_forward(
            q, k, v, piece.cu_q, piece.cu_k, max(piece.q_lens), max(piece.k_lens), 0.0,
            piece.causal, False, scale=self.need.spec.scale,
        )  # fmt: skip
        return found[0][..., :width], found[1].reshape(q.shape[1], -1).t()
