"""Synthetic steps are well formed."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

from baton.runner.probes import chunks, mixed


@pytest.mark.parametrize("most", [1, 16, 17, 2048, 8000])
def test_chunks_double_up_to_the_largest(most: int) -> None:
    found = chunks(most)
    assert found[-1] == most
    assert all(a < b <= 2 * a for a, b in pairwise(found))


@pytest.mark.parametrize("page_size", [1, 16])
def test_mixed_step_has_a_prefill_and_decodes(page_size: int) -> None:
    ids, batch = mixed(page_size, torch.device("cpu"))
    assert batch.query_lens == [page_size, 1, 1]
    assert batch.context_lens == [0, page_size - 1, page_size - 1]
    rows = sum(batch.query_lens)
    assert len(ids) == len(batch.positions) == len(batch.slots) == rows
    assert batch.pages.shape == (3, 1)
