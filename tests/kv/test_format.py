"""Pages of every dtype: bytes, store, gather, poison."""

from __future__ import annotations

import pytest
import torch

from baton.core.errors import ConfigError
from baton.core.kv import KVShape
from baton.kv.format import FORMATS, bytes_per_page, make_views

GQA = KVShape(3, 6, 4)
MLA = KVShape(1, 10, 8, shared_value=True)


@pytest.mark.parametrize("name", FORMATS.names())
@pytest.mark.parametrize("shape", [GQA, MLA])
def test_what_is_stored_is_gathered(name: str, shape: KVShape) -> None:
    torch.manual_seed(0)
    (view,) = make_views([shape], 9, 4, name, "float32", "cpu")
    view.poison(torch.arange(9))
    pages = torch.tensor([[7, 2, 5], [0, 8, 3]])
    key = torch.randn(2, shape.heads, 12, shape.key_dim)
    value = torch.randn(2, shape.heads, 12, shape.value_dim)
    slots = (pages[:, :, None] * 4 + torch.arange(4)).view(2, 12)
    for i in range(2):
        stored = None if shape.shared_value else value[i, :, :11].transpose(0, 1)
        view.store(slots[i, :11], key[i, :, :11].transpose(0, 1), stored)
    if shape.shared_value:
        value = key[..., : shape.value_dim]
    dtype = getattr(torch, name)
    out = torch.empty_like(key), torch.empty_like(value)
    for got in (view.gather(pages), view.gather(pages, out)):
        for mine, given in zip(got, (key, value), strict=True):
            assert mine.dtype == torch.float32
            assert torch.equal(mine[:, :, :11], given[:, :, :11].to(dtype).float())
            assert mine[:, :, 11].isnan().all()
    paged_key, paged_value = view.paged()
    assert paged_key.shape == (9, 4, shape.heads, shape.key_dim)
    assert paged_value.shape == (9, 4, shape.heads, shape.value_dim)
    assert torch.equal(paged_key[2, 1].float(), key[0, :, 5].to(dtype).float())


def test_bytes() -> None:
    assert bytes_per_page([GQA, GQA, MLA], 16, "bfloat16") == 16 * 2 * (30 + 30 + 10)
    assert bytes_per_page([MLA], 1, "float64") == 80


def test_sizes_and_names_are_checked() -> None:
    with pytest.raises(ConfigError, match="0 pages"):
        make_views([GQA], 0, 4, "float32", "float32", "cpu")
    with pytest.raises(ConfigError, match="unknown KV format 'int3'"):
        bytes_per_page([GQA], 4, "int3")
