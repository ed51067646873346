"""The pages and figures that people look at, in a real browser, from disk and without a network."""

import re
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from running import router_steps, run, tiny

from focus_exp.records.record import Record
from focus_exp.records.rows import Arm, Row
from focus_exp.reporting.run_index import write_index

playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
pytestmark = pytest.mark.browser

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
# no look-ups of its own
QUIET = ["--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-component-update"]


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    if CHROMIUM is None:
        pytest.skip("there is no Chromium here; make browser installs it")
    with playwright.sync_playwright() as driver:
        opened = driver.chromium.launch(executable_path=CHROMIUM, args=QUIET)
        yield opened
        opened.close()


@pytest.fixture
def open_page(browser) -> Iterator[Callable[..., Any]]:
    """open_page(path, **settings of the window): the page, whose console has to stay silent to the end of the test."""
    said: list[str] = []
    pages = []

    def opening(path: Path, **settings: Any) -> Any:
        page = browser.new_page(**{"viewport": {"width": 1280, "height": 900}, **settings})
        page.on("console", lambda message: said.append(f"{message.type}: {message.text}"))
        page.on("pageerror", lambda error: said.append(str(error)))
        page.on("requestfailed", lambda request: said.append(f"failed: {request.url}"))
        page.on("request", lambda request: said.append(request.url) if request.url.startswith("http") else None)
        page.goto(path.resolve().as_uri())
        if path.name == "passage.html":  # unpacks its data first
            page.wait_for_selector("[data-token]")
        pages.append(page)
        return page

    yield opening
    for page in pages:
        page.close()
    assert said == []


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> Path:
    """Two runs, one of them of job=analyze, and their report."""
    folder = tmp_path_factory.mktemp("pages")
    short = [*tiny(folder), router_steps(2), "eval.controls=false", "eval.top_k=[1]"]
    for settings in ([], ["job=analyze"], ["job=report"]):
        result = run(*short, *settings, drawn=True)
        assert result.code == 0, result.err
    return folder / "runs"


@pytest.fixture(scope="module")
def passage(runs) -> Path:
    (page,) = runs.rglob("passage.html")
    return page


def test_a_token_shows_what_it_reads_and_what_was_cut(open_page, passage, tmp_path):
    page = open_page(passage)
    assert page.locator("[data-token]").count() == 24
    empty = page.inner_text("#detail")
    page.locator('[data-token="20"]').click()
    chosen = page.inner_text("#detail")
    assert chosen != empty and "token 20" in chosen and "This token:" in chosen
    page.mouse.move(2, 2)
    drawn = page.locator("#lines path").count()
    assert drawn == page.locator(".t.kept").count() + page.locator(".t.cutkey").count() > 0
    # keys in the table lead to their tokens
    page.locator("#detail td button").first.click()
    assert page.inner_text("#detail") != chosen
    page.keyboard.press("Escape")
    assert page.inner_text("#detail") == empty and page.locator("#lines path").count() == 0
    picture = tmp_path / "page.png"
    page.screenshot(path=picture)
    assert picture.stat().st_size > 5_000


def test_layers_and_views_change_what_is_shown(open_page, passage):
    page = open_page(passage)
    names = lambda: page.eval_on_selector_all(".t", "all => all.map(token => token.getAttribute('aria-label'))")  # noqa: E731
    page.locator('#strip [data-layer="0"]').click()
    first, scale = names(), page.inner_text("#scale")
    assert page.inner_text("#layer-name") == "Layer 0" and page.locator("#previous").is_disabled()
    page.locator('#strip [data-layer="1"]').click()
    assert page.inner_text("#layer-name") == "Layer 1" and names() != first and page.inner_text("#scale") != scale
    for view in ("cutting", "cost", "groups"):
        page.locator(f'[data-view="{view}"]').click()
        assert page.get_attribute("#passage", "class") == view
        assert page.locator(f'[data-view="{view}"]').get_attribute("aria-pressed") == "true"
    everything = page.locator(".t.dim").count()
    page.locator("#legend button").first.click()
    assert everything == 0 < page.locator(".t.dim").count() < 24


