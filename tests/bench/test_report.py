"""The document, the comparison and the page without a browser: numbers, names, schema."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import msgspec
import pytest

from baton.bench.metrics import Slo, metrics
from baton.bench.record import Load, Run
from baton.bench.report.axis import linear, logarithmic
from baton.bench.report.compare import check_workloads, compare
from baton.bench.report.document import (
    Document,
    DocumentError,
    document,
    json_schema,
    read_document,
    search_summary,
    summarize,
    to_json,
)
from baton.bench.report.forms import FORMS, show
from baton.bench.report.page import page
from baton.bench.report.subject import Part, Subject, read_subject, report
from baton.bench.report.words import Numbers
from baton.bench.report.write import write
from baton.bench.slo.disk import kept
from baton.bench.slo.level import Goal
from baton.bench.slo.search import Plan, search
from baton.core.errors import ConfigError
from helpers.planted import engine, planted
from helpers.runs import write_run

GOAL = Goal(slo=Slo(ttft=1.0, tpot=0.04))


def run_of(name: str, rate: float = 3.0, **changes: Any) -> Run:
    run = engine(**{"requests": 300, **changes})(Load(rate=rate), 0, 1)
    run.name = name
    return run


def searched(folder: Path, speed: float = 1.0) -> Document:
    """A search whose runs and summary are in the folder, as the command leaves them."""
    server = engine(requests=200, speed=speed)

    def offer(load: Load, stretch: int, file: Path) -> Run:
        run = server(load, int(file.stem.rpartition("-")[2]), stretch)
        run.name = file.stem
        write_run(file, run)
        return run

    folder.mkdir(exist_ok=True)
    found = search(kept(folder, {}, offer, resume=False), GOAL, Plan(start=1))
    made = document("x", [], GOAL, [search_summary(found, folder.name, "mixed")])
    (folder / "summary.json").write_bytes(to_json(made))
    return made


class Shown(HTMLParser):
    """Numbers of a page, and whatever it would load."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.numbers: list[tuple[dict[str, str | None], str]] = []
        self.loads: list[str] = []
        self._open: dict[str, str | None] | None = None
        self.summary = ""
        self._script = False
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        self.loads += [
            f"{tag} {name}={value}"
            for name, value in attrs
            if name in ("src", "href", "srcset", "data", "poster", "action", "xlink:href")
            and not (value or "").startswith("#")
        ]
        self._script = tag == "script"
        if tag == "data":
            self._open = given

    def handle_endtag(self, tag: str) -> None:
        self._script = False
        if tag == "data":
            self._open = None

    def handle_data(self, data: str) -> None:
        if self._script:
            self.summary += data
        elif self._open is not None:
            self.numbers.append((self._open, data))


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> tuple[Document, str]:
    """A page that shows everything: two searches, their comparison, groups, failures."""
    root = tmp_path_factory.mktemp("searches")
    for name, speed in (("base", 1.0), ("fast", 1.3)):
        searched(root / name, speed)
    subjects = [read_subject(root / name) for name in ("base", "fast")]
    broken = subjects[0].parts[0].runs[0].records[5]
    broken.status, broken.error = "error", "the server closed"
    made, runs = report(subjects, "Base and fast", None)
    return made, page(made, runs)


def test_every_number_on_the_page_is_one_of_the_document(both: tuple[Document, str]) -> None:
    made, text = both
    shown = Shown(text)
    content = json.loads(shown.summary)
    assert content == msgspec.to_builtins(made)
    look = Numbers(content)
    assert len(shown.numbers) > 300
    for about, words in shown.numbers:
        value = look.at(about["data-path"] or "")
        assert value is not None, about
        assert float(about["value"] or "nan") == value
        assert words == show(value, about["data-form"] or ""), about


