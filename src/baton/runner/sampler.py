"""The sampler: per-slot sampling state on the device, and one token per sampled row.

Parameters are written when a request takes a slot and never read back. What the host must know to
choose the work (which rows are greedy, penalised, biased...) it knows from `SamplingParams`; that
knowledge is laid out once per set of rows (`_Batch`) and reused while the same rows decode on.
Only `Sampled.to_host` waits for the device, and only for copies that `sample` itself started.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from baton.core.sampling import SamplingParams
from baton.core.step import Admit
from baton.ops import sample as ops
from baton.ops.host import staging, upload, upload_together
from baton.runner.sampled import Sampled
from baton.runner.token_counts import TokenCounts

#: Columns of the per-slot parameter tables.
_TEMPERATURE, _TOP_P, _LOG_MIN_P, _REPETITION, _PRESENCE, _FREQUENCY = range(6)
_SEED, _TOP_K, _MIN_TOKENS = range(3)


@dataclass(frozen=True)
class _Slot:
    """What the host remembers of the request in a slot."""

    sampling: SamplingParams
    held_ids: list[int]
    bias: dict[int, float]


@dataclass(frozen=True)
class _Pairs:
    """(row, token) pairs of a batch with a value each; device tensors `[P]`."""

    rows: Tensor
    ids: Tensor
    values: Tensor


@dataclass(frozen=True)
class _Batch:
    """How to sample one tuple of slots. Index tensors int64 on the device; None: no such row."""

    slots: Tensor
    held: _Pairs | None  # values: the slot whose min_tokens counts
    bias: _Pairs | None
    penalised: Tensor | None
    penalty_rows: Tensor | None  # the rows of TokenCounts
    random: Tensor | None
    all_random: bool
    floats: Tensor  # parameters of the random rows, float64
    ints: Tensor  # and int64
    min_p: bool
    widest_k: int
    nucleus: bool
    open_nucleus: bool
    logprobs: Tensor | None
    logprob_rows: list[int]
    logprob_k: list[int]

    @property
    def adjusted(self) -> bool:
        """True when any row's logits change before the choice."""
        return any(part is not None for part in (self.held, self.bias, self.penalised))

    @property
    def plain(self) -> bool:
        """True when no row asks for more than a temperature."""
        return not (self.adjusted or self.min_p or self.widest_k or self.nucleus)