def test_the_keyboard_reaches_every_token_and_layer(open_page, passage):
    page = open_page(passage)
    page.locator('[data-token="0"]').focus()
    page.keyboard.press("End")
    assert "token 23" in page.inner_text("#detail")
    page.keyboard.press("ArrowLeft")
    assert "token 22" in page.inner_text("#detail")
    before = page.inner_text("#layer-name")
    page.keyboard.press("ArrowDown")
    page.keyboard.press("ArrowDown")
    page.keyboard.press("ArrowUp")
    assert page.inner_text("#layer-name") == "Layer 1" and before.startswith("Layer")
    assert page.locator('.t[tabindex="0"]').count() == 1


@pytest.mark.parametrize("width", [360, 820, 1600])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_it_fits_any_width_and_text_stands_out(open_page, passage, width, scheme):
    page = open_page(passage, viewport={"width": width, "height": 800}, color_scheme=scheme)
    page.locator('[data-token="20"]').click()
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    for part in ("h1", "#strip", "#passage", "#detail", "#legend", "#findings"):
        assert page.locator(part).is_visible()
    page.mouse.move(2, 2)
    colours = "e => [getComputedStyle(e).color, getComputedStyle(e.matches('.t') ? e : document.body).backgroundColor]"
    for part in ("#about", "#scale", '[data-token="20"]', "#origin"):
        assert contrast(*page.locator(part).evaluate(colours)) >= 4.5, part
    page.locator('[data-token="20"]').press("Escape")
    for view in ("groups", "cutting", "cost"):
        page.locator(f'[data-view="{view}"]').click()
        for pair in page.eval_on_selector_all(".t", f"all => all.map({colours})"):
            assert contrast(*pair) >= 4.5, view


def contrast(*colours: str) -> float:
    """Of two CSS colours, rgb(...) or color(srgb ...), as WCAG 2 defines it."""
    lights = []
    for colour in colours:
        parts = [float(part) / (1 if "srgb" in colour else 255) for part in re.findall(r"[\d.]+", colour)[:3]]
        linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
        lights.append(0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2])
    return (max(lights) + 0.05) / (min(lights) + 0.05)


def test_the_report_shows_its_tables_and_figures(open_page, runs):
    page = open_page(runs / "report" / "report.html")
    assert page.locator("h1").is_visible() and page.locator("table").count() > 5
    sizes = page.eval_on_selector_all(
        "img",
        "all => Promise.all(all.map(i => { i.loading = 'eager'; return i.decode().then(() => i.naturalWidth); }))",
    )
    assert sizes and min(sizes) > 300


@pytest.mark.slow
def test_every_figure_opens(open_page, runs):
    figures = [path for kind in ("png", "svg") for path in runs.rglob(f"figures/*.{kind}")]
    assert len(figures) >= 3
    for path in figures:
        page = open_page(path)
        drawn = page.locator("img, svg").first
        assert drawn.is_visible() and drawn.bounding_box()["width"] > 300, path


def test_the_list_of_runs_sorts_by_any_column_and_shows_arms_when_asked(open_page, tmp_path):
    settings = {"attention": {"method": "focus"}}
    for name, perplexity in {"middle": 20.0, "best": 3.0, "worst": 100.0, "none": None}.items():
        row = Row(name=name, kind="hard", method="focus", causal=True, nll=1.0, perplexity=perplexity)
        record = Record(
            status="finished", experiment=name, started=name, config=settings, rows=[row] * bool(perplexity)
        )
        record.save(tmp_path / name / "run" / "record.json")
    arm = replace(record, config={"arm": "one"}, experiment="none", started="arm")
    arm.save(tmp_path / "none" / "one" / "seed=0" / "record.json")
    both = Arm(name="one", settings=[], folder="runs/none/one/seed=0", started="arm")
    replace(record, arms=[both]).save(tmp_path / "none" / "compare" / "seed=0" / "record.json")
    page = open_page(write_index(tmp_path))
    runs = lambda: [text.split("/")[0] for text in page.locator("tbody tr:visible td:nth-child(3)").all_inner_texts()]  # noqa: E731
    assert "none/one/seed=0" not in page.inner_text("tbody")
    page.get_by_role("button", name="perplexity").click()
    assert runs()[:3] == ["best", "middle", "worst"]
    page.get_by_role("button", name="perplexity").click()
    assert runs()[:3] == ["worst", "middle", "best"] and runs()[-1] == "none"
    page.locator("#arms").check()
    assert "none/one/seed=0" in page.inner_text("tbody")
