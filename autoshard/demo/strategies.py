"""Files of the demo's strategies, for the library."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from autoshard.api.strategy import Strategy, named
from autoshard.demo.programs import Program
from autoshard.demo.run import SEARCHERS, Progress, search

COMMAND = "autoshard demo --write-strategies"


def checked_in(program: Program, searcher: str, progress: Progress) -> Strategy:
    """The strategy as in the library: a reproducible file, with the command that makes it."""
    return named(search(program, searcher, progress), f"demo_{program.name}_{searcher}", COMMAND)


def write(folder: str | Path, programs: Iterable[Program], progress: Progress) -> list[Path]:
    """Searches every program with every searcher and writes the strategies; returns the files."""
    Path(folder).mkdir(parents=True, exist_ok=True)
    files = []
    for program in programs:
        for searcher in SEARCHERS:
            strategy = checked_in(program, searcher, progress)
            files.append(Path(folder) / f"{strategy.record.name}.json")
            strategy.save(files[-1])
    return files
