"""The page of a report in a headless browser: every part is clicked through, narrow and wide, light and dark.

Needs Chromium (``apt-get install chromium``) and its driver in Python (``pip install '.[browser]'``); skipped where they are not installed.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest
from programs import abstract, gpt, gpt_scan, mlp
from test_report_page import luminance

import autoshard
from benchmarks.models import llama

sync_api = pytest.importorskip("playwright.sync_api", reason="no playwright: pip install '.[browser]'")
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium: apt-get install chromium")

VIEWS = [(width, scheme) for width in (375, 1440) for scheme in ("light", "dark")]


@pytest.fixture(scope="module")
def browser():
    with sync_api.sync_playwright() as driver:
        found = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield found
        found.close()


def searched(program, cluster: str, mesh: dict[str, int], **options) -> autoshard.Strategy:
    function, args = program()
    return autoshard.search(function, *args, cluster=cluster, mesh=mesh, searcher="tensor_parallel", donate_argnums=0, **options)


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("report") / "report.html"
    searched(gpt, "v5e:4x4", {"data": 4, "model": 4}).report().save_html(path)
    return path


@contextmanager
def opened(browser, path: Path, width: int = 1440, scheme: str = "light") -> Iterator:
    """The page, once its script has run; closing it checks that nothing went wrong, and that nothing else was loaded."""
    page = browser.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme)
    wrong, loaded = [], []
    page.on("console", lambda message: wrong.append(message.text) if message.type in ("error", "warning") else None)
    page.on("pageerror", lambda error: wrong.append(str(error)))
    page.on("request", lambda request: loaded.append(request.url))
    page.goto(path.as_uri())
    page.wait_for_function("document.documentElement.dataset.ready")
    yield page
    page.close()
    assert wrong == []
    assert loaded == [path.as_uri()]


@pytest.mark.parametrize(("width", "scheme"), VIEWS)
def test_every_part_is_there_and_fits(browser, saved, width, scheme):
    """Each link leads to a section; the page is no wider than the screen, and its colours are those of the scheme."""
    with opened(browser, saved, width, scheme) as page:
        sections = page.locator("main section").evaluate_all("all => all.map(each => each.id)")
        assert sections[:8] == ["summary", "timeline", "where", "memory", "mesh", "tensors", "collectives", "program"]
        links = page.locator("nav a").evaluate_all("all => all.map(each => each.hash)")
        assert links == [f"#{section}" for section in sections]
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        dark = page.evaluate("getComputedStyle(document.body).backgroundColor.match(/\\d+/g).slice(0, 3).every(n => n < 128)")
        assert dark == (scheme == "dark")
        for canvas in page.locator("canvas").all():
            assert canvas.evaluate("c => new Set(c.getContext('2d').getImageData(0, 0, c.width, c.height).data).size > 4")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_labels_stand_out_on_all_bars(browser, saved, scheme):
    """On each colour of bars and devices, pale ones too, the label's contrast is 4.5 to 1 at least (WCAG 2.1, AA)."""
    names = [f"--c{k}" for k in range(6)] + ["--forward", "--backward", "--recomputed", "--update"]
    with opened(browser, saved, 1440, scheme) as page:
        for name in names:
            for alpha in (1, 0.8, 0.55):
                colour, background, ink = page.evaluate(f"[css('{name}'), css('--bg'), inkOn(css('{name}'), {alpha}, css('--bg'))]")
                mixed = [alpha * int(colour[k : k + 2], 16) + (1 - alpha) * int(background[k : k + 2], 16) for k in (1, 3, 5)]
                low, high = sorted(luminance(each) for each in (ink, "#" + "".join(f"{round(part):02x}" for part in mixed)))
                assert (high + 0.05) / (low + 0.05) >= 4.5, (name, alpha)


def test_the_timeline_zooms_and_says_what_bars_are(browser, saved):
    """By buttons, keys and drag; what is pointed at is named with its time."""
    with opened(browser, saved) as page:
        shown = page.locator("#timeline .tools output")
        whole = shown.inner_text()
        page.get_by_label("Zoom in").click()
        near = shown.inner_text()
        assert whole.startswith("whole step") and " to " in near
        canvas = page.locator("#timeline canvas")
        canvas.focus()
        page.keyboard.press("+")
        page.keyboard.press("ArrowRight")
        moved = shown.inner_text()
        assert moved != near
        canvas.hover(position={"x": 700, "y": 15})
        page.mouse.down()
        canvas.hover(position={"x": 500, "y": 15}, force=True)
        page.mouse.up()
        assert shown.inner_text() != moved
        page.keyboard.press("0")
        assert shown.inner_text() == whole
        page.keyboard.press(".")
        first = page.locator("#timeline .chosen").inner_text()
        page.keyboard.press(".")
        assert "forward" in first and page.locator("#timeline .chosen").inner_text() != first
        assert page.locator("#timeline tbody tr").count() == 8


def test_memory_tells_of_a_moment(browser, saved):
    """The slider says what is held when, by group; the button goes back to the peak."""
    with opened(browser, saved) as page:
        told = page.locator("#memory > output")
        peak = told.inner_text()
        assert peak.startswith("Peak") and "parameters" in peak
        page.locator("#memory input[type=range]").focus()
        page.keyboard.press("Home")
        assert told.inner_text().startswith("Kernel 0")
        page.locator("#memory").get_by_role("button", name="Peak", exact=True).click()
        assert told.inner_text() == peak