def test_the_page_loads_nothing_and_runs_nothing(both: tuple[Document, str]) -> None:
    _, text = both
    assert Shown(text).loads == []
    for word in ("url(", "@import", "http-equiv", "<link", "<img", "<iframe", "javascript:"):
        assert word not in text
    assert text.count("<script") == text.count('<script type="application/json"') == 1


def test_the_page_has_all_its_parts(both: tuple[Document, str]) -> None:
    made, text = both
    for name in ("loads", "differences", "latency", "time", "throughput", "groups", "pareto"):
        assert f'<h2 id="{name}">' in text
    for words in made.definitions.values():
        assert words.partition("(")[0].partition("'")[0] in text
    assert "the server closed" in text
    assert "0123456789ab" in text


def test_names_from_outside_are_only_words() -> None:
    run = run_of("<script>alert(1)</script>", requests=60)
    run.workload["name"] = "</script><script>alert(2)</script>"
    run.records[0].status, run.records[0].error = "error", '"><img src=x onerror=alert(3)>'
    run.records[1].group = "a/b~c<i>"
    made = document("<b>title</b>", [summarize(run, GOAL.slo)], GOAL)
    text = page(made, [run])
    assert "alert" in text
    assert "<script>" not in text
    assert "<img" not in text
    assert "<b>title" not in text
    assert "<i>" not in text
    shown = Shown(text)
    assert any("a~1b~0c" in (about["data-path"] or "") for about, _ in shown.numbers)


def test_a_window_counts_what_was_due_in_it() -> None:
    run = run_of("run", requests=200)
    told = summarize(run, GOAL.slo, (10.0, 40.0))
    inside = [r for r in run.records if 10 <= r.scheduled < 40]
    assert told.metrics["requests"]["sent"] == len(inside) < 200
    assert "requests due from 10.0 to 40.0 s" in page(document("t", [told], GOAL), [run])


def test_few_samples_are_marked() -> None:
    run = run_of("few", requests=60)
    text = page(document("Few", [summarize(run, None)], None), [run])
    assert '<span class="few" title="n too small"><data' in text
    many = run_of("many", requests=1500)
    told = page(document("Many", [summarize(many, None)], None), [many])
    assert "n too small" not in told


@pytest.mark.parametrize(
    "make",
    [
        lambda: Run(name="nothing"),
        lambda: Run(name="one", records=run_of("x").records[:1]),
        lambda: run_of("all failed", broken=1.0, requests=60),
    ],
)
def test_a_page_of_a_run_with_next_to_nothing(make: Callable[[], Run]) -> None:
    run = make()
    made = document("t", [summarize(run, GOAL.slo)], GOAL)
    assert run.name in page(made, [run])
    assert made.runs[0].name == run.name


def test_a_search_is_related_to_the_first_of_its_shape(both: tuple[Document, str]) -> None:
    base, fast = both[0].searches
    assert (base.relative, fast.base) == (None, base.config)
    assert fast.capacity is not None
    assert base.capacity is not None
    assert fast.relative == fast.capacity / base.capacity - 1
    assert fast.bounds is not None
    assert (fast.bounds.low or -1) <= fast.relative <= (fast.bounds.high or 9)
    assert fast.relative > 0


def test_a_document_survives_its_file(both: tuple[Document, str], tmp_path: Path) -> None:
    made, _ = both
    file = tmp_path / "summary.json"
    file.write_bytes(to_json(made))
    assert msgspec.to_builtins(read_document(file)) == msgspec.to_builtins(made)


def test_the_schema_names_what_the_document_has(both: tuple[Document, str]) -> None:
    made, _ = both
    schema = json_schema()
    fields = schema["$defs"]["Document"]["properties"]
    assert set(msgspec.to_builtins(made)) == set(fields)
    assert fields["schema"]["default"] == made.schema == 1
    run = schema["$defs"]["RunSummary"]["properties"]
    assert set(msgspec.to_builtins(made.runs[0])) == set(run)


