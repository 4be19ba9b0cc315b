"""Comparing documents: intervals, divergence, gates, the page."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from rich.console import Console

from baton.core.errors import ConfigError
from baton.evals import gates, page, tables
from baton.evals.compare import compare, kl
from baton.evals.document import Answer, Document, Perplexity, load, save
from baton.evals.groups import bucket
from baton.evals.stats import design_effect, mcnemar, paired, queries_for, tango, wilson


def answer(task: str, context: int, hit: bool, logprobs: list[float], **more: Any) -> Answer:
    given = {"length": 1024, "distance": 100, "depth": 0.9, "note": ""} | more
    ids = [list(range(len(logprobs)))]
    return Answer(task=task, context=context, hit=hit, ids=ids, logprobs=[logprobs], **given)


def document(hits: list[bool], p: list[float], loss: float = 1.0) -> Document:
    logs = [math.log(x) for x in p]
    answers = [
        answer("single" if i % 2 else "chain", i // 4, hit, logs, depth=i % 8 / 8)
        for i, hit in enumerate(hits)
    ]
    texts = [Perplexity(text="prose", length=64, tokens=640, loss=loss)]
    return Document(
        subject={"name": "<b>model</b>"}, about={}, suite={"seed": 0}, digest="d", answers=answers,
        perplexity=texts,
    )  # fmt: skip


def test_tango_is_as_published() -> None:
    """Tango (1998), table 1: one of 44 pairs is discordant."""
    low, high = tango(1, 0, 44)
    assert (round(-high, 4), round(-low, 4)) == (-0.0594, 0.1181)


@pytest.mark.parametrize("n, lost, won", [(200, 0.02, 0.01), (60, 0.1, 0.05), (300, 0.3, 0.2)])
def test_intervals_hold_the_truth_as_often_as_they_say(n: int, lost: float, won: float) -> None:
    rng = np.random.default_rng(1)
    inside = 0
    for _ in range(1000):
        a, b, _ = rng.multinomial(n, [lost, won, 1 - lost - won])
        low, high = tango(a, b, n)
        inside += low <= won - lost <= high
    assert 0.925 <= inside / 1000 <= 0.98


def test_queries_of_a_context_count_less() -> None:
    """Whole contexts fail or do not: an interval for independent queries would be wrong."""
    rng, covered, naive = np.random.default_rng(2), 0, 0
    contexts = np.repeat(np.arange(60), 20).tolist()
    for _ in range(300):
        a = rng.random(1200) < 0.9
        fails = np.repeat(rng.random(60) < 0.1, 20)
        found = paired(a.tolist(), (a & ~fails).tolist(), contexts)
        covered += found.interval.low <= -0.09 <= found.interval.high
        low, high = tango(found.lost, found.won, found.n)
        naive += low <= -0.09 <= high
    assert covered / 300 > 0.9
    assert naive / 300 < 0.6
    assert design_effect(rng.random(1000), np.arange(1000) % 50) < 1.7


def test_other_figures_of_statistics() -> None:
    assert mcnemar(0, 0) == 1
    assert mcnemar(10, 0) == pytest.approx(2 / 1024)
    assert mcnemar(3000, 2000) < 1e-40
    low, high = wilson(95, 100)
    assert (round(low, 4), round(high, 4)) == (0.8882, 0.9785)
    assert wilson(0, 0) == (0, 1)
    # all discordant pairs on one side: a difference of d needs about z-squared / d of them
    assert queries_for(0.01, 0.01) == 783
    rng, seen, n = np.random.default_rng(3), 0, queries_for(0.05, 0.15)
    for _ in range(400):
        lost, won, _ = rng.multinomial(n, [0.10, 0.05, 0.85])
        seen += tango(lost, won, n).high < 0
    assert 0.74 < seen / 400 < 0.88, "a power of 80%"


def test_divergence_is_exact_for_what_is_known_and_never_too_large() -> None:
    rng = np.random.default_rng(0)
    for _ in range(50):
        p, q = rng.dirichlet(np.ones(30) * 0.3) + 1e-9, rng.dirichlet(np.ones(30) * 0.3) + 1e-9
        p, q = p / p.sum(), q / q.sum()
        truth = float((p * np.log(p / q)).sum())

        def top(x: Any, k: int) -> dict[int, float]:
            best = np.argsort(-x)[:k].tolist()
            return {i: math.log(x[i]) for i in best}

        assert kl(top(p, 30), top(q, 30)) == pytest.approx(truth, rel=1e-6)
        assert -1e-12 <= kl(top(p, 5), top(q, 5)) <= truth + 1e-9
        assert kl(top(p, 5), top(p, 5)) == pytest.approx(0, abs=1e-9)
        other = np.roll(q, 12)  # the likeliest tokens are others
        assert -1e-12 <= kl(top(p, 5), top(other, 5)) <= float((p * np.log(p / other)).sum()) + 1e-9
    assert kl({1: 0.0}, {2: 0.0}) > 10, "no token in common is no agreement"


def test_a_comparison_counts_pairs() -> None:
    a = document([True] * 32, [0.9, 0.1])
    b = document([i % 4 != 0 for i in range(32)], [0.6, 0.4], loss=1.01)
    found = compare(a, b)
    assert (found.all.paired.lost, found.all.paired.won, found.all.paired.n) == (8, 0, 32)
    assert {g.name: g.paired.lost for g in found.tasks} == {"chain": 8, "single": 0}
    expected = 0.9 * math.log(0.9 / 0.6) + 0.1 * math.log(0.1 / 0.4)
    assert found.all.kl is not None
    assert found.all.kl.mean == pytest.approx(expected)
    assert found.texts[0].change == pytest.approx(math.expm1(0.01))
    assert [bucket(d) for d in (1, 2, 3, 100, 128, 129)] == [1, 2, 4, 128, 128, 256]
    json.loads(msgspec.json.encode(found.as_dict()))


def test_other_queries_are_not_compared() -> None:
    a, b = document([True], [1.0]), document([True], [1.0])
    b.digest, b.suite = "e", {"seed": 1}
    with pytest.raises(ConfigError, match="seed is 0 and 1"):
        compare(a, b)


GATE = """
[all]
loss = 0.1
kl = 0.05
["task single"]
loss = 0.0
certain = true
[perplexity]
rise = 0.005
"""


def test_a_gate_says_what_exceeds_it_and_by_how_much(tmp_path: Path) -> None:
    file = tmp_path / "gate.toml"
    file.write_text(GATE)
    a = document([True] * 32, [0.9, 0.1])
    b = document([i % 4 != 0 for i in range(32)], [0.6, 0.4], loss=1.01)
    breaches = gates.check(compare(a, b), gates.read_gate(file))
    texts = [breach.text() for breach in breaches]
    assert [(one.where.split(" of ")[0], one.what) for one in breaches] == [
        ("all", "loss"), ("all", "kl"), ("task single", "certain"), ("perplexity", "rise")
    ]  # fmt: skip
    assert "falls by 25.00 points, 15.00 above the bound of 10.00" in texts[0]
    assert "perplexity rises by 1.01%, 0.51 above the bound of 0.50" in texts[3]
    same = gates.check(compare(a, a), {"all": {"loss": 0.0, "kl": 0.0}})
    assert same == []


@pytest.mark.parametrize(
    "text, names",
    [
        ("[all]\nlos = 1", "los"),
        ("[all]\nloss = -1", "from 0 on"),
        ("[all]\nloss = true", "from 0 on"),
        ("[all]\ncertain = true", "needs a loss"),
        ("[perplexity]\nloss = 1", "rise"),
        ("loss = 1", "table"),
        ("", "no bound"),
        ("[all", "gate.toml"),
    ],
)
def test_senseless_gates_are_refused(tmp_path: Path, text: str, names: str) -> None:
    file = tmp_path / "gate.toml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=names):
        gates.read_gate(file)


def test_a_bound_on_what_was_not_measured_is_an_error() -> None:
    a = document([True] * 8, [1.0])
    with pytest.raises(ConfigError, match="task nth"):
        gates.check(compare(a, a), {"task nth": {"loss": 0.1}})
    a.perplexity = []
    with pytest.raises(ConfigError, match="perplexity"):
        gates.check(compare(a, a), {"perplexity": {"rise": 0.1}})


def test_documents_come_back_from_files(tmp_path: Path) -> None:
    made = document([True, False] * 8, [0.5, 0.5])
    save(made, tmp_path / "a.json")
    assert load(tmp_path / "a.json") == made
    (tmp_path / "b.json").write_text('{"version": 1}')
    with pytest.raises(ConfigError, match="no result of baton eval"):
        load(tmp_path / "b.json")
    made.version = 99
    save(made, tmp_path / "c.json")
    with pytest.raises(ConfigError, match="version 99"):
        load(tmp_path / "c.json")


def test_pages_load_nothing_and_hold_their_numbers() -> None:
    a = document([True] * 32, [0.9, 0.1])
    b = document([i % 4 != 0 for i in range(32)], [0.6, 0.4], loss=1.01)
    for html in (page.result_page(a), page.comparison_page(compare(a, b))):
        assert not re.search(r"(src|href)=|url\(|@import", html), "loads something"
        assert "<b>model" not in html, "what users say is not markup"
        data = re.search(r'id="summary">(.*?)</script>', html, re.S)
        assert data is not None
        json.loads(data.group(1))
        assert html.count("<svg") >= 2
    assert "B is worse: -25.00 points" in page.comparison_page(compare(a, b))


def test_tables_fit_a_hundred_columns() -> None:
    a = document([True] * 32, [0.9, 0.1])
    b = document([i % 4 != 0 for i in range(32)], [0.6, 0.4], loss=1.01)
    for made in (tables.result(a), tables.comparison(compare(a, b))):
        console = Console(width=100, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
        console.print(made)
        text = console.export_text()
        assert "…" not in text
        assert max(map(len, text.splitlines())) <= 100
