"""The site's settings: `make docs` builds docs/ and notebooks/ into build/site, without network, and fails on a broken link."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

from docutils import nodes
from latex2mathml.converter import convert
from sphinx.application import Sphinx

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # of the reference models

EXAMPLE = "gpt_2_v5e_4x4_auto"

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
    _write_example(ROOT / "docs" / "_extra")


def _write_example(folder: Path) -> None:
    """Writes a report on a strategy of the library with its program."""
    import autoshard
    from benchmarks.models import published

    folder.mkdir(exist_ok=True)
    strategy = autoshard.load(ROOT / "strategies" / f"{EXAMPLE}.json")
    strategy.with_program(published.gpt_2.step, *published.gpt_2.arguments).report().save_html(folder / "example_report.html")


def _inline(writer, node: nodes.math) -> None:
    _draw(writer, node, "inline")


def _block(writer, node: nodes.math_block) -> None:
    _draw(writer, node, "block")


def _draw(writer, node: nodes.Node, display: str) -> None:
    """A formula as MathML, which browsers draw by themselves."""
    writer.body.append(convert(node.astext(), display=display))
    raise nodes.SkipNode
