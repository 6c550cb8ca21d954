"""The report as one HTML file that needs no network: template, style, libraries, script and data in one text."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from html import escape
from importlib.resources import files
from typing import Any

SCRIPTS = ("base", "table", "gantt", "timeline", "memory", "mesh", "program", "tables", "pipeline", "main")
"""The files of ``assets`` that make the script, in order."""


def page(data: Mapping[str, Any]) -> str:
    """The HTML of a report's data (`autoshard.report.data.to_data`)."""
    title = str(data["title"])
    fields = {
        "title": escape(title),
        "sentences": "\n".join(f'<p class="lead">{escape(sentence)}</p>' for sentence in data["sentences"]),
        "style": _asset("vendor", "uPlot.min.css") + _asset("assets", "report.css"),
        "vendor": _asset("vendor", "uPlot.iife.min.js"),
        "script": "\n".join(_asset("assets", f"{name}.js") for name in SCRIPTS),
        "data": script_json(data),
    }
    return re.sub(r"\{\{(\w+)\}\}", lambda match: fields[match[1]], _asset("assets", "report.html"))


def script_json(data: Mapping[str, Any]) -> str:
    """JSON that stands inside a script element: no text of it can end the element.

    >>> script_json({"name": "</script>"})
    '{"name":"\\\\u003c/script>"}'
    """
    return json.dumps(data, separators=(",", ":"), allow_nan=False, ensure_ascii=False).replace("<", "\\u003c")


def framed(html: str) -> str:
    """The page in a frame, as a notebook shows it: its style and script stay apart from the notebook's."""
    style = "width:100%;height:760px;border:1px solid #8884;border-radius:8px"
    return f'<iframe title="autoshard report" sandbox="allow-scripts" style="{style}" srcdoc="{escape(html)}"></iframe>'


def _asset(folder: str, name: str) -> str:
    return (files("autoshard.report") / folder / name).read_text(encoding="utf-8")
