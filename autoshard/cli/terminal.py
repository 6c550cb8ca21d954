"""What a command shows: reports and JSON on stdout, progress on stderr."""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from autoshard.render import Report, print_report, to_text

PATIENCE_SECONDS = 2.0  # what takes less shows no progress


def show(report: Report) -> None:
    """Prints a report: to the width of a terminal and in its colours, or plain."""
    if sys.stdout.isatty():
        print_report(report, Console(file=sys.stdout, highlight=False))
    else:
        print(to_text(report, encoding=sys.stdout.encoding or "utf-8"))


def show_json(value: Any) -> None:
    """Prints a value as JSON, or a text that is JSON already."""
    text = value if isinstance(value, str) else json.dumps(value, indent=1, allow_nan=False)
    print(text.rstrip("\n"))


@contextmanager
def progress(quiet: bool = False) -> Iterator[Callable[[str, float], None]]:
    """A callback ``(what is being done, fraction done)`` that draws on stderr; silent when quiet or where nobody watches."""
    console = Console(stderr=True)
    if quiet or not console.is_terminal:
        yield lambda what, fraction: None
        return
    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    display = Progress(*columns, console=console, transient=True)
    task = display.add_task("tracing", total=1.0)
    late = threading.Timer(PATIENCE_SECONDS, display.start)
    late.daemon = True
    late.start()
    try:
        yield lambda what, fraction: display.update(task, description=what, completed=fraction)
    finally:
        late.cancel()
        late.join()  # else it could start the display after it was stopped
        display.stop()
