"""The page of a report is one valid file that refers to nothing outside of it."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from importlib.resources import files

import pytest

from autoshard.report.page import SCRIPTS, framed, page

VOID = frozenset(("meta", "br", "input", "link", "img", "hr"))
DATA = {"title": 'a <b> & "c" </script>', "sentences": ["One & two.", "<i>"], "texts": ["</script><script>alert(1)</script>"]}


class Page(HTMLParser):
    """The elements of a page, checked to nest, and the text of its data."""

    def __init__(self, html: str):
        super().__init__()
        self.open: list[str] = []
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.data = self.text = ""
        self.feed(html)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]):
        self.elements.append((tag, dict(attrs)))
        self.open += [] if tag in VOID else [tag]

    def handle_endtag(self, tag: str):
        assert self.open.pop() == tag

    def handle_data(self, data: str):
        if self.elements and self.elements[-1][1].get("id") == "data" and self.open[-1] == "script":
            self.data += data
        elif self.open and self.open[-1] not in ("script", "style"):
            self.text += data


@pytest.fixture(scope="module")
def html() -> str:
    return page(DATA)


def test_elements_nest_and_close(html):
    """Whatever the texts of the program are."""
    found = Page(html)
    assert found.open == []
    tags = [tag for tag, _ in found.elements]
    assert tags.count("script") == 3 and tags.count("main") == tags.count("h1") == tags.count("title") == 1
    ids = [attributes["id"] for _, attributes in found.elements if "id" in attributes]
    assert len(ids) == len(set(ids))


def test_the_data_comes_back(html):
    """As it was given, though its texts end scripts."""
    assert json.loads(Page(html).data) == DATA


def test_texts_are_escaped(html):
    """Title and sentences are text."""
    text = Page(html).text
    assert DATA["title"] in text and all(sentence in text for sentence in DATA["sentences"])


def test_nothing_comes_from_elsewhere(html):
    """No attribute or style loads a file, the content's policy forbids it, and scripts have no call that could."""
    found = Page(html)
    loaded = [v for _, attributes in found.elements for k, v in attributes.items() if k in ("src", "href", "srcset", "data", "action")]
    assert [each for each in loaded if not (each or "").startswith("#")] == []
    assert any(attributes.get("content", "").startswith("default-src 'none'") for _, attributes in found.elements)
    folder = files("autoshard.report") / "assets"
    own = "".join((folder / f"{name}.js").read_text() for name in SCRIPTS)
    assert not re.search(r"\bfetch\(|XMLHttpRequest|\bimport\b|innerHTML|eval\(", own)
    addresses = set(re.findall(r"https?://[^\s\"'`)]+", own + (folder / "report.css").read_text() + (folder / "report.html").read_text()))
    assert addresses == {"http://www.w3.org/2000/svg"}  # the name of a format
    assert "url(" not in (folder / "report.css").read_text() and "@import" not in html


def test_every_asset_is_used():
    """The folder has the template, the style and the scripts, and the vendored library names its version and licence."""
    folder = files("autoshard.report")
    assert {each.name for each in (folder / "assets").iterdir()} == {"report.html", "report.css", *(f"{name}.js" for name in SCRIPTS)}
    told, library = (folder / "vendor" / "README.md").read_text(), (folder / "vendor" / "uPlot.iife.min.js").read_text()
    version = re.search(r"uPlot \(v([\d.]+)\)", library)
    assert version and version[1] in told
    assert "MIT" in (folder / "vendor" / "uPlot.LICENSE").read_text()


def luminance(colour: str) -> float:
    """As WCAG 2.1 defines it."""
    parts = [int(colour[k : k + 2], 16) / 255 for k in (1, 3, 5)]
    red, green, blue = (part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_texts_stand_out(scheme):
    """Each colour of text on each background that it stands on: 4.5 to 1 at least (WCAG 2.1, AA); warnings are as readable."""
    style = (files("autoshard.report") / "assets" / "report.css").read_text(encoding="utf-8")
    light, dark = re.findall(r":root \{(.*?)\}", style, re.DOTALL)[:2]
    colours = dict(re.findall(r"--([\w-]+): (#[0-9a-f]{6});", light if scheme == "light" else dark))
    for text in ("fg", "muted", "accent", "warn"):
        for background in ("bg", "card"):
            low, high = sorted((luminance(colours[text]), luminance(colours[background])))
            assert (high + 0.05) / (low + 0.05) >= 4.5, (text, background)


def test_a_notebook_shows_it_in_a_frame(html):
    """Its style and script stay apart from the notebook's."""
    found = Page(framed(html))
    ((tag, attributes),) = found.elements
    assert tag == "iframe" and attributes["srcdoc"] == html and attributes["sandbox"] == "allow-scripts"
