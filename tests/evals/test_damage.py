"""The judge catches planted damage, each kind by the task that should, where perplexity hardly
moves; and it finds nothing where nothing is wrong.

`tiny` is trained to 128 tokens and runs always; `recall-rope` is judged on contexts of 4,096 tokens
by `make test-slow`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from baton.engine.llm import LLM
from baton.evals.compare import Comparison, Group, compare
from baton.evals.document import Document
from baton.evals.exam import Suite
from baton.evals.marks import Marks
from baton.evals.run import Text, run
from baton.evals.subject import Engine
from baton.evals.tasks import Borders
from baton.evals.text import prose
from helpers.damage import Damage, cut_to_window, rounded, shifted_positions, swapped_pages

ROOT = Path(__file__).parents[2]
TASKS = ("single", "multikey1", "multikey2", "multikey3", "boundary")


@dataclass(frozen=True)
class Case:
    """A model and what it is judged on; lengths in tokens. windows: of `length`, of each text."""

    folder: Path
    length: int
    page: int
    chunk: int
    window: int
    shift: int
    contexts: int
    queries: int
    alphabet: int
    windows: int

    @property
    def plain(self) -> Suite:
        borders = Borders(self.page, self.page, self.page, 4)
        return Suite(
            "marks", TASKS, (self.length,), self.contexts, self.queries, 0, self.alphabet, borders
        )

    @property
    def middle(self) -> Suite:
        """A fact across the middle of each of many contexts, as the end of a chunk, and four across
        other places, as ends of segments."""
        half = self.length // 2
        borders = Borders(half, half, half, 5)
        return replace(self.plain, tasks=("boundary",), contexts=24, queries=5, borders=borders)

    def examine(
        self, damage: Damage | None = None, suite: Suite | None = None, **options: Any
    ) -> Document:
        suite = suite or self.plain
        given: dict[str, Any] = {
            "dtype": "float32", "max_model_len": 2 * self.length, "block_size": self.page,
            "num_kv_pages": 64 * self.length // self.page, "max_num_batched_tokens": self.chunk,
            "threads": 1,  # these tensors are too small to share
        }  # fmt: skip
        texts = [
            Text(
                f"prose {seed}",
                prose("evaluation", seed, 1 << 18)[: self.windows * self.length].tolist(),
                self.length,
            )
            for seed in (0, 1)  # made here: the same on every machine
        ]
        with LLM(str(self.folder), **(given | options)) as llm:
            if damage is not None:
                damage(llm)
            facts = {"name": "test"}, {}
            return run(Engine(llm), Marks(self.alphabet, 0), suite, texts, facts, lambda *_: None)


TINY = Case(Path(__file__).parent / "tiny", 128, 16, 32, 32, 8, 14, 14, 16, 32)
ROPE = Case(ROOT / "models" / "recall-rope", 4096, 64, 512, 1024, 64, 4, 24, 128, 8)
FOUND: dict[tuple[Case, Suite], Document] = {}


@pytest.fixture(
    scope="module", params=["tiny", pytest.param("recall-rope", marks=pytest.mark.slow)]
)
def case(request: pytest.FixtureRequest) -> Case:
    return TINY if request.param == "tiny" else ROPE


def dense(case: Case, suite: Suite | None = None) -> Document:
    key = case, suite or case.plain
    if key not in FOUND:
        FOUND[key] = case.examine(suite=key[1])
    return FOUND[key]


def task(found: Comparison, name: str) -> Group:
    return found.groups()[f"task {name}"]


def quiet(found: Comparison) -> bool:
    """Perplexity of no text moves by 1%."""
    assert len(found.texts) == 2
    return all(abs(text.change) < 0.01 for text in found.texts)


def test_the_undamaged_model_answers(case: Case) -> None:
    right = [answer.hit for answer in dense(case).answers]
    assert sum(right) / len(right) > 0.85
    assert dense(case).computed is not None
    assert dense(case).computed < 0.4 * dense(case).prompts, "contexts are computed once"  # type: ignore[operator]


@pytest.mark.parametrize("options", [{"chunk": 0.5, "max_num_seqs": 3}, {"chunk": 4}])
def test_other_chunks_and_batches_make_no_difference(case: Case, options: dict[str, Any]) -> None:
    chunk = int(case.chunk * options["chunk"])
    other = {k: v for k, v in options.items() if k != "chunk"} | {"max_num_batched_tokens": chunk}
    found = compare(dense(case), case.examine(**other))
    assert found.all.kl is not None
    assert found.all.kl.mean < 1e-6
    for group in [found.all, *found.tasks, *found.cells]:
        assert group.paired.interval.low <= 0 <= group.paired.interval.high, group.name
    assert all(abs(text.change) < 1e-5 for text in found.texts)


def test_four_bits_are_caught_by_keys_that_are_alike(case: Case) -> None:
    """Perplexity of windows that are one chunk never reads what is stored."""
    whole = {"max_num_batched_tokens": case.length}
    found = compare(dense(case), case.examine(rounded(4), **whole))
    assert quiet(found)
    assert task(found, "multikey3").paired.worse


def test_every_question_reads_what_is_stored() -> None:
    """The first of a context too, however large chunks are."""
    whole = {"max_num_batched_tokens": 4 * TINY.length}
    damaged = TINY.examine(rounded(6), **whole)
    for before, after in zip(dense(TINY).answers, damaged.answers, strict=True):
        assert before.logprobs != after.logprobs, (before.task, before.context)


def test_a_slight_loss_shows_in_distributions_first() -> None:
    """And most where keys are alike, before answers can tell."""
    found = compare(dense(TINY), TINY.examine(rounded(6)))
    assert quiet(found)
    assert not task(found, "single").paired.worse
    alike, plain = task(found, "multikey3").kl, task(found, "single").kl
    assert alike is not None
    assert plain is not None
    assert alike.mean > 3 * plain.mean > 0.01


@pytest.mark.slow
def test_a_coarse_format_shows_in_perplexity_before_it_does_in_answers() -> None:
    """Where perplexity is measured over what is stored. The larger model answers all the same;
    distributions tell what is next: `multikey3`, which differs from `multikey2` in its keys only.
    """
    found = compare(dense(ROPE), ROPE.examine(rounded(5)))
    assert all(text.change > 0.02 for text in found.texts)
    assert found.all.paired.difference > -0.02
    parts = {group.name: group.kl.mean for group in found.tasks if group.kl is not None}
    others = [parts[name] for name in ("single", "multikey1", "multikey2")]
    assert parts["multikey3"] > 5 * max(others), parts


def test_a_window_is_caught_by_distance(case: Case) -> None:
    found = compare(dense(case), case.examine(cut_to_window(case.window)))
    assert quiet(found)
    assert task(found, "single").paired.difference < -0.3
    near = [g for g in found.distances if int(g.name) <= case.window // 2]
    far = [g for g in found.distances if int(g.name) > 2 * case.window]
    assert near
    assert all(group.paired.difference > -0.05 for group in near)
    assert all(group.paired.difference < -0.5 for group in far)


def test_shifted_positions_are_caught_at_boundaries(case: Case) -> None:
    """By one chunk, in the second half: only facts that lie across the middle suffer. Of all pages'
    ends one is damaged, so a question about any of them rarely shows it."""
    shifted = shifted_positions(case.length // 2, case.shift)
    found = compare(dense(case, case.middle), case.examine(shifted, case.middle))
    assert quiet(found)
    assert task(found, "boundary").paired.worse
    at = {group.name: group.paired for group in found.notes}
    assert at["boundary/chunk"].difference < -0.3
    assert at["boundary/segment"].difference > -0.05
    assert worst_part(found) in (3, 4), "the damage lies in the middle"


def test_a_swapped_page_is_caught_at_its_depth(case: Case) -> None:
    pages = case.length // case.page
    first, second = pages // 8, pages // 2
    found = compare(dense(case), case.examine(swapped_pages(first, second)))
    assert quiet(found)
    assert found.all.paired.worse
    assert worst_part(found) in (first * 8 // pages, second * 8 // pages)


def worst_part(found: Comparison) -> int:
    """The eighth of the context in which most is lost."""
    worst = min(found.cells, key=lambda cell: cell.paired.difference)
    return int(worst.name.split()[1])


def test_damage_of_test_code_is_where_it_says() -> None:
    """A wrapper that does nothing changes nothing: what is found is not the wrapper's doing."""
    from helpers.damage import View, wrap_views

    plain: Callable[[LLM], None] = lambda llm: wrap_views(llm, View)  # noqa: E731
    found = compare(dense(TINY), TINY.examine(plain))
    assert found.all.paired.lost == found.all.paired.won == 0
