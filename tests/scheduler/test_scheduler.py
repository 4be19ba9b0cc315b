"""What the scheduler promises: fairness between lengths, stop rules, refusals, preemption."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from baton.core.errors import QueueFull, RequestError
from baton.core.request import FinishReason, Request
from baton.core.sampling import SamplingParams
from baton.core.step import StepPlan
from baton.scheduler.queue import lane_of
from baton.scheduler.scheduler import RowOwner, Scheduler
from helpers.scheduling import answer, ask, finish, make, step


def test_one_request_from_prompt_to_end() -> None:
    scheduler = make()
    scheduler.add(ask("a"))
    plan, outputs = step(scheduler)
    assert (plan.step, plan.release, len(plan.admit)) == (0, [], 1)
    row = plan.rows[0]
    assert (row.start, row.length, row.pages, row.sample) == (0, 10, [0], True)
    assert outputs[0].token_ids == [5]
    plan, outputs = step(scheduler)
    assert (plan.rows[0].start, plan.rows[0].tokens, plan.rows[0].pages) == (10, b"", [])
    last = finish(scheduler)[-1]
    assert last.finish_reason is FinishReason.LENGTH
    assert last.timing is not None
    assert last.timing.scheduled < last.timing.first_token < last.timing.finished
    stats = scheduler.stats()
    assert (stats.prompt_tokens, stats.generation_tokens, stats.computed_tokens) == (10, 4, 13)
    assert (stats.finished, stats.kv_pages_used, stats.steps) == (1, 0, 4)
    scheduler.add(ask("b"))
    assert step(scheduler)[0].release == [0]


def test_plan_runs_one_step_ahead_with_counts_only() -> None:
    scheduler = make()
    scheduler.add(ask("a", sampling={"max_tokens": 2}))
    first, second = scheduler.plan(), scheduler.plan()
    assert first is not None
    assert second is not None
    assert second.rows[0].tokens == b""
    assert scheduler.rows(1) == [RowOwner("a", 10, 1, -1)]
    scheduler.commit(answer(first))
    assert scheduler.plan() is None, "both tokens are on their way"
    assert scheduler.commit(answer(second))[0].finish_reason is FinishReason.LENGTH
    with pytest.raises(KeyError):
        scheduler.rows(1)


def test_a_row_in_flight_keeps_slot_and_pages() -> None:
    scheduler = make()
    scheduler.add(ask("a", sampling={"max_tokens": 9, "stop_token_ids": [5]}))
    first, second = scheduler.plan(), scheduler.plan()
    assert first is not None
    assert second is not None
    assert scheduler.commit(answer(first))[0].finish_reason is FinishReason.STOP
    scheduler.check()
    assert scheduler.stats().kv_pages_used == 1
    assert scheduler.has_work()
    assert scheduler.commit(answer(second)) == []
    assert scheduler.stats().kv_pages_used == 0
    assert not scheduler.has_work()


@pytest.mark.parametrize(
    "sampling, token, count, reason, stop",
    [
        ({}, 0, 1, FinishReason.STOP, None),
        ({"ignore_eos": True}, 0, 4, FinishReason.LENGTH, None),
        ({"ignore_eos": True, "stop_token_ids": [0]}, 0, 1, FinishReason.STOP, 0),
        ({"stop_token_ids": [7]}, 7, 1, FinishReason.STOP, 7),
        ({"stop_token_ids": [7], "min_tokens": 3}, 7, 3, FinishReason.STOP, 7),
        ({"max_tokens": None}, 5, 22, FinishReason.LENGTH, None),
    ],
)
def test_stop_rules(
    sampling: dict[str, Any], token: int, count: int, reason: FinishReason, stop: int | None
) -> None:
    scheduler = make(max_model_len=32)
    scheduler.add(ask("a", sampling=sampling))
    outputs = finish(scheduler, token)
    assert sum(len(out.token_ids) for out in outputs) == count
    assert (outputs[-1].finish_reason, outputs[-1].stop_reason) == (reason, stop)


def test_admit_tells_the_sampler_what_it_needs() -> None:
    scheduler = make()
    scheduler.add(ask("a", sampling={"seed": 7}))
    scheduler.add(ask("b", sampling={"min_tokens": 2, "stop_token_ids": [9]}))
    scheduler.add(ask("c", sampling={"presence_penalty": 1.0}))
    plan, _ = step(scheduler)
    a, b, c = plan.admit
    assert a.seed == 7
    assert b.seed != c.seed
    assert (a.stop_ids, b.stop_ids) == ([], [0, 9])
    assert (a.tokens, c.tokens, c.num_prompt) == ([], ask("c").prompt, 10)
    again = make()
    for name in "abc":
        again.add(ask(name))
    assert [admit.seed for admit in step(again)[0].admit][1:] == [b.seed, c.seed]


def test_refusals_name_the_parameter() -> None:
    scheduler = make(num_pages=4, max_model_len=200)
    for request, param in (
        (ask("a", 0), "prompt"),
        (ask("a", 200), "prompt"),
        (ask("a", 65), "prompt"),
        (ask("a", 60, sampling={"max_tokens": 6}), "max_tokens"),
        (Request(request_id="a", prompt=[97], sampling=SamplingParams()), "prompt"),
        (Request(request_id="a", prompt=[-1], sampling=SamplingParams()), "prompt"),
    ):
        with pytest.raises(RequestError) as error:
            scheduler.add(request)
        assert error.value.param == param
    scheduler.add(ask("a", 60, sampling={"max_tokens": 5}))
    with pytest.raises(RequestError, match="in use"):
        scheduler.add(ask("a"))
    assert scheduler.stats().rejected == 7
    assert len(finish(scheduler)) == 5


@pytest.mark.parametrize("place", [0, 255, 256, 300, 319])
def test_a_wrong_id_is_found_behind_a_prefix_that_was_looked_at(place: int) -> None:
    """Neither the prompt before, whose prefix it shares, nor its own refusal vouches for it."""
    scheduler = make(page_size=4, num_pages=200, max_num_batched_tokens=512, max_model_len=512)
    good = ask("good", 320)
    wrong = ask("wrong", 320)
    wrong.prompt[place] = 10**6
    scheduler.add(good)
    for _ in range(2):
        with pytest.raises(RequestError, match="token id 1000000 is outside the vocabulary"):
            scheduler.add(wrong)
    scheduler.add(ask("again", 320))
    assert {output.finish_reason for output in finish(scheduler)} >= {FinishReason.LENGTH}


@pytest.mark.parametrize("wrong", [-1, 97, 2**31, 2**32, -(2**63), 2**63, 2**64, -(2**70)])
def test_an_id_outside_the_vocabulary_is_named(wrong: int) -> None:
    scheduler = make()
    request = ask("a", 10)
    request.prompt[3] = wrong
    vocab = scheduler._config.model.vocab_size
    with pytest.raises(
        RequestError, match=f"token id {wrong} is outside the vocabulary of {vocab}"
    ):
        scheduler.add(request)
    assert not scheduler.has_work()
    request.prompt[3:5] = [0, vocab - 1]
    scheduler.add(request)
    plan = scheduler.plan()
    assert plan is not None
    assert plan.rows[0].ids.tolist() == request.prompt


def test_queue_limits_count_uncached_tokens() -> None:
    scheduler = make(max_num_queued_reqs=2, max_num_queued_tokens=50)
    scheduler.add(ask("long", 100))
    with pytest.raises(QueueFull) as error:
        scheduler.add(ask("b", 10))
    assert error.value.retry_after >= 1.0
    finish(scheduler)
    scheduler.add(ask("again", 100))
    scheduler.add(ask("once more", 100))
    with pytest.raises(QueueFull, match="at most 2"):
        scheduler.add(ask("c", 1))
    assert finish(scheduler)[0].cached_tokens == 96


def test_answers_to_one_prompt_find_room_together() -> None:
    scheduler = make(max_num_queued_reqs=4, max_num_queued_tokens=50)
    with pytest.raises(RequestError, match="n=5 answers can never be queued") as never:
        scheduler.add(ask("n"), room=5)
    assert never.value.param == "n"
    scheduler.add(ask("a", 30), room=2)
    scheduler.add(ask("a#1", 30), room=0)
    with pytest.raises(QueueFull, match="2 requests are waiting, at most 4"):
        scheduler.add(ask("b", 1), room=3)
    assert {out.request_id for out in finish(scheduler)} == {"a", "a#1"}


def test_a_row_error_fails_one_request() -> None:
    scheduler = make()
    scheduler.add(ask("a"))
    scheduler.add(ask("b", first=40))
    plan = scheduler.plan()
    assert plan is not None
    result = answer(plan)
    result.rows[0].error = "not finite"
    outputs = scheduler.commit(result)
    scheduler.check()
    assert (outputs[0].finish_reason, outputs[0].error) == (FinishReason.ERROR, "not finite")
    assert [out.request_id for out in finish(scheduler)] == ["b"] * 3
    assert scheduler.stats().failed == 1


def test_score_and_prompt_logprobs_compute_every_position() -> None:
    scheduler = make(max_num_batched_tokens=32)
    scheduler.add(ask("warm", 60))
    finish(scheduler)
    scheduler.add(ask("s", 60, score=0))
    scheduler.add(ask("p", 60, sampling={"prompt_logprobs": 1, "max_tokens": 1}))
    seen: dict[str, list[tuple[int, int, int]]] = {"s": [], "p": []}
    while (plan := scheduler.plan()) is not None:
        for row, owner in zip(plan.rows, scheduler.rows(plan.step), strict=True):
            seen[owner.request_id].append((row.start, row.length, row.next_token))
            assert (row.score == 0) == (owner.request_id == "s")
            assert row.prompt_logprobs == (1 if owner.request_id == "p" else -1)
        scheduler.commit(answer(plan))
    prompt = ask("s", 60).prompt
    for rows in seen.values():
        assert rows[0][0] == 0
        assert sum(length for _, length, _ in rows) == 60
        following = [
            prompt[start + length] if start + length < 60 else -1 for start, length, _ in rows
        ]
        assert [token for _, _, token in rows] == following


def test_preemption_takes_the_worst_priority_then_the_latest() -> None:
    scheduler = make(num_pages=6, prefix_caching=False)
    for name, priority in (("a", 0), ("worst", 5), ("c", 0)):
        scheduler.add(ask(name, 30, priority=priority, sampling={"max_tokens": 20}))
    preempted = []
    outputs = []
    while scheduler.has_work():
        before = set(scheduler._seats.running)
        outputs += step(scheduler)[1]
        preempted += [
            s.request.request_id
            for s in scheduler._queue
            if s.scheduled and s.request.request_id in before
        ]
        if preempted:
            break
    assert preempted[0] == "worst"
    outputs += finish(scheduler)
    counts = {name: sum(out.request_id == name for out in outputs) for name in ("a", "worst", "c")}
    assert counts == {"a": 20, "worst": 20, "c": 20}
    assert scheduler.stats().preemptions >= 1


def test_lower_priority_number_starts_first() -> None:
    scheduler = make(max_num_seqs=1)
    for name, priority in (("a", 1), ("b", 0), ("c", -1)):
        scheduler.add(ask(name, priority=priority))
    assert list(dict.fromkeys(out.request_id for out in finish(scheduler))) == ["c", "b", "a"]


def ahead(scheduler: Scheduler, turns: int) -> Iterator[StepPlan]:
    """Plans of an engine that always has one step in flight while it plans."""
    pending = scheduler.plan()
    assert pending is not None
    yield pending
    for _ in range(turns):
        plan = scheduler.plan()
        scheduler.check()
        scheduler.commit(answer(pending))
        scheduler.check()
        if plan is None:
            return
        yield plan
        pending = plan


def test_nobody_starts_while_a_running_request_lacks_a_page() -> None:
    scheduler = make(num_pages=5, max_num_seqs=4, prefix_caching=False)
    scheduler.add(ask("a", 30, sampling={"max_tokens": 30}))
    scheduler.add(ask("b", 30, sampling={"max_tokens": 30}))
    refused = 0
    for turn, plan in enumerate(ahead(scheduler, 60)):
        if turn == 0:
            scheduler.add(ask("small", 4, sampling={"max_tokens": 4}, priority=-5))
        draft = scheduler._in_flight[-1][1]
        refused += draft.starved
        assert not (draft.starved and plan.admit)
    assert refused > 0


def test_one_victim_is_preempted_when_its_pages_suffice() -> None:
    scheduler = make(num_pages=10, max_num_seqs=8, prefix_caching=False)
    for name in "abc":
        scheduler.add(ask(name, 30, sampling={"max_tokens": 30}))
    scheduler.add(ask("victim", 40, sampling={"max_tokens": 30}, priority=1))
    for _ in ahead(scheduler, 6):
        pass
    assert scheduler.stats().preemptions == 1
    assert [s.request.request_id for s in scheduler._queue] == ["victim"]


def test_a_prompt_starts_only_when_all_of_it_fits() -> None:
    scheduler = make(num_pages=100, max_model_len=1500, prefix_caching=False)
    scheduler.add(ask("first", 1200))
    step(scheduler)
    scheduler.add(ask("second", 700))
    while scheduler._seats.running.get("first"):
        assert step(scheduler)[0].admit == []
    assert len(step(scheduler)[0].admit) == 1


def test_a_request_that_changes_lane_is_not_found_in_the_old_one() -> None:
    scheduler = make(max_num_seqs=1)
    scheduler.add(ask("a", 100))
    lanes = scheduler._queue
    sequence = lanes.head(0)
    assert sequence is not None
    lanes.remove(sequence)
    lanes.push(sequence, 5000)
    assert (lanes.head(0), lanes.head(1), len(lanes), lanes.tokens) == (None, sequence, 1, 5000)
    lanes.check()


def test_a_page_is_shared_only_after_its_step_committed() -> None:
    scheduler = make(max_num_batched_tokens=32)
    scheduler.add(ask("a", 100))
    first, second = scheduler.plan(), scheduler.plan()
    assert first is not None
    assert second is not None
    again = scheduler.kv.open()
    assert len(scheduler.kv.match(again, ask("a", 100).prompt).pages) == 0
    scheduler.commit(answer(first))
    assert len(scheduler.kv.match(again, ask("a", 100).prompt).pages) == 2


def test_abort_anywhere() -> None:
    scheduler = make(max_num_seqs=1)
    scheduler.add(ask("running"))
    scheduler.add(ask("waiting"))
    plan = scheduler.plan()
    assert plan is not None
    for name in ("waiting", "running", "unknown", "running"):
        scheduler.abort(name)
        scheduler.check()
    assert scheduler.commit(answer(plan)) == []
    assert not scheduler.has_work()
    assert scheduler.stats().aborted == 2


def test_lanes_by_length() -> None:
    assert [lane_of(n) for n in (1, 1023, 1024, 8192, 65535, 65536, 10**6)] == [0, 0, 1, 2, 2, 3, 3]
