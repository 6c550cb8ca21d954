"""The progress bar that all benchmarks draw."""

from __future__ import annotations

import sys

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, TextColumn, TimeElapsedColumn

COLUMNS = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())


def progress_bar(quiet: bool = False, columns: tuple[ProgressColumn, ...] = COLUMNS) -> Progress:
    """A bar on stderr that leaves nothing behind; none where it is to be quiet or nobody watches."""
    return Progress(*columns, console=Console(stderr=True), transient=True, disable=quiet or not sys.stderr.isatty())