@pytest.mark.parametrize(
    "content, words",
    [
        ("{", "cannot be read as a summary"),
        ('{"kind": "x"}', "not a summary"),
        ('{"kind": "baton bench summary", "schema": 99}', "schema 99 is of a newer version"),
        ('{"kind": "baton bench summary", "schema": 1}', "missing required field"),
    ],
)
def test_files_that_are_no_summary(tmp_path: Path, content: str, words: str) -> None:
    file = tmp_path / "summary.json"
    file.write_text(content)
    with pytest.raises(DocumentError, match=words):
        read_document(file)


def test_the_files_of_a_report_agree(tmp_path: Path) -> None:
    searched(tmp_path / "base")
    made, runs = report([read_subject(tmp_path / "base")], "t", None)
    written = write(tmp_path / "out", made, runs)
    assert [path.name for path in written] == [
        "report.html",
        "summary.json",
        "runs.csv",
        "loads.csv",
    ]
    rows = list(csv.DictReader(io.StringIO((tmp_path / "out/runs.csv").read_text())))
    p95 = made.runs[0].metrics["latency"]["ttft"]["p95"]
    assert [row["name"] for row in rows] == [run.name for run in made.runs]
    assert float(rows[0]["latency.ttft.p95"]) == p95
    loads = list(csv.DictReader(io.StringIO((tmp_path / "out/loads.csv").read_text())))
    assert len(loads) == made.searches[0].found.runs
    # a search's report shows the load found and the next that fails
    line = made.searches[0].found.edges["all"]
    assert [run.load.rate for run in runs] == [line.meets, line.fails]


def test_differences_that_were_planted_are_told_and_others_are_not() -> None:
    slow, fast, same = run_of("slow"), run_of("fast", speed=1.5), run_of("same", seed=9)
    told = [summarize(run, GOAL.slo) for run in (slow, fast, same)]
    runs = [slow, fast, same]
    rows = {row.metric: row for row in compare(0, 1, runs, told, GOAL.slo).rows}
    for metric in ("latency.ttft.p50", "latency.tpot.p50", "latency.tpot.p95", "latency.e2e.p50"):
        assert rows[metric].verdict == "better", metric
    assert rows["throughput.output"].verdict == "no clear difference"
    assert rows["latency.ttft.p99"].verdict == "n too small"
    assert rows["latency.ttft.p99"].interval is None
    row = rows["latency.tpot.p50"]
    a, b = (metrics(run)["latency"]["tpot"]["p50"] for run in (slow, fast))
    assert (row.base, row.other) == (a, b)
    assert row.difference == b - a
    assert row.relative == pytest.approx(b / a - 1)
    back = {row.metric: row for row in compare(1, 0, runs, told, GOAL.slo).rows}
    assert back["latency.tpot.p50"].verdict == "worse"
    quiet = [row.verdict for row in compare(0, 2, runs, told, GOAL.slo).rows if row.interval]
    assert quiet.count("no clear difference") >= len(quiet) - 1


def test_more_attainment_is_better() -> None:
    good, bad = (planted(lambda x, s=s: s)(Load(rate=3), 0, 1) for s in (0.99, 0.9))
    goal = Goal(slo=Slo(ttft=1.0))
    told = [summarize(run, goal.slo) for run in (bad, good)]
    rows = {row.metric: row for row in compare(0, 1, [bad, good], told, goal.slo).rows}
    assert rows["attainment.all"].verdict == "better"
    assert rows["attainment.all"].difference == pytest.approx(0.09, abs=0.04)


def test_different_workloads_are_refused_unless_allowed() -> None:
    a, b = run_of("a"), run_of("b")
    assert check_workloads([a, b], allow=False) == []
    b.workload = {**b.workload, "seed": 7, "prompt_seed": 8}
    assert check_workloads([a, b], allow=False) == []
    b.workload["requests"] = 7
    b.load = Load(rate=5.0)
    assert check_workloads([a, b], allow=False) == [
        "a and b were given workloads that differ in requests",
        "a and b were offered different loads",
    ]
    b.workload["buckets"] = [1]
    with pytest.raises(ConfigError, match=r"buckets: \[1024, 4096, 16384\] and \[1\]"):
        check_workloads([a, b], allow=False)
    assert "differ in buckets, requests" in check_workloads([a, b], allow=True)[0]


