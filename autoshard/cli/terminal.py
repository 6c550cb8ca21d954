"""What a command shows: reports and JSON on stdout, progress on stderr."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from autoshard.render import Report


def show(report: Report) -> None:
    """Prints a report: to the width of a terminal and in its colours, or plain."""
    from autoshard.render import print_report, to_text

    if sys.stdout.isatty():
        from rich.console import Console

        print_report(report, Console(file=sys.stdout, highlight=False))
    else:
        print(to_text(report, encoding=sys.stdout.encoding or "utf-8"))


def show_json(value: Any) -> None:
    """Prints a value as JSON, or a text that is JSON already."""
    text = value if isinstance(value, str) else json.dumps(value, indent=1, allow_nan=False)
    print(text.rstrip("\n"))


@contextmanager
def working(quiet: bool = True) -> Iterator[Callable[[str, float], None]]:
    """As `progress`, while programs of the user run: what they print goes to stderr, since stdout is for our output."""
    with redirect_stdout(sys.stderr), progress(quiet) as callback:
        yield callback


@contextmanager
def progress(quiet: bool = False) -> Iterator[Callable[[str, float], None]]:
    """A callback ``(what is being done, fraction done)`` that shows it on stderr (`progress_line`); silent when quiet."""
    if quiet:
        yield lambda what, fraction: None
        return
    from autoshard.render import progress_line

    with progress_line() as callback:
        yield callback
