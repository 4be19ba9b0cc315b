"""A library backend whose library is ten lines of PyTorch, to test the packing on a CPU."""

from __future__ import annotations

import torch

from baton.attention.packed import PackedBackend, Piece


class PlainPacked(PackedBackend):
    """Prefill only, any dtype."""

    def attend(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, piece: Piece, need_lse: bool
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        assert piece.cu_q.tolist()[-1] == len(q)
        assert piece.cu_k.tolist()[-1] == len(k)
        group = q.shape[1] // k.shape[1]
        outs, lses = [], []
        parts = q.split(piece.q_lens), k.split(piece.k_lens), v.split(piece.k_lens)
        for x, keys, values in zip(*parts, strict=True):
            keys, values = (y.repeat_interleave(group, 1) for y in (keys, values))
            s = torch.einsum("qhd,khd->qhk", x, keys) * self.need.spec.scale
            if piece.causal:
                past = torch.ones(len(x), len(keys)).tril(len(keys) - len(x)).bool()
                s = s.masked_fill(~past[:, None], -torch.inf)
            outs.append(torch.einsum("qhk,khd->qhd", s.softmax(-1), values))
            lses.append(s.logsumexp(-1))
        return torch.cat(outs), torch.cat(lses) if need_lse else None
