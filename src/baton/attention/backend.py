"""Attention over pages: what a backend implements, and how a step is shared out.

A step's sequences are split by query length: those that bring one token decode, the others
prefill. Each half has its own backend, the same one unless the user names a pair
("prefill,decode"). `plan` runs once per step, `gqa` or `mla` once per layer.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

import torch

from baton.attention.positions.rotary import RotaryPositions, Rotation
from baton.attention.spec import AttentionNeed
from baton.core.errors import ConfigError
from baton.core.forward import ForwardBatch
from baton.core.kv import KVView
from baton.core.registry import Registry
from baton.ops.host import upload

HALVES: tuple[Literal["prefill", "decode"], ...] = ("prefill", "decode")


class AttentionBackend:
    """Computes attention of one rank's heads, for prefill rows, decode rows or both.

    Keys and values of the step's own tokens are in the pages before `prefill_*` or `decode_*`
    is called. Queries `[T, H, D]`, keys and values `[T, Hk, D]` hold every row of the step;
    results hold only the rows of the planned sequences, in their order.

    halves: what the backend implements; it may be one half only.
    graphable: decode of a step whose every row decodes can be captured in a CUDA graph. Its
        `plan_decode` then reads `positions` and `pages` on the device and nothing else of the
        batch (a row's length is its position + 1), and its grids depend on their shapes only, so
        a replay serves whatever the two tensors hold by then. Rows that pad a batch have position
        0 and a page id that may be read (and the slot of a page that is nobody's).
    """

    halves: ClassVar[tuple[str, ...]] = ("prefill", "decode")
    graphable: ClassVar[bool] = False

    def __init__(self, need: AttentionNeed) -> None:
        self.need = need

    @classmethod
    def why_not(cls, need: AttentionNeed) -> list[str]:
        """Reasons against serving `need`; empty when it can."""
        if need.half is not None and need.half not in cls.halves:
            return [f"does not {need.half}"]
        return cls.limits(need)

    @classmethod
    def limits(cls, need: AttentionNeed) -> list[str]:
        """What of `need` is beyond this backend, whichever half is asked for."""
        return []

    def warm_up(self) -> None:
        """Compile now what would otherwise be compiled while a request waits."""

    def held_context(self, page_size: int) -> float:
        """Most tokens of context that prefill has gathered at once; infinite: all there are."""
        return math.inf

    def plan_prefill(self, batch: ForwardBatch, sequences: Sequence[int], page_size: int) -> Any:
        """Plan the sequences (indices into the batch) with more than one query."""
        raise NotImplementedError

    def plan_decode(self, batch: ForwardBatch, sequences: Sequence[int], page_size: int) -> Any:
        """Plan the sequences with exactly one query."""
        raise NotImplementedError

    def prefill_gqa(
        self, plan: Any, view: KVView, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> torch.Tensor:
        """`[prefill rows, H, D]`."""
        raise NotImplementedError

    def decode_gqa(self, plan: Any, view: KVView, q: torch.Tensor) -> torch.Tensor:
        """`[decode rows, H, D]`."""
        raise NotImplementedError

    def prefill_mla(
        self, plan: Any, view: KVView, q: torch.Tensor, latent: torch.Tensor, up: torch.Tensor
    ) -> torch.Tensor:
        """`[prefill rows, H, value_dim]`; see `Attention.mla` for the arguments."""
        raise NotImplementedError

    def decode_mla(
        self, plan: Any, view: KVView, q: torch.Tensor, up: torch.Tensor
    ) -> torch.Tensor:
        """`[decode rows, H, value_dim]`; see `Attention.mla` for the arguments."""
        raise NotImplementedError


#: In order of preference, by what was measured on an H200 (causal BF16, TFLOP/s of 64 heads of GQA
#: at 4K, 16K, 128K: fa3 575, 689, 661; fa4 514, 711, 652; cuDNN 529, 640, 551); fa3 has nothing to
#: compile.
ATTENTION: Registry[type[AttentionBackend]] = Registry(
    "attention backend",
    {
        "fa3": "baton.attention.flash:FA3Backend",
        "fa4": "baton.attention.flash:FA4Backend",
        "sdpa": "baton.attention.sdpa:SDPABackend",
        "triton": "baton.attention.triton_backend:TritonBackend",
        "torch": "baton.attention.torch_backend:TorchBackend",
    },
)


@dataclass(frozen=True)
class AttentionPlan:
    """One step, for every layer of a kind. A part is None when the step has no such rows.

    query_scale: a factor on each query, `[T, 1, 1]`; None: 1.
    """

    rotation: Rotation
    query_scale: torch.Tensor | None
    slots: torch.Tensor
    prefill: Any
    decode: Any
    prefill_rows: slice | torch.Tensor | None  # None: all rows
    decode_rows: slice | torch.Tensor | None


class Attention:
    """The attention of a model: one backend for prefill, one for decode, one position scheme."""

    def __init__(
        self, prefill: AttentionBackend, decode: AttentionBackend, positions: RotaryPositions
    ) -> None:
        self.prefill, self.decode, self.positions = prefill, decode, positions

    @property
    def graphable(self) -> bool:
        """Whether a step that only decodes can be captured, its plan included."""
        return self.decode.graphable

    def warm_up(self) -> None:
        """See AttentionBackend; called once at start-up."""
        for backend in {id(b): b for b in (self.prefill, self.decode)}.values():
            backend.warm_up()

    def plan(self, batch: ForwardBatch, page_size: int) -> AttentionPlan:
        """Share the batch out and let each backend plan its half."""
        places, batch = batch.positions, self.seen(batch, page_size)
        lens = batch.query_lens
        long = [i for i, length in enumerate(lens) if length > 1]
        single = [i for i, length in enumerate(lens) if length == 1]
        mixed = bool(long) and bool(single)
        return AttentionPlan(
            rotation=self.positions.rotation(places),
            query_scale=self.positions.query_scale(places),
            slots=batch.slots,
            prefill=self.prefill.plan_prefill(batch, long, page_size) if long else None,
            decode=self.decode.plan_decode(batch, single, page_size) if single else None,
            prefill_rows=rows_of(batch, long) if mixed else None,
            decode_rows=rows_of(batch, single) if mixed else None,
        )

    def seen(self, batch: ForwardBatch, page_size: int) -> ForwardBatch:
        """The batch as the backends are to see it: the same rows, perhaps in other sequences, with
        pages and lengths of what each of them attends to. Here, everything."""
        return batch

    def gqa(
        self,
        plan: AttentionPlan,
        view: KVView,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        stored: bool = False,
    ) -> torch.Tensor:
        """Store `k`, `v` `[T, Hk, D]` (rotated already) unless they are `stored`, and attend
        with `q [T, H, D]`."""
        if not stored:
            view.store(plan.slots, k, v)
        long = single = None
        if plan.prefill is not None:
            long = self.prefill.prefill_gqa(plan.prefill, view, q, k, v)
        if plan.decode is not None:
            single = self.decode.decode_gqa(plan.decode, view, q)
        return _join(plan, q.shape[0], long, single)

    def mla(
        self,
        plan: AttentionPlan,
        view: KVView,
        q: torch.Tensor,
        latent: torch.Tensor,
        up: torch.Tensor,
        stored: bool = False,
    ) -> torch.Tensor:
        """Store latents and attend.

        Args:
            plan: this step's.
            view: this layer's pages.
            q: `[T, H, nope_dim + rope_dim]`, the last part rotated.
            latent: `[T, latent_dim + rope_dim]`, normed latent and rotated shared key.
            up: `[H, nope_dim + value_dim, latent_dim]`, the weights from latents to keys
                (first rows) and values of each head.
            stored: the latents are in their pages already.

        Returns:
            `[T, H, value_dim]`.
        """
        if not stored:
            view.store(plan.slots, latent[:, None], None)
        long = single = None
        if plan.prefill is not None:
            long = self.prefill.prefill_mla(plan.prefill, view, q, latent, up)
        if plan.decode is not None:
            single = self.decode.decode_mla(plan.decode, view, q, up)
        return _join(plan, q.shape[0], long, single)


def rows_of(batch: ForwardBatch, sequences: Sequence[int]) -> slice | torch.Tensor:
    """Flat rows of `sequences`: a slice where they follow one another, else int64 numbers."""
    starts = row_starts(batch)
    if consecutive(sequences):
        last = sequences[-1]
        return slice(starts[sequences[0]], starts[last] + batch.query_lens[last])
    rows = [torch.arange(starts[i], starts[i] + batch.query_lens[i]) for i in sequences]
    return upload(torch.cat(rows), batch.slots.device)


def consecutive(numbers: Sequence[int]) -> bool:
    """Each is one more than the one before it."""
    return list(numbers) == list(range(numbers[0], numbers[0] + len(numbers)))


def row_starts(batch: ForwardBatch) -> list[int]:
    """First row of each sequence."""
    starts, total = [], 0
    for length in batch.query_lens:
        starts.append(total)
        total += length
    return starts


def _join(
    plan: AttentionPlan, rows: int, long: torch.Tensor | None, single: torch.Tensor | None
) -> torch.Tensor:
    """The two halves in row order."""
    if long is None or single is None:
        only = single if long is None else long
        assert only is not None, "a step has at least one row"
        return only
    assert plan.prefill_rows is not None
    assert plan.decode_rows is not None
    out = long.new_empty(rows, *long.shape[1:])
    out[plan.prefill_rows] = long
    out[plan.decode_rows] = single
    return out


def make_attention(name: str, need: AttentionNeed, positions: RotaryPositions) -> Attention:
    """Backends by name: "auto", one name for both, or "prefill,decode" (either may be "auto").

    "auto" takes the best for each half. One name of a backend that has one half only leaves the
    other to "auto".

    Raises:
        ConfigError: when a name is unknown or its backend cannot serve `need`; says why.
    """
    names = [part.strip() for part in name.split(",")]
    if len(names) > 2 or not all(names):
        raise ConfigError(
            f'attention backend {name!r}: write "auto", one name, or "prefill,decode"'
        )
    made: dict[str, AttentionBackend] = {}
    halves: list[AttentionBackend] = []
    for half, wanted in zip(HALVES, (names[0], names[-1]), strict=True):
        if len(names) == 1 and wanted != "auto" and half not in ATTENTION.get(wanted).halves:
            wanted = "auto"
        chosen = ATTENTION.select(replace(need, half=half), wanted)
        if chosen.name not in made:
            made[chosen.name] = chosen.value(need)
        halves.append(made[chosen.name])
    return Attention(halves[0], halves[1], positions)
