"""FlashAttention 3 as a backend calls it, with PyTorch behind the library's own schema."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest
import torch

from attention.plain_packed import PlainPacked
from baton.attention.flash import FA3Backend
from baton.attention.packed import Piece, _sums
from baton.attention.spec import AttentionNeed, GQASpec

CPU = torch.device("cpu")
#: as fa3-fwd 0.0.3 registers it
SCHEMA = (
    "fwd(Tensor q, Tensor k, Tensor v, Tensor(k_new!)? k_new=None, Tensor(v_new!)? v_new=None, "
    "Tensor? q_v=None, Tensor(out!)? out=None, Tensor? cu_seqlens_q=None, "
    "Tensor? cu_seqlens_k=None, Tensor? cu_seqlens_k_new=None, Tensor? seqused_q=None, "
    "Tensor? seqused_k=None, int? max_seqlen_q=None, int? max_seqlen_k=None, "
    "Tensor? page_table=None, Tensor? kv_batch_idx=None, Tensor? leftpad_k=None, "
    "Tensor? rotary_cos=None, Tensor? rotary_sin=None, Tensor? seqlens_rotary=None, "
    "Tensor? q_descale=None, Tensor? k_descale=None, Tensor? v_descale=None, "
    "float? softmax_scale=None, bool is_causal=False, int window_size_left=-1, "
    "int window_size_right=-1, int attention_chunk=0, float softcap=0.0, "
    "bool is_rotary_interleaved=False, Tensor? scheduler_metadata=None, int num_splits=0, "
    "bool? pack_gqa=None, int sm_margin=0) -> (Tensor(out!), Tensor, Tensor, Tensor)"
)
NEED = AttentionNeed(GQASpec(4, 2, 16, 0.3), torch.float32, CPU)


def forward(*args: Any) -> tuple[torch.Tensor, ...]:
    """The library, of rows `[B, T, H, D]`, or packed ones `[T, H, D]` with running sums."""
    names = [argument.name for argument in torch.ops.fa3_fwd.fwd.default._schema.arguments]
    given = dict(zip(names, args, strict=False))
    q, k, v = (given[name] for name in "qkv")
    if packed := q.ndim == 3:
        sums = given["cu_seqlens_q"], given["cu_seqlens_k"]
        lens = [s.diff().tolist() for s in sums]
        assert [max(found) for found in lens] == [given["max_seqlen_q"], given["max_seqlen_k"]]
    else:
        assert len(q) == len(k) == len(v) == 1
        q, k, v = q[0], k[0], v[0]
        lens = [[len(q)], [len(k)]]
        sums = tuple(_sums(found, CPU) for found in lens)
    assert given["softmax_scale"] == pytest.approx(0.3)
    assert given["num_splits"] == 1, "else the library chooses, and bits depend on the batch"
    piece = Piece(*lens, *sums, given["is_causal"], None)
    out, lse = PlainPacked(NEED).attend(q, k, v, piece, True)
    assert lse is not None
    none = torch.empty(0)
    return (out, lse.t(), none, none) if packed else (out[None], lse.t()[None], none, none)


@pytest.fixture(scope="module", autouse=True)
def library() -> Iterator[None]:
    with (
        pytest.MonkeyPatch.context() as monkey,
        torch.library._scoped_library("fa3_fwd", "DEF") as found,
    ):
        found.define(SCHEMA)
        found.impl("fwd", forward, "CPU")
        for name in ("fa3_fwd", "fa3_fwd._C"):
            monkey.setitem(sys.modules, name, ModuleType(name))
        yield


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("lens", [([5], [9]), ([5, 2, 3], [9, 2, 7])])
def test_rows_and_lengths_are_what_the_library_takes(
    lens: tuple[list[int], list[int]], causal: bool
) -> None:
    torch.manual_seed(0)
    q = torch.randn(sum(lens[0]), 4, 16)
    k, v = torch.randn(2, sum(lens[1]), 2, 16)
    piece = Piece(*lens, *(_sums(found, CPU) for found in lens), causal, None)
    found, expected = (b(NEED).attend(q, k, v, piece, True) for b in (FA3Backend, PlainPacked))
    for ours, theirs in zip(found, expected, strict=True):
        assert ours is not None
        assert theirs is not None
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("found, reason", [((8, 9), "needs"), ((9, 0), ""), ((10, 0), "is made")])
def test_it_is_for_hopper_alone(
    found: tuple[int, int], reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: found)
    monkeypatch.setattr("baton.attention.needs._importable", lambda _: True)
    need = AttentionNeed(GQASpec(4, 2, 128, 0.3), torch.bfloat16, torch.device("cuda"))
    reasons = FA3Backend.limits(need)
    assert [text.startswith(reason) for text in reasons] == [True] * bool(reason)