def test_one_folder_is_shown_and_several_are_compared_part_by_part(tmp_path: Path) -> None:
    for folder in ("a", "b"):
        for rate in (2.0, 3.0, 4.0):
            if (folder, rate) != ("b", 4.0):
                run = run_of(f"r{rate:g}", rate, requests=60)
                run.workload["isl"] = rate  # a grid: every run of another shape
                write_run(tmp_path / folder / f"{rate:g}.jsonl", run)
    one, _ = report([read_subject(tmp_path / "a")], "t", None)
    assert [run.name for run in one.runs] == ["r2", "r3", "r4"]
    assert one.comparisons == []
    both, _ = report([read_subject(tmp_path / name) for name in ("a", "b")], "t", None)
    assert [(pair.base, pair.other) for pair in both.comparisons] == [(0, 1), (2, 3)]
    assert both.warnings == ["b has no run of r4 to compare"]
    assert len({run.name for run in both.runs}) == len(both.runs) == 5
    # two single runs are compared whatever they are called
    files = [tmp_path / "a" / "2.jsonl", tmp_path / "b" / "3.jsonl"]
    made, _ = report([read_subject(file) for file in files], "t", None, allow_different=True)
    assert len(made.comparisons) == 1
    with pytest.raises(ConfigError, match="expected a run's"):
        read_subject(tmp_path / "nothing")


def test_a_search_that_found_nothing_is_reported() -> None:
    found = search(planted(lambda x: 0.5), GOAL, Plan(start=1, most_runs=2, table=False))
    part = Part("x", [], search_summary(found, "c", "x"))
    made, runs = report([Subject("s", [part]), Subject("t", [part])], "t", None)
    assert runs == []
    assert made.warnings == ["s, x: no run to compare with"]
    assert "No load offered" in page(made, runs)


@pytest.mark.parametrize(
    "value, form, text",
    [
        (0.00004, "time", "40.0 µs"),
        (0.01234, "time", "12.3 ms"),
        (0.9999, "time", "1.00 s"),
        (0.09996, "time", "100 ms"),
        (999.7, "rate", "1,000"),
        (1.5, "time", "1.50 s"),
        (0.0, "time", "0 ms"),
        (12345.6, "rate", "12,346"),
        (0.98765, "share", "98.8%"),
        (-0.25, "percent", "−25.0%"),
        (0.0012, "time+", "+1.20 ms"),
        (0.0, "points", "±0.0 points"),
        (2.5, "load", "2.5"),
        (None, "time", "–"),
    ],
)
def test_forms(value: float | None, form: str, text: str) -> None:
    assert show(value, form) == text


def test_every_form_writes_any_number() -> None:
    for form in FORMS:
        for value in (0.0, 1e-9, -1e-9, 0.5, 3.0, 1e7):
            assert show(value, form)


def test_axes() -> None:
    axis = linear([7.3], "rate")
    assert (axis.low, axis.high, axis.ticks) == (0, 8, (0, 2, 4, 6, 8))
    assert axis.place(2) == 0.25
    assert linear([7.3], "rate", tight=True).high == 7.3
    assert linear([], "rate").place(5) == 1
    decades = logarithmic([0.001, 10.0], "tick")
    assert all(decades.low <= tick <= decades.high for tick in decades.ticks)
    assert 3 <= len(decades.ticks) <= 5
    assert 0 < decades.place(0.001) < decades.place(0.1) < decades.place(10) < 1
    narrow = logarithmic([0.021, 0.045], "tick")
    assert len(narrow.ticks) >= 2
    assert len(logarithmic([], "tick").ticks) >= 1
