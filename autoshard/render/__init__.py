"""Reports as plain records, rendered in a terminal and in a notebook.

A `Report` is a title and parts. `to_text` and `print_report` render it through rich, `to_html` as self-contained HTML (inline styles, no
scripts) that is readable on light and dark pages. Numbers are formatted by the ``format_`` functions alone.
"""

from __future__ import annotations

import io
import math
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from html import escape
from typing import TYPE_CHECKING, TextIO

from autoshard.render.parts import Bar, Bars, Cell, Drawing, Gallery, Heading, Paragraph, Part, Picture, Table, rgb

if TYPE_CHECKING:
    from rich.console import Console

PIPE_WIDTH = 120  # columns of a report that does not go to a terminal


# -- numbers --------------------------------------------------------------------------------------------------------------


def format_seconds(seconds: float) -> str:
    """The duration with three significant digits and its unit.

    >>> format_seconds(0.0123), format_seconds(4.2e-6), format_seconds(75), format_seconds(0), format_seconds(1.6e-13)
    ('12.3 ms', '4.20 µs', '75.0 s', '0 s', '< 1 ns')
    """
    if 0 < abs(seconds) < 0.9995e-9:
        return "< 1 ns"
    return _scaled(seconds, "s", (("n", 1e-9), ("µ", 1e-6), ("m", 1e-3), ("", 1.0)))


def format_between(low: float, high: float) -> str:
    """Two durations as one range, in one unit if they share it.

    >>> format_between(0.0123, 0.0168), format_between(0.9, 1.2)
    ('12.3 to 16.8 ms', '900 ms to 1.20 s')
    """
    one, other = format_seconds(low), format_seconds(high)
    same = one.rpartition(" ")[2] == other.rpartition(" ")[2]
    return f"{one.rpartition(' ')[0] if same else one} to {other}"


def format_bytes(n: float) -> str:
    """The number of bytes with three significant digits, in powers of 1000.

    >>> format_bytes(999), format_bytes(1.5e9), format_bytes(999_999)
    ('999 B', '1.50 GB', '1.00 MB')
    """
    return f"{n:.0f} B" if abs(n) < 999.5 else _scaled(n, "B", (("k", 1e3), ("M", 1e6), ("G", 1e9), ("T", 1e12), ("P", 1e15)))


def format_flops(flops: float) -> str:
    """The number of floating point operations with three significant digits.

    >>> format_flops(2.5e12)
    '2.50 TFLOP'
    """
    units = (("", 1.0), ("k", 1e3), ("M", 1e6), ("G", 1e9), ("T", 1e12), ("P", 1e15), ("E", 1e18))
    return f"{flops:.0f} FLOP" if abs(flops) < 999.5 else _scaled(flops, "FLOP", units)


def format_count(n: float) -> str:
    """The whole number with thousands separated.

    >>> format_count(37000)
    '37,000'
    """
    return f"{n:,.0f}"


def format_percent(share: float) -> str:
    """The share as a percentage; small ones keep two digits.

    >>> format_percent(0.25), format_percent(0.0012), format_percent(0.0)
    ('25 %', '0.12 %', '0 %')
    """
    percent = 100 * share
    return f"{percent:.0f} %" if percent == 0 or abs(percent) >= 9.95 else f"{percent:.2g} %"


def format_alternatives(numbers: Sequence[int], most: int = 8) -> str:
    """The numbers to choose from; of many the first ones.

    >>> format_alternatives([2, 4, 8]), format_alternatives([3]), format_alternatives(range(2, 99), 3)
    ('2, 4 or 8', '3', '2, 3, 4 or another of 97')
    """
    *others, last = map(str, numbers[:most] if len(numbers) <= most else (*numbers[:most], f"another of {len(numbers)}"))
    return f"{', '.join(others)} or {last}" if others else last


def _scaled(x: float, unit: str, prefixes: tuple[tuple[str, float], ...]) -> str:
    if x == 0 or not math.isfinite(x):
        return f"{x:g} {unit}"
    prefix, scale = next(((p, s) for p, s in reversed(prefixes) if abs(x) >= 0.9995 * s), prefixes[0])
    scaled = x / scale
    digits = 2 if abs(scaled) < 9.995 else 1 if abs(scaled) < 99.95 else 0
    return f"{scaled:.{digits}f} {prefix}{unit}"




