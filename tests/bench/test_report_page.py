"""The report in a real browser: what it loads, what it shows, how it fits. Pictures are kept in
out/screenshots."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from baton.bench.metrics import Slo
from baton.bench.record import Load, Run
from baton.bench.report.document import search_summary
from baton.bench.report.forms import show
from baton.bench.report.subject import Part, Subject, report
from baton.bench.report.words import Numbers
from baton.bench.report.write import write
from baton.bench.slo.level import Goal
from baton.bench.slo.search import Plan, search
from helpers.browser import PICTURES, chromium
from helpers.planted import engine

GOAL = Goal(slo=Slo(ttft=1.0, tpot=0.04))
PHONE, DESK = 390, 1200
#: what hangs out of the page, or of its plot
OUTSIDE = """() => {
  const wide = document.documentElement.scrollWidth - innerWidth;
  const page = document.body.getBoundingClientRect();
  const out = [...document.querySelectorAll('.area span')].filter(e => {
    const box = e.getBoundingClientRect();
    return box.width && (box.left < page.left - 1 || box.right > page.right + 1);
  }).map(e => e.textContent);
  return {wide, out};
}"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A report of two configurations, each searched, with a few failures."""
    subjects = []
    for config, speed in (("baseline", 1.0), ("fp8", 1.25)):
        runs: dict[float, Run] = {}
        server = engine(speed=speed, requests=250)

        def measure(
            load: Load, replicate: int, stretch: int, server: Any = server, runs: Any = runs
        ) -> Run:
            runs[load.rate] = run = server(load, replicate, stretch)
            return run

        found = search(measure, GOAL, Plan(start=0.5))
        run = runs[found.capacity]
        run.name = f"{config} at {found.capacity:g} requests/s"
        for record in run.records[7::97]:
            record.status, record.error = "timeout", "no event for 600 s"
        summary = search_summary(found, config, "mixed 1K to 16K")
        subjects.append(Subject(config, [Part(summary.shape, [run], summary)]))
    made, runs = report(subjects, "Mixed prompts on hy3", None)
    place = tmp_path_factory.mktemp("report")
    write(place, made, runs)
    return place


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with chromium() as started:
        yield started


def opened(browser: Any, folder: Path, **options: Any) -> tuple[Any, list[str], list[str]]:
    """A page of the report, the addresses it asked for, and its complaints."""
    page = browser.new_page(**options)
    asked: list[str] = []
    said: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    page.on("console", lambda message: said.append(message.text))
    page.on("pageerror", lambda error: said.append(str(error)))
    page.goto((folder / "report.html").as_uri())
    return page, asked, said


def test_nothing_but_the_page_itself_is_asked_for(browser: Any, folder: Path) -> None:
    page, asked, said = opened(browser, folder)
    page.wait_for_load_state("networkidle")
    assert asked == [(folder / "report.html").as_uri()]
    assert said == []
    page.close()


def test_values_on_the_page_are_those_of_the_json_to_the_digit(browser: Any, folder: Path) -> None:
    page, _, _ = opened(browser, folder)
    numbers = page.eval_on_selector_all(
        "data", "all => all.map(e => [e.dataset.path, e.dataset.form, e.textContent])"
    )
    inside = json.loads(page.text_content("#summary"))
    page.close()
    content = json.loads((folder / "summary.json").read_text())
    assert inside == content
    look = Numbers(content)
    assert len(numbers) > 300
    for path, form, text in numbers:
        assert text == show(look.at(path), form), path


@pytest.mark.parametrize(
    "name, width, scheme",
    [
        ("phone", PHONE, "light"),
        ("desk", DESK, "light"),
        ("dark", DESK, "dark"),
        ("narrow", 320, "dark"),
    ],
)
def test_it_fits_and_is_kept_as_a_picture(
    browser: Any, folder: Path, name: str, width: int, scheme: str
) -> None:
    page, _, _ = opened(
        browser, folder, viewport={"width": width, "height": 900}, color_scheme=scheme
    )
    found = page.evaluate(OUTSIDE)
    assert found["wide"] <= 0, "the page scrolls sideways"
    assert found["out"] == [], "labels of plots hang out of the page"
    smallest = page.evaluate(
        "() => Math.min(...[...document.querySelectorAll('.area span, td, p, dd')]"
        ".map(e => parseFloat(getComputedStyle(e).fontSize)))"
    )
    assert smallest >= 12
    paper, ink = page.evaluate(
        "() => { const s = getComputedStyle(document.body); return [s.backgroundColor, s.color]; }"
    )
    assert (lightness(paper) > lightness(ink)) == (scheme == "light")
    PICTURES.mkdir(parents=True, exist_ok=True)
    picture = PICTURES / f"report-{name}.png"
    page.screenshot(path=picture, full_page=True)
    assert picture.stat().st_size > 50_000
    page.close()


def lightness(colour: str) -> int:
    """Of "rgb(r, g, b)"."""
    return sum(int(part) for part in colour.strip("rgb()").split(","))


def test_curves_are_drawn_where_their_values_are(browser: Any, folder: Path) -> None:
    """The capacity's rule lies at its share of the axis, in pixels."""
    page, _, _ = opened(browser, folder, viewport={"width": DESK, "height": 900})
    content = json.loads((folder / "summary.json").read_text())
    search_ = content["searches"][0]
    top = max(level["load"] for level in search_["found"]["levels"])
    area, rule = page.evaluate(
        "() => { const plot = document.querySelector('#loads ~ .plots .area');"
        "const box = e => { const b = e.getBoundingClientRect(); return [b.left, b.width]; };"
        "return [box(plot), box(plot.querySelectorAll('.rule')[1])]; }"
    )
    share = (rule[0] + rule[1] / 2 - area[0]) / area[1]
    assert share == pytest.approx(search_["capacity"] / top, abs=0.01)
    page.close()


def test_print_shows_what_a_screen_hides(browser: Any, folder: Path) -> None:
    page, _, _ = opened(browser, folder, color_scheme="dark")
    page.emulate_media(media="print")
    hidden = page.locator("details table").first
    assert hidden.bounding_box()["height"] > 100
    assert not page.locator("nav").is_visible()
    background = page.evaluate("() => getComputedStyle(document.body).backgroundColor")
    assert lightness(background) == 3 * 255
    paper = page.pdf(format="A4")
    assert paper.startswith(b"%PDF")
    (PICTURES / "report.pdf").parent.mkdir(parents=True, exist_ok=True)
    (PICTURES / "report.pdf").write_bytes(paper)
    page.close()