class Sampler:
    """Chooses tokens for slots. A row's token depends only on its logits, parameters, seed and
    number of tokens generated before, so it is the same in any batch, after preemption, and on
    every rank.

    `choose` is the device's part for rows that ask for no more than a temperature, fit for a CUDA
    graph: what it chose is taken (`take`) or, if a row asks for more, chosen again (`sample`). Slot
    `num_slots` is nobody's and pads batches.

    `generated`: int64 [num_slots + 1], each slot's tokens before the one that is chosen next.

    Penalty state takes 5 bytes per vocabulary entry, for slots that use penalties only.
    """

    def __init__(self, num_slots: int, vocab_size: int, device: torch.device) -> None:
        self.vocab_size = vocab_size
        self.device = device
        # One table, so that one copy writes a row: 6 columns hold the bits of float64.
        self._table = torch.zeros(num_slots + 1, 6 + 3, dtype=torch.int64, device=device)
        self._floats, self._ints = self._table[:, :6].view(torch.float64), self._table[:, 6:]
        self.generated = torch.zeros(num_slots + 1, dtype=torch.int64, device=device)
        self._arange = torch.arange(num_slots + 1, device=device)
        self._ones = torch.ones_like(self._arange)
        self._counts = TokenCounts(vocab_size, device)
        self._slots: dict[int, _Slot] = {}
        self._last: tuple[tuple[int, ...], _Batch] | None = None

    def admit(self, admit: Admit) -> None:
        """Take the parameters and token counts of the request that now has `admit.slot`."""
        slot, params = admit.slot, admit.sampling
        self.release(slot)
        seed = (admit.seed + 2**63) % 2**64 - 2**63
        log_min_p = math.log(params.min_p) if params.min_p > 0 else -math.inf
        floats = [params.temperature, params.top_p, log_min_p]
        floats += [
            params.repetition_penalty,
            params.presence_penalty,
            params.frequency_penalty,
        ]
        ints = [seed, self._top_k(params), params.min_tokens]
        host = staging(6 + 3, self.device, torch.int64)
        row = host.numpy()
        row[:6].view(np.float64)[:], row[6:] = floats, ints
        self._table[slot].copy_(host, non_blocking=True)
        self.generated[slot].fill_(admit.num_output)
        if params.penalised:
            self._counts.admit(slot, admit.tokens, admit.num_prompt)
        waits = params.min_tokens > admit.num_output
        self._slots[slot] = _Slot(
            params, admit.stop_ids if waits else [], dict(params.logit_bias or {})
        )

    def release(self, slot: int) -> None:
        """Forget the request in `slot`; a slot that is free already is left alone."""
        self._slots.pop(slot, None)
        self._counts.release(slot)
        self._last = None

    def choose(self, logits: Tensor, slots: Tensor) -> tuple[Tensor, Tensor]:
        """Tokens int64 `[S]`, and which rows' logits are unusable, bool `[S]`, of float32 `logits`
        `[S, vocab]` by temperature and seed alone. To be counted in `generated` by the caller.
        Device tensors only."""
        rows = self._arange[: logits.shape[0]]
        temperatures, seeds = self._floats[:, _TEMPERATURE], self._ints[:, _SEED]
        return ops.choose(logits, slots, temperatures, seeds, self.generated, rows)

    def take(self, chosen: Tensor, slots: list[int]) -> Sampled | None:
        """What `choose` chose for `slots`, tokens and whether their logits are unusable in the
        first columns of int64 `[2, S or more]`, counted; None if a row asks for more."""
        batch = self._batch(slots)
        if not batch.plain or batch.logprobs is not None:
            return None
        return self._sampled(chosen, None, batch)

    def device_slots(self, slots: list[int]) -> Tensor:
        """`slots` as int64 on the device, made once while the same rows go on."""
        return self._batch(slots).slots

    def sample(self, logits: Tensor, slots: list[int], *, counted: bool = False) -> Sampled:
        """Choose one token per row of float32 `logits` `[S, vocab]`, rows belonging to distinct
        admitted `slots`, and count it as generated, unless it is `counted` already. `logits` is
        left as it is.

        Raises ValueError when the shape or dtype is another.
        """
        if logits.shape != (len(slots), self.vocab_size) or logits.dtype != torch.float32:
            raise ValueError(
                f"logits must be float32 [{len(slots)}, {self.vocab_size}], "
                f"got {logits.dtype} {list(logits.shape)}"
            )
        batch = self._batch(slots)
        if counted:
            self._count(batch.slots, -1)
        if batch.plain:
            temperatures, seeds = self._floats[:, _TEMPERATURE], self._ints[:, _SEED]
            tokens, bad = ops.choose(
                logits, batch.slots, temperatures, seeds, self.generated, batch.random
            )
        else:
            tokens, bad = self._choose(logits, batch)
        self._count(batch.slots, 1)
        if batch.penalised is not None and batch.penalty_rows is not None:
            self._counts.add(batch.penalty_rows, tokens[batch.penalised])
        values = None
        if batch.logprobs is not None:
            rows = batch.logprobs
            values = ops.token_logprobs(logits[rows], tokens[rows], max(batch.logprob_k))
        return self._sampled(torch.stack([tokens, bad.to(torch.int64)]), values, batch)

    def _count(self, slots: Tensor, tokens: int) -> None:
        """So many more tokens generated in each of distinct `slots`."""
        self.generated.index_add_(0, slots, self._ones[: len(slots)], alpha=tokens)

    def _top_k(self, params: SamplingParams) -> int:
        return params.top_k if 0 < params.top_k < self.vocab_size else self.vocab_size

    def _adjust(self, logits: Tensor, batch: _Batch) -> Tensor:
        x = logits.clone()
        if batch.held is not None:
            slot = batch.held.values
            waiting = self.generated[slot] < self._ints[slot, _MIN_TOKENS]
            ops.hold_back(x, batch.held.rows, batch.held.ids, waiting)
        if batch.bias is not None:
            ops.add_bias(x, batch.bias.rows, batch.bias.ids, batch.bias.values)
        if batch.penalised is not None and batch.penalty_rows is not None:
            params = self._floats[batch.slots[batch.penalised]]
            x[batch.penalised] = ops.penalise(
                x[batch.penalised],
                *self._counts.read(batch.penalty_rows),
                repetition=params[:, _REPETITION],
                presence=params[:, _PRESENCE],
                frequency=params[:, _FREQUENCY],
            )
        return x

    def _choose(self, logits: Tensor, batch: _Batch) -> tuple[Tensor, Tensor]:
        """Tokens int64 `[S]` and which rows have unusable logits, bool `[S]`; their tokens are
        0."""
        x = self._adjust(logits, batch) if batch.adjusted else logits
        maximum = x.amax(1)
        bad = maximum.isfinite().logical_not_()
        if batch.adjusted:  # a mask may have hidden what was wrong
            bad |= logits.amax(1).isfinite().logical_not_()
        if batch.random is None:
            tokens = ops.argmax(x)
        elif batch.all_random:
            tokens = self._draw(x, maximum, batch.slots, batch)
        else:
            tokens, rows = ops.argmax(x), batch.random
            tokens[rows] = self._draw(x[rows], maximum[rows], batch.slots[rows], batch)
        return tokens.masked_fill_(bad, 0), bad

    def _draw(self, x: Tensor, maximum: Tensor, slots: Tensor, batch: _Batch) -> Tensor:
        """Draw for the random rows; all tensor arguments hold those rows only."""
        floats, ints = batch.floats, batch.ints
        keys = ops.row_keys(ints[:, _SEED], self.generated[slots])
        x = ops.temper(x, maximum, floats[:, _TEMPERATURE])
        if batch.min_p:
            ops.filter_min_p(x, floats[:, _LOG_MIN_P])
        if batch.widest_k > 0 or batch.nucleus:
            top_k, top_p = ints[:, _TOP_K], floats[:, _TOP_P]
            ops.filter_top(x, top_k, top_p, batch.widest_k, batch.nucleus, batch.open_nucleus)
        return ops.draw(x, keys)

    def _sampled(self, chosen: Tensor, values: ops.TokenLogprobs | None, batch: _Batch) -> Sampled:
        """Start the copies to the host; on CPU they are the tensors themselves."""
        count, host = len(batch.slots), chosen.to("cpu", non_blocking=True)
        if values is not None:
            values = ops.TokenLogprobs(*(part.to("cpu", non_blocking=True) for part in values))
        cuda = self.device.type == "cuda"
        ready = torch.cuda.current_stream(self.device).record_event() if cuda else None
        return Sampled(
            chosen[0, :count], host[:, :count], values, batch.logprob_rows, batch.logprob_k, ready
        )

    def _batch(self, slots: list[int]) -> _Batch:
        key = tuple(slots)
        if self._last is None or self._last[0] != key:
            self._last = (key, self._lay_out(slots))
        return self._last[1]

    def _lay_out(self, slots: list[int]) -> _Batch:
        states = [self._slots[slot] for slot in slots]
        params = [state.sampling for state in states]
        held = [(i, t, slots[i]) for i, s in enumerate(states) for t in s.held_ids]
        bias = [(i, t, v) for i, s in enumerate(states) for t, v in s.bias.items()]
        random = [i for i, p in enumerate(params) if not p.greedy]
        drawn = [(params[i], self._top_k(params[i])) for i in random]
        penalised = [i for i, p in enumerate(params) if p.penalised]
        scored = [i for i, p in enumerate(params) if p.logprobs is not None]
        counted = [self._counts.row(slots[i]) for i in penalised]
        random_slots = [slots[i] for i in random]
        lists = slots, random_slots, random, penalised, counted, scored
        all_slots, drawn_slots, *others = upload_together(lists, self.device)
        rows, penalised_rows, penalty_rows, logprobs = (x if len(x) else None for x in others)
        return _Batch(
            slots=all_slots,
            held=self._pairs(held, torch.int64),
            bias=self._pairs(bias, torch.float32),
            penalised=penalised_rows,
            penalty_rows=penalty_rows,
            random=rows,
            all_random=len(random) == len(slots),
            floats=self._floats[drawn_slots],
            ints=self._ints[drawn_slots],
            min_p=any(p.min_p > 0 for p, _ in drawn),
            widest_k=max((k for _, k in drawn if k < self.vocab_size), default=0),
            nucleus=any(p.top_p < 1 for p, _ in drawn),
            open_nucleus=any(p.top_p < 1 and k == self.vocab_size for p, k in drawn),
            logprobs=logprobs,
            logprob_rows=scored,
            logprob_k=[k for p in params if (k := p.logprobs) is not None],
        )

    def _pairs(self, pairs: Sequence[tuple[int, int, float]], dtype: torch.dtype) -> _Pairs | None:
        if not pairs:
            return None
        rows, ids, values = zip(*pairs, strict=True)
        places = upload_together((rows, ids), self.device)
        return _Pairs(places[0], places[1], upload(values, self.device, dtype))
