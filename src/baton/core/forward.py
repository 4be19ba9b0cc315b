"""What the runner hands to a model for one step: flat token rows and how they group."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from baton.core.kv import KVShape, KVView


@dataclass
class ForwardBatch:
    """`B` sequences contribute `T = sum(query_lens)` rows, one sequence after the other.

    query_lens: tokens of each sequence in this step, host ints, all >= 1.
    context_lens: tokens of each sequence already in the KV cache, host ints.
    positions: int64 [T], on the device.
    slots: int64 [T], flat KV position of each row (page * page_size + offset).
    pages: int64 [B, P], page ids of each sequence, padded with 0.
    """

    query_lens: list[int]
    context_lens: list[int]
    positions: torch.Tensor
    slots: torch.Tensor
    pages: torch.Tensor


@dataclass
class ForwardContext:
    """One step's shared state: made once, read by every layer."""

    batch: ForwardBatch
    plan: Any  # the attention's plans, one for each kind of layer, made once per step
    kv: Sequence[KVView]  # one per layer


@dataclass
class Hidden:
    """Tokens between two layers, `[T, hidden]` each: the hidden states, and those normed for what
    comes next, a layer or the head."""

    normed: torch.Tensor
    states: torch.Tensor


class TensorGroup(Protocol):
    """The ranks that share each layer (tensor parallel). Size 1 costs nothing."""

    rank: int
    size: int

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """Sum of `x` over ranks; may reuse `x`."""

    def all_gather(self, x: torch.Tensor, dim: int = -1) -> torch.Tensor:
        """Concatenation over ranks along `dim`, in rank order."""


class Model(Protocol):
    """A decoder, split over a TensorGroup or not; the caller cannot tell."""

    kv_shapes: list[KVShape]  # one per layer and one for the MTP module, this rank's share

    @property
    def graphable(self) -> bool:
        """Whether a step of decodes can be captured in a CUDA graph: its plan reads only device
        tensors, and its launches depend on shapes alone."""

    @property
    def graph_prompts(self) -> bool:
        """Whether that of a single prompt can be captured as well."""

    @property
    def drafts(self) -> bool:
        """Whether its MTP module is loaded."""

    def brief(self) -> Model:
        """This model with one layer of each kind only: all its kernels, in a fraction of the
        time."""

    def plan(self, batch: ForwardBatch, kv: Sequence[KVView]) -> ForwardContext:
        """Make the step's attention plan, shared by all layers."""

    def forward(self, ids: torch.Tensor, context: ForwardContext) -> torch.Tensor:
        """Token ids int64 [T] -> final normed hidden states [T, hidden]; KV is stored."""

    def embed(self, ids: torch.Tensor) -> Hidden:
        """Token ids int64 [T] -> what goes into layer 0."""

    def through(self, hidden: Hidden, context: ForwardContext, first: int, last: int) -> Hidden:
        """Through layers `[first, last)`; their KV is stored. `hidden` may be overwritten. Behind
        the last layer `normed` are the final normed hidden states."""

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Hidden states [S, hidden] -> float32 logits [S, vocab], the whole vocabulary."""

    def draft(
        self, hidden: torch.Tensor, following: torch.Tensor, context: ForwardContext
    ) -> torch.Tensor:
        """Final hidden states [T, hidden] and the ids of the tokens behind them, int64 [T] -> the
        MTP module's hidden states [T, hidden], whose logits are of the tokens behind those. Its KV
        is stored."""