def test_tables_are_searched_and_sorted(browser, saved):
    """Searching keeps the rows that have all words; a click on a head sorts, a second one the other way."""
    with opened(browser, saved) as page:
        table = page.locator("#tensors")
        rows = table.locator("tbody tr")
        n = rows.count()
        table.get_by_role("searchbox").fill("params embed")
        assert 0 < rows.count() < n and all("embed" in text for text in rows.all_inner_texts())
        table.get_by_role("searchbox").fill("")
        head = table.get_by_role("button", name="count")
        head.click()
        counts = [int(text) for text in table.locator("tbody td:nth-child(3)").all_inner_texts()]
        assert counts == sorted(counts, reverse=True) and counts[0] > counts[-1]
        head.click()
        assert [int(text) for text in table.locator("tbody td:nth-child(3)").all_inner_texts()] == sorted(counts)
        assert table.locator("th[aria-sort=ascending]").count() == 1


def test_devices_are_told_by_keys(browser, saved):
    """Arrow keys go from device to device, and their coordinates are said."""
    with opened(browser, saved) as page:
        page.locator("#mesh .device").first.focus()
        page.keyboard.press("ArrowRight")
        page.keyboard.press("ArrowDown")
        assert page.locator("#mesh output").inner_text() == "Device 5, at (1, 1): data = 1, model = 1."
        assert page.locator("#mesh path").count() == 24


def test_the_graph_opens_and_closes(browser, saved):
    """A box opens to those inside it, by click or key; the buttons open everything of a kind."""
    with opened(browser, saved) as page:
        boxes = page.locator("#program .node:visible")
        before = boxes.count()
        box = page.locator("#program").get_by_role("button", name="_block").first
        box.focus()
        page.keyboard.press("Enter")
        assert box.get_attribute("aria-expanded") == "true" and boxes.count() > before
        page.locator("#program").get_by_role("button", name="Operations").click()
        assert boxes.count() > 60 and page.locator("#program").get_by_text("dot_general").first.is_visible()
        assert page.locator("#program .inside > svg path").count() > 20
        page.locator("#program").get_by_role("button", name="Close all").click()
        assert boxes.count() == 3


@pytest.mark.parametrize("program", [gpt_scan, mlp])
def test_other_programs_have_their_report(browser, tmp_path, program):
    """Of loops, whose trips show once there is room, and of hosts."""
    path = tmp_path / "report.html"
    searched(program, "h100:4x2", {"data": 4, "model": 2}).report().save_html(path)
    with opened(browser, path, 375) as page:
        for _ in range(12):
            page.get_by_label("Zoom in").click()
        assert page.locator("#timeline tbody tr").count()


def test_a_program_of_nothing_has_its_page(browser, tmp_path):
    """Without operations, collectives or axes nothing is drawn, and nothing fails."""
    autoshard.search(lambda x: x, abstract((8,)), cluster="cpu:1").report().save_html(tmp_path / "report.html")
    with opened(browser, tmp_path / "report.html", 375) as page:
        assert page.locator("#mesh .device").count() == 1 and page.locator("#timeline canvas").count() == 1


def test_a_file_has_what_its_record_has(browser, tmp_path):
    """What is missing is said, with the command that gives it."""
    searched(mlp, "cpu:8", {"data": 4, "model": 2}).save(tmp_path / "s.json")
    autoshard.load(tmp_path / "s.json").report().save_html(tmp_path / "report.html")
    with opened(browser, tmp_path / "report.html") as page:
        for part in ("timeline", "memory", "program"):
            assert "autoshard explain FILE.json" in page.locator(f"#{part} .missing").inner_text()
        assert page.locator("#tensors tbody tr").count() and page.locator("#mesh .device").count() == 8


@pytest.mark.slow
def test_a_llama_of_32_layers_is_a_small_file(browser, tmp_path):
    """Its file is under 5 MB; the page shows all of it. How long it takes to open depends on the machine, and is printed."""
    path = tmp_path / "report.html"
    searched(partial(llama, layers=32), "v5p:4x4x4", {"data": 16, "model": 4}).report().save_html(path)
    assert path.stat().st_size < 5e6
    with opened(browser, path) as page:
        print(f"{path.stat().st_size / 1e6:.2f} MB, open after {page.evaluate('performance.now()') / 1e3:.2f} s")
        page.locator("#program").get_by_role("button", name="Operations").click()
        assert page.locator("#program").get_by_text("dot_general").first.is_visible()


def test_the_stages_of_a_pipeline_have_a_timeline_memory_and_a_program(browser, tmp_path):
    """Those of the stage that is chosen, each section once, with the axes of the stage's own mesh; another choice shows others."""
    function, args = gpt()
    found = autoshard.search(function, *args, cluster="cpu:8", stages=2, microbatches=2, mesh={"data": 4}, donate_argnums=0)
    found.report().save_html(tmp_path / "report.html")
    with opened(browser, tmp_path / "report.html") as page:
        for section in ("timeline", "memory", "program"):
            assert page.locator(f"#{section}").count() == 1
        colours = "all => all.map(each => getComputedStyle(each).backgroundColor)"
        of_data = page.locator("#timeline .legend li", has_text="links of data").locator("i").evaluate_all(colours)
        stripes = page.locator("#program .stripe").evaluate_all("all => all.map(each => getComputedStyle(each).backgroundImage)")
        assert any(of_data[0] in stripe for stripe in stripes)
        before = page.locator("#timeline table").inner_text()
        assert page.locator("#timeline canvas").count() and "stage" not in page.locator("#program .legend").inner_text()
        page.select_option("#stage-choice", "1")
        assert page.locator("#timeline table").inner_text() != before
        assert page.locator("#timeline").count() == page.locator("#memory").count() == 1
        names = page.locator("#sections a").all_inner_texts()
        assert names[1:6] == ["Pipeline", "Inside a stage", "Timeline", "Memory", "Program"]
