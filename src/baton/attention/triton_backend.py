"""Decode over pages with Baton's own Triton kernels, planned on the device.

`plan_decode` builds the task map from `batch.positions` (one small kernel, no host sync) and
every layer uses it. With only decode rows in the step nothing else is read, so the plan and the
layers can be captured in one CUDA graph.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch

from baton.attention.backend import AttentionBackend, row_starts
from baton.attention.needs import against_cuda
from baton.attention.spec import AttentionNeed, GQASpec, MLASpec
from baton.core.errors import ConfigError
from baton.core.forward import ForwardBatch
from baton.core.kv import KVView
from baton.ops.host import upload
from baton.ops.mla import head_products

if TYPE_CHECKING:
    from baton.ops.triton.split import TaskMap, Workspace


@dataclass(frozen=True)
class TritonPlan:
    """rows: flat rows of the decode sequences, None for all; pages: int64 [B, P]."""

    rows: torch.Tensor | None
    pages: torch.Tensor
    shares: TaskMap


class TritonBackend(AttentionBackend):
    """Split-KV decode for GQA and MLA."""

    halves: ClassVar[tuple[str, ...]] = ("decode",)
    graphable: ClassVar[bool] = True

    def __init__(self, need: AttentionNeed) -> None:
        from baton.ops.triton.decode_gqa import gqa_launch
        from baton.ops.triton.decode_mla import mla_launch

        super().__init__(need)
        spec, size = need.spec, need.dtype.itemsize
        if isinstance(spec, GQASpec):
            group, columns = spec.num_heads // spec.num_kv_heads, spec.head_dim
            self._launch, self._blocks = gqa_launch(group, columns, size), spec.num_kv_heads
        else:
            self._launch, columns = mla_launch(spec.num_heads, size), spec.latent_dim
            self._blocks = -(-spec.num_heads // self._launch.rows)
        self._space = self._launch.rows, columns
        cores = (
            torch.cuda.get_device_properties(need.device).multi_processor_count
            if need.device.type == "cuda"
            else 4
        )
        self.programs = cores * self._launch.residents
        self._workspace: Workspace | None = None

    @classmethod
    def limits(cls, need: AttentionNeed) -> list[str]:
        """See AttentionBackend."""
        dtypes = torch.bfloat16, torch.float16, torch.float32
        reasons = against_cuda(need, (8, 0), dtypes, "triton")
        spec = need.spec
        if isinstance(spec, MLASpec) and spec.latent_dim > 512:
            reasons.append(f"latents of {spec.latent_dim} are wider than 512")
        if isinstance(spec, GQASpec):
            if spec.head_dim > 256:
                reasons.append(f"heads of {spec.head_dim} are wider than 256")
            if spec.num_heads // spec.num_kv_heads > 64:
                reasons.append("more than 64 query heads per KV head")
        return reasons

    def plan_decode(
        self, batch: ForwardBatch, sequences: Sequence[int], page_size: int
    ) -> TritonPlan:
        """See AttentionBackend."""
        from baton.ops.triton.split import task_map

        rows, pages = None, batch.pages
        if len(sequences) < len(batch.query_lens):
            starts = row_starts(batch)
            index = torch.tensor([[starts[i] for i in sequences], list(sequences)])
            index = upload(index, pages.device)
            rows, pages = index[0], pages[index[1]]
        launch = self._launch
        shares = task_map(
            batch.positions, launch.tile, self._blocks, self.programs, rows, launch.least,
            launch.slack,
        )  # fmt: skip
        return TritonPlan(rows, pages, shares)

    def _scratch(self) -> Workspace:
        """Partial results, shared by all layers: the stream orders their use."""
        from baton.ops.triton.split import Workspace

        if self._workspace is None:
            self._workspace = Workspace.make(2 * self.programs, *self._space, self.need.device)
        return self._workspace

    def decode_gqa(self, plan: TritonPlan, view: KVView, q: torch.Tensor) -> torch.Tensor:
        """See AttentionBackend."""
        from baton.ops.triton.decode_gqa import decode_gqa

        key, value = _pages(view)
        out, _ = decode_gqa(
            _rows(q, plan), key, value, plan.pages, plan.shares, self._scratch(),
            self.need.spec.scale, self._launch,
        )  # fmt: skip
        return out

    def decode_mla(
        self, plan: TritonPlan, view: KVView, q: torch.Tensor, up: torch.Tensor
    ) -> torch.Tensor:
        """See AttentionBackend. Absorbed: two small products per head around the kernel."""
        from baton.ops.triton.decode_mla import decode_mla

        spec = self.need.spec
        assert isinstance(spec, MLASpec)
        q = _rows(q, plan)
        nope, rope = q[..., : spec.nope_dim], q[..., spec.nope_dim :]
        # Behind the projections came the kernel that turns and stores, which leaves these as they
        # are. Where rows were picked or scaled since, that was PyTorch: nothing overlaps with it.
        moved = head_products(nope, up[:, : spec.nope_dim], early=True)
        mixed, _ = decode_mla(
            moved, rope, _pages(view)[0], plan.pages, plan.shares, self._scratch(),
            spec.scale, self._launch,
        )  # fmt: skip
        return head_products(mixed, up[:, spec.nope_dim :].transpose(1, 2))


def _rows(q: torch.Tensor, plan: TritonPlan) -> torch.Tensor:
    """The plan's rows of `q [T, H, D]`, last dim contiguous."""
    q = q if plan.rows is None else q[plan.rows]
    return q if q.stride(-1) == 1 else q.contiguous()


def _pages(view: KVView) -> tuple[torch.Tensor, torch.Tensor]:
    """The page tensors that kernels read."""
    pages = view.paged()
    if pages is None:
        raise ConfigError("attention backend 'triton': this KV format has no kernel to read it")
    return pages