@dataclass(frozen=True, slots=True)
class Report:
    """A title and parts; `str` gives text, and Jupyter shows HTML.

    >>> print(Report("A report", (Table(("mesh", ">time"), (("data=8", "12.3 ms"),)),)))
    A report
    <BLANKLINE>
     mesh        time
    ──────────────────
     data=8   12.3 ms
    """

    title: str
    parts: tuple[Part, ...]

    def __str__(self) -> str:
        return to_text(self)

    def _repr_html_(self) -> str:
        return to_html(self)


class Reported:
    """What prints as its report, and shows it in Jupyter."""

    __slots__ = ()

    def report(self) -> Report:
        """What it shows."""
        raise NotImplementedError

    def __str__(self) -> str:
        return str(self.report())

    def _repr_html_(self) -> str:
        return self.report()._repr_html_()


# -- text -----------------------------------------------------------------------------------------------------------------


def to_text(report: Report, width: int | None = None, encoding: str = "utf-8") -> str:
    """The report as plain text without colour codes, at most ``width`` columns wide (120 by default), in characters of the encoding."""
    from rich.console import Console

    file = io.TextIOWrapper(io.BytesIO(), encoding=encoding, errors="replace", newline="\n")
    print_report(report, Console(file=file, width=width or PIPE_WIDTH, color_system=None, force_terminal=False, legacy_windows=False))
    file.seek(0)
    return "\n".join(line.rstrip() for line in file.read().splitlines())


def print_report(report: Report, console: Console) -> None:
    """Prints the report on a console of rich, in colour on a terminal."""
    from autoshard.render.terminal import lines

    for line in lines(report.title, report.parts):
        console.print(line)


# -- html -----------------------------------------------------------------------------------------------------------------

LINE = "rgba(128,128,128,0.45)"  # visible on white and on black
FILL = "#4c8bf5"


def to_html(report: Report) -> str:
    """The report as one HTML element with inline styles; all text is escaped."""
    parts = "".join(_html(part) for part in report.parts)
    return (
        '<div style="font-family:system-ui,sans-serif;font-size:13px;line-height:1.45;color:inherit;max-width:72em">'
        f'<div style="font-size:1.25em;font-weight:600">{escape(report.title)}</div>{parts}</div>'
    )


def _html(part: Part) -> str:
    match part:
        case Heading(text):
            return f'<div style="font-size:1.08em;font-weight:600;margin:1.1em 0 0.3em">{escape(text)}</div>'
        case Paragraph(text):
            return f'<p style="margin:0.4em 0;white-space:pre-line">{escape(text)}</p>'
        case Table(columns, rows, notes):
            return _html_table(columns, rows) + "".join(f'<div style="opacity:0.7">{escape(note)}</div>' for note in notes)
        case Bars(bars):
            return f'<table style="border-collapse:collapse;margin:0.4em 0;color:inherit">{"".join(map(_html_bar, bars))}</table>'
        case Drawing(text):
            return f'<pre style="margin:0.5em 0;overflow-x:auto;color:inherit;background:transparent">{escape(text)}</pre>'
        case Gallery(pictures):
            return f'<div style="display:flex;flex-wrap:wrap;gap:1.2em 2em;margin:0.5em 0">{"".join(map(_html_picture, pictures))}</div>'


def _html_table(columns: tuple[str, ...], rows: tuple[tuple[str, ...], ...]) -> str:
    sides = ["right" if column.startswith(">") else "left" for column in columns]

    def line(tag: str, cells: tuple[str, ...], border: str) -> str:
        style = f"padding:0.2em 0.8em 0.2em 0;vertical-align:top;white-space:pre-line;border-bottom:1px solid {border}"
        return (
            "<tr>"
            + "".join(f'<{tag} style="{style};text-align:{side}">{escape(cell)}</{tag}>' for cell, side in zip(cells, sides, strict=True))
            + "</tr>"
        )

    head = line("th", tuple(column.removeprefix(">") for column in columns), LINE) if any(columns) else ""
    body = "".join(line("td", row, "rgba(128,128,128,0.15)") for row in rows)
    return (
        '<table style="border-collapse:collapse;margin:0.4em 0;color:inherit;background:transparent">'
        f"<thead>{head}</thead><tbody>{body}</tbody></table>"
    )


def _html_bar(bar: Bar) -> str:
    width = max(0.0, min(1.0, bar.share)) * 100
    return (
        f'<tr><td style="text-align:left;padding:0.15em 1em 0.15em 0">{escape(bar.label)}</td>'
        f'<td style="width:24em;padding:0.15em 0"><div style="background:rgba(128,128,128,0.2);width:100%">'
        f'<div style="background:{FILL};height:0.9em;width:{width:.1f}%"></div></div></td>'
        f'<td style="text-align:right;padding:0.15em 0 0.15em 1em">{escape(bar.text)}</td></tr>'
    )


