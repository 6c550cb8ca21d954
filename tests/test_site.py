"""The site: it builds without a warning, so every link leads somewhere; it names every public name; and the Python of its pages runs."""

from __future__ import annotations

import os
import re
import runpy
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

import autoshard
from autoshard.cli.commands import parser

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
PAGES = sorted(path.relative_to(DOCS).as_posix() for folder in (DOCS, DOCS / "recipes") for path in folder.glob("*.md"))
ELSEWHERE = ("parameter_server.md", "manual.md")  # run in tests/parameter_server and tests/test_manual_collectives.py
ALONE = ("distributed.md",)  # in a process of its own, since it starts the devices
QUICK = ("index.md", "distributed.md", "padding.md", "explain.md", "testing.md", "modes.md", "coming_from_maxtext.md", "experts.md")


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The folder of the built site."""
    out = tmp_path_factory.mktemp("build") / "site"
    command = [sys.executable, "-m", "sphinx", "-q", "-W", "--keep-going", "-b", "html", "docs", str(out)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "TF_CPP_MIN_LOG_LEVEL": "3"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return out


@pytest.mark.slow
def test_every_public_name_is_in_the_reference(site):
    """Each has an entry that links reach, methods and fields among them; each command has its options."""
    text = "".join(path.read_text(encoding="utf-8") for path in (site / "reference").glob("*.html"))
    entries = set(re.findall(r'id="(?:module-)?autoshard\.(?:errors\.)?([\w.]+)"', text))
    assert set(autoshard.__all__) <= entries
    assert {"Strategy.apply", "Strategy.explain", "Cluster.parse", "checkpoint.save"} <= entries
    commands = next(action.choices for action in parser()._actions if action.dest == "command")
    assert all(f'id="autoshard-{name}"' in text or f'id="{name}"' in text for name in commands)


@pytest.mark.slow
def test_pages_open_offline(site):
    """No page, notebooks included, has a script, style, font or picture of another host."""
    for page in site.rglob("*.html"):
        found = re.findall(r'<(?:script|link|img)[^>]+(?:src|href)="(https?://[^"]+)"', page.read_text(encoding="utf-8"))
        assert not found, page


@pytest.mark.slow
def test_the_report_is_pictured_where_there_is_a_browser(site):
    """Narrow and wide, light and dark, on the page about it; without a browser the page has no pictures, and the example all the same."""
    shown = re.findall(r'<img src="(report_\w+\.png)"', (site / "explain.html").read_text(encoding="utf-8"))
    has_browser = find_spec("playwright") and any(map(shutil.which, ("chromium", "chromium-browser", "google-chrome")))
    assert len(shown) == (4 if has_browser else 0) and all((site / name).stat().st_size > 10_000 for name in shown)
    assert (site / "example_report.html").exists()


@pytest.mark.slow
def test_the_gallery_opens(site):
    """Six reports, each of which the build has written."""
    shown = re.findall(r'href="(report_\w+\.html)"', (site / "gallery.html").read_text(encoding="utf-8"))
    assert len(shown) == 6 and all((site / name).stat().st_size > 50_000 for name in shown)


def blocks(page: str, language: str = "python") -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", (DOCS / page).read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)


RUN = [page for page in PAGES if blocks(page) and page not in ELSEWHERE]


@pytest.mark.parametrize("page", PAGES)
def test_a_page_begins_with_what_its_reader_will_be_able_to_do(page):
    """One short paragraph, after the title and before anything else."""
    title, first, *_ = (DOCS / page).read_text(encoding="utf-8").split("\n\n")
    assert title.startswith("# ") and "\n" not in title
    assert re.match(r"On this page you |With autoshard you ", first) and len(first.split()) <= 60


@pytest.mark.parametrize("page", PAGES)
def test_code_fits_its_box(page):
    """No line of code has more than 80 columns, and no page's indented block hides one."""
    text = (DOCS / page).read_text(encoding="utf-8")
    assert "  ```python" not in text
    wide = [line for language in ("python", "console", "text", "json") for block in blocks(page, language) for line in block.splitlines()]
    assert not [line for line in wide if len(line) > 80]


@pytest.mark.parametrize("page", [pytest.param(page, marks=[pytest.mark.slow] * (page not in QUICK)) for page in RUN])
def test_the_python_of_a_page_runs(page, tmp_path, monkeypatch, capsys):
    """Its blocks, one after the other, in an empty folder on 8 virtual devices, with the program of the pages beside them."""
    code = "\n".join(blocks(page))
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(DOCS / "_static"))
    if page in ALONE:
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        subprocess.run([sys.executable, "-c", code], env=environment, check=True, capture_output=True)
        return
    (tmp_path / "page.py").write_text(code, encoding="utf-8")  # source lines are read from files
    runpy.run_path("page.py")
    shown = capsys.readouterr().out
    for line in code.splitlines():  # a comment behind a print that begins with a value says what it prints
        said = re.search(r"^print\(.*\)\s+# ((?:P\(|\{)[^#]*?[)}])(?=$|:| twice)", line)
        assert said is None or said[1] in shown, (line, shown)


def test_drawings_are_those_that_the_script_makes():
    """Each of docs/_static, and every page's picture exists."""
    found = runpy.run_path(str(DOCS / "pictures.py"))
    for name, draw in found["PICTURES"].items():
        assert (DOCS / "_static" / f"{name}.svg").read_text(encoding="utf-8") == draw(), "python docs/pictures.py writes them again"
    shown = {name for page in PAGES for name in re.findall(r"\]\((_static/[\w.]+)\)", (DOCS / page).read_text(encoding="utf-8"))}
    assert all((DOCS / name).exists() for name in shown) and {f"_static/{name}.svg" for name in found["PICTURES"]} <= shown
