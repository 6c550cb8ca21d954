"""The site: it builds without a warning, so every link leads somewhere; it names every public name; and the Python of its pages runs."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

import autoshard
from autoshard.cli.commands import parser

ROOT = Path(__file__).resolve().parents[1]
RUN = ["tutorial", "explain", "testing", "experts", "long_context", "serving", "coming_from_maxtext"]


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The folder of the built site."""
    out = tmp_path_factory.mktemp("build") / "site"
    command = [sys.executable, "-m", "sphinx", "-q", "-W", "--keep-going", "-b", "html", "docs", str(out)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "TF_CPP_MIN_LOG_LEVEL": "3"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return out


def test_every_public_name_is_in_the_reference(site):
    """Each has an entry that links reach, methods and fields among them; each command has its options."""
    text = "".join(path.read_text(encoding="utf-8") for path in (site / "reference").glob("*.html"))
    entries = set(re.findall(r'id="(?:module-)?autoshard\.(?:errors\.)?([\w.]+)"', text))
    assert set(autoshard.__all__) <= entries
    assert {"Strategy.apply", "Strategy.explain", "Cluster.parse", "checkpoint.save"} <= entries
    commands = next(action.choices for action in parser()._actions if action.dest == "command")
    assert all(f'id="autoshard-{name}"' in text or f'id="{name}"' in text for name in commands)


def test_pages_open_offline(site):
    """No page, notebooks included, has a script, style, font or picture of another host."""
    for page in site.rglob("*.html"):
        found = re.findall(r'<(?:script|link|img)[^>]+(?:src|href)="(https?://[^"]+)"', page.read_text(encoding="utf-8"))
        assert not found, page


def test_the_report_is_pictured_where_there_is_a_browser(site):
    """Narrow and wide, light and dark, on the page about it; without a browser the page has no pictures, and the example all the same."""
    shown = re.findall(r'<img src="(report_\w+\.png)"', (site / "explain.html").read_text(encoding="utf-8"))
    has_browser = find_spec("playwright") and any(map(shutil.which, ("chromium", "chromium-browser", "google-chrome")))
    assert len(shown) == (4 if has_browser else 0) and all((site / name).stat().st_size > 10_000 for name in shown)
    assert (site / "example_report.html").exists()


@pytest.mark.parametrize("page", RUN)
def test_the_python_of_a_page_runs(page, tmp_path):
    """Its blocks, one after the other, in an empty folder on 8 virtual devices."""
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / f"{page}.md").read_text(encoding="utf-8"), flags=re.DOTALL)
    (tmp_path / "page.py").write_text("\n".join(blocks), encoding="utf-8")
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "XLA_FLAGS": "--xla_force_host_platform_device_count=8"}
    done = subprocess.run([sys.executable, "page.py"], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert blocks and done.returncode == 0, done.stderr
    for line in "\n".join(blocks).splitlines():  # a comment behind a print that begins with a value says what it prints
        said = re.search(r"^print\(.*\)\s+# ((?:P\(|\{)[^#]*?[)}])(?=$|:| twice)", line)
        assert said is None or said[1].split(" twice")[0] in done.stdout, (line, done.stdout)
