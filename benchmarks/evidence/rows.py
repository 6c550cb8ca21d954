"""Rows of evidence: what was observed of a compiler, the constant that rests on it, and the figures of the programs that show it."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import autoshard.compilers
from benchmarks.evidence.measures import Figure

FOLDER = Path(autoshard.compilers.__file__).parent / "evidence"


@dataclass(frozen=True, slots=True)
class Row:
    """A fact about a compiler.

    Attributes:
        name: as the comment beside its constant has it.
        observation: one sentence.
        constant: the dotted name of a constant or function.
        compiler: which, and its version, as in ``libtpu 0.0.42.1``.
        expected: by program the figure that this version gives.
        command: shows it.
    """

    name: str
    observation: str
    constant: str
    compiler: str
    expected: dict[str, Figure]
    command: str


def read_rows() -> dict[str, Row]:
    """All rows by name.

    >>> read_rows()["the smallest product"].constant
    'autoshard.compilers.tpu.kernel_traffic.PRODUCT_STARTS'
    """
    rows = [Row(**row) for file in sorted(FOLDER.glob("*.json")) for row in json.loads(file.read_text())]
    return {row.name: row for row in rows}


def record(row: Row, compiler: str, observed: dict[str, Figure]) -> None:
    """Replaces what is expected of a row's programs."""
    for file in sorted(FOLDER.glob("*.json")):
        rows = [Row(**each) for each in json.loads(file.read_text())]
        if row.name in {each.name for each in rows}:
            write_rows(file, (replace(each, compiler=compiler, expected=observed) if each.name == row.name else each for each in rows))


def write_rows(file: Path, rows: Iterable[Row]) -> None:
    """Writes a file of rows."""
    file.write_text(json.dumps([asdict(row) for row in rows], indent=2, ensure_ascii=False) + "\n")
