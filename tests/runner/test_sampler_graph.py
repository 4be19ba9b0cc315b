"""What a graph chooses is what the sampler would choose, and is chosen again where it is not."""

from __future__ import annotations

import torch
from torch import Tensor

from baton.core.sampling import SamplingParams
from baton.core.step import Admit
from baton.runner.sampler import Sampler
from baton.runner.slots import Slots

VOCAB = 50


def sampler(*params: SamplingParams) -> Sampler:
    made = Sampler(8, VOCAB, torch.device("cpu"))
    for slot, sampling in enumerate(params):
        made.admit(
            Admit(
                slot,
                sampling,
                seed=slot + 5,
                num_prompt=3,
                num_output=0,
                tokens=[1, 2, 3],
                stop_ids=[],
            )
        )
    return made


def counted(made: Sampler, logits: Tensor, slots: Tensor, live: Tensor) -> Tensor:
    """Chosen and counted, as at the end of a graph."""
    state = Slots(8, 1, 1, made.device, debug=False)
    return state.advance(slots, live, made.choose(logits, slots), made.generated)


def test_choose_then_take_equals_sample() -> None:
    params = [SamplingParams(temperature=t) for t in (0.0, 1.0, 0.5)]
    ours, theirs = sampler(*params), sampler(*params)
    for step in range(5):
        logits = torch.randn(4, VOCAB, generator=torch.Generator().manual_seed(step))
        slots = torch.tensor([0, 1, 2, 8])  # the last one pads the batch
        chosen = counted(ours, logits, slots, torch.tensor([1, 1, 1, 0]))
        taken = ours.take(chosen, [0, 1, 2])
        assert taken is not None
        want = theirs.sample(logits[:3], [0, 1, 2])
        assert [r.token for r in taken.to_host()] == [r.token for r in want.to_host()]
        assert torch.equal(ours.generated[:3], theirs.generated[:3])
    assert ours.generated[8] == 0


def test_a_row_that_asks_for_more_is_chosen_again() -> None:
    params = [SamplingParams(temperature=1.0), SamplingParams(temperature=1.0, top_k=2)]
    ours, theirs = sampler(*params), sampler(*params)
    for step in range(5):
        logits = torch.randn(2, VOCAB, generator=torch.Generator().manual_seed(step))
        chosen = counted(ours, logits, torch.tensor([0, 1]), torch.tensor([1, 1]))
        assert ours.take(chosen, [0, 1]) is None
        again = ours.sample(logits, [0, 1], counted=True)
        assert torch.equal(again.tokens, theirs.sample(logits, [0, 1]).tokens)
        assert torch.equal(ours.generated, theirs.generated)


def test_unusable_logits_are_told() -> None:
    ours = sampler(SamplingParams(temperature=0.0), SamplingParams(temperature=1.0))
    logits = torch.zeros(2, VOCAB)
    logits[1, 3] = float("nan")
    taken = ours.take(counted(ours, logits, torch.tensor([0, 1]), torch.tensor([1, 1])), [0, 1])
    assert taken is not None
    good, bad = taken.to_host()
    assert good.error is None
    assert bad.error is not None
    assert int(taken.tokens[1]) == 0