def _html_picture(picture: Picture) -> str:
    def block(cell: Cell) -> str:
        colour = "" if cell.hue is None else f"background:{rgb(cell.hue)};color:#111;"
        return (
            f'<td style="{colour}border:1px solid {LINE};min-width:2.2em;padding:0.35em 0.5em;text-align:center;'
            f'font-size:0.85em">{escape(cell.text)}</td>'
        )

    rows = "".join("<tr>" + "".join(map(block, row)) + "</tr>" for row in picture.rows)
    caption = f'<div style="opacity:0.7">{escape(picture.caption)}</div>' if picture.caption else ""
    return (
        f'<div><div style="font-weight:600;white-space:pre-line">{escape(picture.title)}</div>'
        f'<table style="border-collapse:collapse;margin:0.3em 0;color:inherit">{rows}</table>{caption}</div>'
    )


# -- progress -------------------------------------------------------------------------------------------------------------

DELAY_SECONDS = 2.0  # before the line appears
FRAME_SECONDS = 0.2
LOG_SECONDS = 10.0  # between two lines of a log
LEAST_DONE = 0.05  # share of the work below which no remaining time is shown


@contextmanager
def shown(progress: Callable[[str, float], None] | bool) -> Iterator[Callable[[str, float], None]]:
    """The callback that is given; the one that draws a line where it is True."""
    if callable(progress):
        yield progress
    elif progress:
        with progress_line() as callback:
            yield callback
    else:
        yield lambda _, __: None


@contextmanager
def progress_line(file: TextIO | None = None) -> Iterator[Callable[[str, float], None]]:
    """A callback ``(activity, fraction done)`` that keeps a progress line up to date, with the time taken and an estimate of what remains.

    The line is drawn from the third second on, on stderr if that is a terminal or a notebook's, or in ``file``, and erased at the end.
    Other outputs, such as a job's log, get a line of their own every ten seconds, where something else is done by then.
    """
    out = sys.stderr if file is None else file
    line, done = _ProgressLine(time.monotonic()), threading.Event()

    def log() -> None:
        told = ""
        while not done.wait(LOG_SECONDS):
            if told != (told := line.activity):
                out.write(f"autoshard: {told}\n")
                out.flush()

    def draw() -> None:
        wait, width = DELAY_SECONDS, 0
        while not done.wait(wait):
            text = line.text(time.monotonic(), _columns(out))
            width = max(width, len(text))
            out.write("\r" + text.ljust(width))
            out.flush()
            wait = FRAME_SECONDS
        if width:
            out.write("\r" + " " * width + "\r")
            out.flush()

    is_watched = file is not None or out.isatty() or type(out).__module__.startswith("ipykernel")
    thread = threading.Thread(target=draw if is_watched else log, daemon=True)
    thread.start()
    try:
        yield line.advance
    finally:
        done.set()
        thread.join()


@dataclass(slots=True)
class _ProgressLine:
    """When all of it started, on the monotonic clock, and when what can be estimated did; the current activity, and the fraction done."""

    begun: float
    started: float = field(init=False)
    activity: str = "tracing"
    fraction: float = 0.0

    def __post_init__(self) -> None:
        self.started = self.begun

    def advance(self, activity: str, fraction: float) -> None:
        if self.activity == "tracing":
            self.started = time.monotonic()  # tracing time does not predict search time
        self.activity, self.fraction = activity, max(fraction, self.fraction)

    def text(self, now: float, width: int = PIPE_WIDTH) -> str:
        """The line at a time on the monotonic clock.

        >>> _ProgressLine(0.0, "mesh data=8", 0.25).text(3.0)
        '[#####...............]  25 % in 3 s, about 9 s left: mesh data=8'
        """
        filled = round(20 * self.fraction)
        seconds = (now - self.started) * (1 / max(self.fraction, LEAST_DONE) - 1)
        left = f", about {seconds:.0f} s left" if self.fraction >= LEAST_DONE else ""
        done = f"{100 * self.fraction:3.0f} % in {now - self.begun:.0f} s"
        return f"[{'#' * filled}{'.' * (20 - filled)}] {done}{left}: {self.activity}"[:width]


def _columns(out: TextIO) -> int:
    """Columns that a line may take without being broken into two, which could not be drawn over."""
    try:
        return min(PIPE_WIDTH, os.get_terminal_size(out.fileno()).columns - 1)
    except (OSError, ValueError):  # no terminal: a notebook, a file
        return PIPE_WIDTH
