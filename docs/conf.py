"""The site's settings: `make docs` builds docs/ and notebooks/ into build/site, without network, and fails on a broken link."""

from __future__ import annotations

import shutil
import sys
from itertools import product
from pathlib import Path

from docutils import nodes
from latex2mathml.converter import convert
from sphinx.application import Sphinx

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # of the reference models

EXAMPLE = "gpt_2_v5e_4x4_auto"
GALLERY = {
    "gpt_2_v5e_4x4_auto": ("GPT-2", "16 TPU v5e"),
    "llama_3_70b_v5p_4x4x4_auto": ("Llama-3 70B", "64 TPU v5p"),
    "mixtral_8x7b_h100_8x8_auto": ("Mixtral 8x7B", "64 H100"),
    "resnet_50_h100_8x1_auto": ("ResNet-50", "8 H100"),
    "dlrm_criteo_h100_8x1_auto": ("DLRM", "8 H100"),
    "pipeline": ("a GPT of 4 layers, a pipeline of 4 stages", "16 TPU v5e"),
}
PICTURES = {f"report_{width}_{scheme}.png": (width, scheme) for width, scheme in product((1440, 375), ("light", "dark"))}
PLACE = "<!-- Pictures of the report, where the build has a browser. -->"

project = "autoshard"
author = copyright = "The autoshard authors"
extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
    "sphinx_copybutton",
    "sphinxarg.ext",
]
exclude_patterns = ["_build"]
suppress_warnings = ["misc.highlighting_failure"]

myst_enable_extensions = ["dollarmath", "attrs_inline", "colon_fence"]
myst_heading_anchors = 3
nb_execution_mode = "off"  # `make notebooks` runs them and keeps their outputs

default_role = "py:obj"  # names in single backquotes are links where they have an entry
autodoc_member_order = "bysource"
autodoc_preserve_defaults = True
autodoc_typehints = "description"
autodoc_default_options = {"members": True}
napoleon_google_docstring = True
copybutton_exclude = ".linenos, .gp, .go"

html_theme = "furo"
html_title = "autoshard"
html_extra_path = ["_extra"]
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_show_sphinx = False
html_copy_source = False
html_math_renderer = "mathml"


def setup(app: Sphinx) -> None:
    """Adds formulas without a script, the notebooks, and an example of a report."""
    app.add_html_math_renderer("mathml", inline_renderers=(_inline, None), block_renderers=(_block, None))
    shutil.copytree(ROOT / "notebooks", ROOT / "docs" / "notebooks", dirs_exist_ok=True, ignore=lambda *_: [".ipynb_checkpoints"])
    extra = ROOT / "docs" / "_extra"
    _write_reports(extra)
    _photograph(extra)
    app.connect("source-read", _with_pictures)


def _write_reports(folder: Path) -> None:
    """Writes the reports of the gallery, which show what a strategy's file holds, and all of the one that is pictured."""
    import autoshard
    from benchmarks.models import published

    folder.mkdir(exist_ok=True)
    for name in GALLERY:
        strategy = _pipeline() if name == "pipeline" else autoshard.load(ROOT / "strategies" / f"{name}.json")
        if name == EXAMPLE and not strategy.record.report:
            strategy = strategy.with_program(published.gpt_2.step, *published.gpt_2.arguments)
        strategy.report().save_html(folder / f"report_{name}.html")
    shutil.copy(folder / f"report_{EXAMPLE}.html", folder / "example_report.html")


def _pipeline():
    """A strategy in stages, which is searched here."""
    import autoshard
    from benchmarks import models

    step, arguments = models.gpt(layers=4, width=1024, batch=32)
    return autoshard.search(step, *arguments, cluster="v5e:4x4", stages=4, microbatches=8, donate_argnums=0, mesh={"data": 4})


def _photograph(folder: Path) -> None:
    """Takes pictures of the report, narrow and wide, light and dark, if playwright and Chromium are installed."""
    for name in PICTURES:
        (folder / name).unlink(missing_ok=True)
    chromium = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        return
    if chromium is None:
        return
    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        for name, (width, scheme) in PICTURES.items():
            page = browser.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme)
            page.goto((folder / "example_report.html").as_uri())
            page.wait_for_function("document.documentElement.dataset.ready")
            page.screenshot(path=folder / name)
            page.close()
        browser.close()


def _with_pictures(app: Sphinx, docname: str, source: list[str]) -> None:
    """Puts the pictures, if there are any, into the page that has a place for them."""
    shown = [name for name in PICTURES if (ROOT / "docs" / "_extra" / name).exists()]
    images = [f'<img src="{name}" alt="{_described(name)}" style="max-height: 24rem">' for name in shown]
    rows = [f'| <a href="report_{name}.html">{model}</a> | {devices} |' for name, (model, devices) in GALLERY.items()]
    source[0] = source[0].replace("GALLERY\n", "\n".join(["| program | devices |", "|---|---|", *rows, ""]))
    source[0] = source[0].replace(PLACE, f'<a href="example_report.html">{" ".join(images)}</a>' if images else "")


def _described(name: str) -> str:
    width, scheme = PICTURES[name]
    return f"The report on GPT-2, {width} pixels wide, {scheme}"


def _inline(writer, node: nodes.math) -> None:
    _draw(writer, node, "inline")


def _block(writer, node: nodes.math_block) -> None:
    _draw(writer, node, "block")


def _draw(writer, node: nodes.Node, display: str) -> None:
    """A formula as MathML, which browsers draw by themselves."""
    writer.body.append(convert(node.astext(), display=display))
    raise nodes.SkipNode
