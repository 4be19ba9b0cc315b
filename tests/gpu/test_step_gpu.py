"""What a step does outside its layers, on a card: to the bit what plain PyTorch does there."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from baton.ops.norm import embed_rms_norm, rms_norm
from baton.ops.rope import angles
from baton.ops.sample import choose
from baton.ops.step import advance, decode_inputs, prompt_inputs

BF16 = torch.bfloat16


@pytest.mark.parametrize("dtype", [BF16, torch.float16, torch.float32])
@pytest.mark.parametrize("tokens", [1, 3, 16, 64, 256, 257, 3000])
@pytest.mark.parametrize("dim", [64, 512, 2048, 2056, 2880, 4096, 7168, 16384])
def test_the_first_norm_in_the_kernel_of_the_embedding_changes_no_bit(dim, tokens, dtype) -> None:
    vocab = 1009
    table = torch.randn(vocab, dim, device="cuda", dtype=dtype)
    weight = torch.rand(dim, device="cuda", dtype=dtype) + 0.5
    ids = torch.randint(vocab, (tokens + 1,), device="cuda")[1:]
    ids[-1], ids[0] = 0, vocab - 1
    out, rows = embed_rms_norm(ids, table, weight, 1e-5)
    assert torch.equal(rows, F.embedding(ids, table))
    assert torch.equal(out, rms_norm(rows, weight, 1e-5))


@pytest.mark.parametrize("tokens", [1, 17, 4096])
@pytest.mark.parametrize("scaling", [1.0, 1.2079441541679836])
@pytest.mark.parametrize("theta, half", [(1e4, 32), (5e5, 64), (11158840.0, 64), (1e4, 5)])
def test_angles_have_the_plain_path_s_bits(theta, half, scaling, tokens, plain) -> None:
    positions = torch.randint(2**19, (tokens + 1,), device="cuda")[1:]
    positions[-1], positions[0] = 0, 2**19 - 1
    frequencies = 1.0 / theta ** (torch.arange(half) / half)
    args = positions, frequencies.cuda(), scaling
    for a, b in zip(angles(*args), plain(angles, *args), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("rows, pad", [(1, 0), (13, 3), (64, 0), (200, 56)])
@pytest.mark.parametrize("width", [1, 100, 2048, 8192])
def test_decodes_begin_and_end_as_on_the_plain_path(width, rows, pad, plain) -> None:
    slots = torch.cat((torch.randperm(300)[:rows], torch.full((pad,), 300))).cuda()
    live = (torch.arange(rows + pad, device="cuda") < rows).long()
    pages = torch.randint(10_000, (301, width), device="cuda")
    last, generated = torch.randint(120_000, (2, 301), device="cuda")
    computed = torch.randint(width * 64, (301,), device="cuda")
    for one in (last, computed, generated):
        one[300] = 0
    begin = slots, last, computed, pages, 64
    for a, b in zip(decode_inputs(*begin), plain(decode_inputs, *begin), strict=True):
        assert torch.equal(a, b)
    chosen = torch.randint(120_000, slots.shape, device="cuda"), slots % 7 == 0
    mine, theirs = ([one.clone() for one in (last, computed, generated)] for _ in "ab")
    out = advance(slots, live, *chosen, *mine)
    assert torch.equal(out, plain(advance, slots, live, *chosen, *theirs))
    for a, b in zip(mine, theirs, strict=True):
        assert torch.equal(a, b)
        assert int(a[300]) == 0


@pytest.mark.parametrize("size, length", [(64, 1), (64, 64), (1024, 1000), (4096, 4095)])
@pytest.mark.parametrize("width", [64, 100, 8192])
def test_a_prompt_begins_as_on_the_plain_path(width, size, length, plain) -> None:
    pages = torch.randint(10_000, (301, width), device="cuda")
    computed = torch.randint(1000, (301,), device="cuda")
    for slot in (0, 155, 300):
        head = torch.tensor([slot, length, *range(size)], device="cuda")
        mine, theirs = computed.clone(), computed.clone()
        out = prompt_inputs(head, size, mine, pages, 64)
        want = plain(prompt_inputs, head, size, theirs, pages, 64)
        for a, b in zip((*out, mine), (*want, theirs), strict=True):
            assert torch.equal(a, b)


def test_decodes_follow_one_another_in_a_graph(plain) -> None:
    """Six steps in one graph: whoever reads too early reads what an earlier one left."""
    rows, vocab, dim = 48, 5000, 2048
    slots = torch.cat((torch.randperm(100)[: rows - 3], torch.full((3,), 100))).cuda()
    live = (slots < 100).long()
    table = torch.randn(vocab, dim, device="cuda", dtype=BF16)
    weight = torch.rand(dim, device="cuda", dtype=BF16) + 0.5
    frequencies = 1.0 / 1e4 ** (torch.arange(dim // 2, device="cuda") / (dim // 2))
    pages = torch.randint(1000, (101, 300), device="cuda")
    scores, ones = torch.randn(vocab, vocab, device="cuda"), torch.ones(vocab, device="cuda")
    heat = (torch.rand(101, dtype=torch.float64, device="cuda") - 0.5).clamp(min=0)  # half greedy
    seeds = torch.randint(-(2**63), 2**63 - 1, (101,), device="cuda")
    everyone = torch.arange(rows, device="cuda")
    first = torch.randint(2000, (3, 101), device="cuda")
    first[:, 100] = 0
    state = first.clone()

    def step() -> list[torch.Tensor]:
        last, computed, generated = state
        ids, positions, places, tables = decode_inputs(slots, last, computed, pages, 64)
        cos, sin = angles(positions, frequencies, 1.0)
        normed, states = embed_rms_norm(ids, table, weight, 1e-5)
        logits = embed_rms_norm(ids, scores, ones, 1e-5)[1]
        drawn = choose(logits, slots, heat, seeds, generated, everyone)
        chosen = advance(slots, live, *drawn, last, computed, generated)
        return [ids, positions, places, tables, cos, sin, normed, states, chosen]

    step()
    state.copy_(first)
    want = [[one.clone() for one in plain(step)[:6]] for _ in range(6)]
    end = state.clone()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = [step() for _ in range(6)]
    for _ in range(100):
        state.copy_(first)
        graph.replay()
        assert torch.equal(state, end)
        for a, b in zip(found, want, strict=True):
            assert all(torch.equal(x, y) for x, y in zip(a[:6], b, strict=True))
