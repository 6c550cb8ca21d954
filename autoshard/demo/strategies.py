"""The demo's strategies as files: the first entries of the library."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from autoshard.demo.programs import Program
from autoshard.demo.run import SEARCHERS, Progress, search
from autoshard.strategy import Record, save_record

COMMAND = "autoshard demo --write-strategies"


def record_of(program: Program, searcher: str, progress: Progress) -> Record:
    """The record as it is checked in: equal every time, so without the seconds that a search took."""
    record = search(program, searcher, progress).record
    stats = {name: value for name, value in record.stats.items() if not name.endswith("_seconds")}
    return replace(
        record, name=file_name(program, searcher), stats=stats, provenance=replace(record.provenance, command=COMMAND, date=None)
    )


def file_name(program: Program, searcher: str) -> str:
    """The strategy's name in the library."""
    return f"demo_{program.name}_{searcher}"


def write(folder: str | Path, programs: Iterable[Program], progress: Progress) -> list[Path]:
    """Searches every program with every searcher and writes the strategies; returns the files."""
    files = []
    for program in programs:
        for searcher in SEARCHERS:
            files.append(Path(folder) / f"{file_name(program, searcher)}.json")
            save_record(record_of(program, searcher, progress), files[-1])
    return files
