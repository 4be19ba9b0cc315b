"""Calls of several threads on one LLM, and calls inside calls: none waits in vain for another."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any

import pytest
import torch

from baton import LLM, SamplingParams
from baton.core.errors import RequestError, RequestFailed, Unavailable
from baton.core.request import FinishReason, TokenOutput
from baton.engine.threads import in_daemon

OPTIONS: dict[str, Any] = {
    "dtype": "float32",
    "max_model_len": 600,
    "num_kv_pages": 256,
    "threads": 1,
    "skip_tokenizer_init": True,
}
Where = Callable[[Callable[[], Any]], Any]


def asking(tokens: int) -> SamplingParams:
    return SamplingParams(max_tokens=tokens, temperature=0, ignore_eos=True)


def ids(llm: LLM, prompt: list[int], tokens: int) -> list[int]:
    return llm.generate([prompt], asking(tokens))[0].completions[0].token_ids


@pytest.fixture
def llm(tiny: Callable[[str], str]) -> Iterator[LLM]:
    with LLM(tiny("llama"), **OPTIONS) as made:
        yield made


def here(work: Callable[[], Any]) -> Any:
    return work()


def elsewhere(work: Callable[[], Any]) -> Any:
    """In another thread, which the caller waits for."""
    return in_daemon(work).result(60)


def during(llm: LLM, work: Callable[[], Any]) -> list[list[int]]:
    """Two answers, `work` done when the first of them has come. In a thread of its own, which a
    deadlock would keep for ever."""

    def progress(finished: int, total: int) -> None:
        heard.append((finished, total))
        if finished == 1:
            work()

    heard: list[tuple[int, int]] = []
    call = in_daemon(
        lambda: llm.generate([[5, 6], [7, 8]], [asking(3), asking(60)], progress=progress)
    )
    found = [one.completions[0].token_ids for one in call.result(60)]
    assert heard == [(1, 2), (2, 2)]
    return found


@pytest.mark.parametrize("where", [here, elsewhere])
def test_a_call_inside_a_call_is_served(llm: LLM, where: Where) -> None:
    alone = [ids(llm, [5, 6], 3), ids(llm, [7, 8], 60)]
    expected, scores = ids(llm, [9], 20), llm.score([5, 6, 7])
    found: list[Any] = []
    assert during(llm, lambda: found.append(where(lambda: ids(llm, [9], 20)))) == alone
    assert during(llm, lambda: found.append(where(lambda: llm.score([5, 6, 7])))) == alone
    assert found[0] == expected
    assert torch.allclose(found[1], scores, atol=1e-5)
    assert not llm.core.has_work()
    assert llm.stats().kv_pages_used == 0


@pytest.mark.parametrize("where", [here, elsewhere])
def test_an_llm_closed_inside_a_call_ends_the_call(llm: LLM, where: Where) -> None:
    with pytest.raises(Unavailable, match="closed"):
        during(llm, lambda: where(llm.close))


def test_a_call_goes_on_while_another_one_is_waited_for(llm: LLM) -> None:
    steps: list[int] = []

    def other() -> None:
        elsewhere(lambda: ids(llm, [9], 200))
        steps.append(llm.stats().steps)

    during(llm, other)
    assert llm.stats().steps == steps[0], "its 60 tokens came beside the other's 200"


def test_who_waits_is_next(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls come while a step of a long one runs, which would have the next turn, too, and the one
    after it, if that went to whoever is quickest."""
    step, add, events, calls = llm.core.step, llm.core.add, list[str](), list[Future[list[int]]]()

    def slow() -> list[TokenOutput]:
        events.append("step")
        if len(events) in (20, 40, 60, 80, 100):
            calls.append(in_daemon(lambda: ids(llm, [9], 1)))
            time.sleep(0.3)  # until it waits for its turn
        return step()

    def note(*args: Any, **more: Any) -> None:
        events.append("add")
        add(*args, **more)

    monkeypatch.setattr(llm.core, "step", slow)
    monkeypatch.setattr(llm.core, "add", note)
    ids(llm, [5], 200)
    assert all(len(call.result(60)) == 1 for call in calls)
    late = [events.index("add", at) - at for at in (20, 40, 60, 80, 100)]
    assert late == [0] * 5, f"steps before the call that waited was let in: {late}"


def test_a_request_that_fails_fails_its_own_call(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    expected, found = ids(llm, [9], 20), list[list[int]]()
    step = llm.core.step

    def failing() -> list[TokenOutput]:
        outputs = step()
        for out in outputs:
            if out.request_id == waiting:
                out.finish_reason, out.error = FinishReason.ERROR, "broken on purpose"
        return outputs

    def other() -> None:
        monkeypatch.setattr(llm.core, "step", failing)
        found.append(elsewhere(lambda: ids(llm, [9], 20)))

    waiting = "r2"  # r0 was asked for `expected`, r1 is the first of the two
    with pytest.raises(RequestFailed, match="on purpose"):
        during(llm, other)
    assert found == [expected]
    assert not llm.core.has_work()
    assert llm.stats().kv_pages_used == 0


def test_a_step_that_fails_fails_all_calls_and_the_next_one_is_served(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected, commit = ids(llm, [9], 20), llm.core.scheduler.commit

    def failing(result: Any) -> Any:
        monkeypatch.undo()
        commit(result)
        raise ValueError("broken on purpose")

    def other() -> None:
        monkeypatch.setattr(llm.core.scheduler, "commit", failing)
        with pytest.raises(ValueError, match="on purpose"):
            elsewhere(lambda: ids(llm, [9], 20))

    with pytest.raises(ValueError, match="on purpose"):
        during(llm, other)
    assert ids(llm, [9], 20) == expected
    assert llm.stats().kv_pages_used == 0


@pytest.mark.parametrize("part", ["collect", "launch"])
def test_a_step_that_fails_halfway_ends_an_llm_that_cannot_go_on(
    llm: LLM, part: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Scheduler and core disagree then about what is in flight: the caller gets the error, and
    nobody waits for what never comes."""

    def failing(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError("broken on purpose")

    closed: list[bool] = []
    close = llm.core.close
    monkeypatch.setattr(llm.core, "close", lambda: closed.append(True) or close())
    monkeypatch.setattr(llm.core.executor, part, failing)
    call = in_daemon(lambda: ids(llm, [9], 20))
    with pytest.raises(AssertionError, match="on purpose"):
        call.result(60)
    with pytest.raises((AssertionError, Unavailable)):
        in_daemon(lambda: ids(llm, [9], 2)).result(60)
    in_daemon(llm.close).result(60)
    assert closed == [True]


@pytest.mark.parametrize("work", ["close", "generate"])
def test_a_call_in_the_middle_of_a_step_is_refused(
    llm: LLM, work: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a signal handler makes it: its own thread holds the core."""
    expected, step, heard = ids(llm, [9], 3), llm.core.step, list[str]()

    def interrupted() -> list[TokenOutput]:
        try:
            llm.close() if work == "close" else ids(llm, [5], 1)
        except RequestError as error:
            heard.append(str(error))
        return step()

    monkeypatch.setattr(llm.core, "step", interrupted)
    assert in_daemon(lambda: ids(llm, [9], 3)).result(60) == expected
    assert heard
    assert "in the middle of one of its own steps" in heard[0]


def test_scores_that_nobody_waits_for_are_dropped(llm: LLM) -> None:
    llm.core.scores["given up"] = []
    kept: list[int] = []
    with llm.watched(lambda outputs: kept.append(len(llm.core.scores))):
        ids(llm, [9], 3)
    assert kept
    assert not any(kept)


def test_of_several_that_watch_the_innermost_hears(llm: LLM) -> None:
    outer: list[int] = []
    inner: list[int] = []
    with llm.watched(lambda outputs: outer.append(len(outputs))):
        with llm.watched(lambda outputs: inner.append(len(outputs))):
            ids(llm, [9], 3)
        assert sum(inner) == 3
        assert outer == []
        ids(llm, [9], 3)
    assert sum(outer) == 3


def test_a_call_that_is_given_up_leaves_the_others_alone(llm: LLM) -> None:
    alone, scores = [ids(llm, [5, 6], 3), ids(llm, [7, 8], 60)], llm.score([5] * 40)

    def give_up(finished: int, total: int) -> None:
        raise InterruptedError("enough")

    def other() -> None:
        with pytest.raises(InterruptedError):
            llm.generate([[9], [10]], [asking(1), asking(400)], progress=give_up)

    assert during(llm, other) == alone
    assert torch.allclose(llm.score([5] * 40), scores, atol=1e-5)
    assert llm.core.scores == {}
    assert llm.stats().kv_pages_used == 0


def test_an_interrupt_ends_a_call_inside_a_call(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    launch, launched, inside = llm.core.executor.launch, 0, False

    def interrupted(plan: Any) -> Any:
        nonlocal launched
        launched += inside
        if inside and launched == 5:
            signal.raise_signal(signal.SIGINT)
        return launch(plan)

    def progress(finished: int, total: int) -> None:
        nonlocal inside
        inside = True
        ids(llm, [9], 500)

    monkeypatch.setattr(llm.core.executor, "launch", interrupted)
    try:
        with pytest.raises(KeyboardInterrupt):
            llm.generate([[5], [6]], [asking(1), asking(500)], progress=progress)
        assert launched < 12
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
        assert not llm.core.has_work()
    finally:
        signal.signal(signal.SIGINT, before)
