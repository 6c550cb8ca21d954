"""``python -m benchmarks.evidence [NAME ...] [--all] [--record]``: the rows, or the figures of their programs beside those expected."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterable, Sequence

from autoshard.cli.terminal import progress, show
from autoshard.cluster import Cluster
from autoshard.errors import CompilerError
from autoshard.render import Paragraph, Report, Table
from autoshard.verify import topology_of
from autoshard.verify.aot import COMPILERS
from benchmarks.evidence.measures import Figure
from benchmarks.evidence.programs import PROGRAMS
from benchmarks.evidence.rows import Row, read_rows, record

SUMMARY = "Do compilers still do what autoshard.compilers says of them?"


def main(argv: Sequence[str] | None = None) -> int:
    """Lists rows, or measures their programs; the exit code is 1 where a figure differs from what is expected, or was not to be had."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.evidence", description=SUMMARY)
    parser.add_argument("names", nargs="*", metavar="NAME", help="rows to compile the programs of; listed without any")
    parser.add_argument("--all", action="store_true", help="compile the programs of every row: a quarter of an hour")
    parser.add_argument("--record", action="store_true", help="keep what is observed as what is expected")
    options = parser.parse_args(argv)
    rows = read_rows()
    unknown = [name for name in options.names if name not in rows]
    if unknown:
        parser.error(f"rows are {', '.join(map(repr, rows))}; got {', '.join(map(repr, unknown))}")
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    chosen = [row for row in rows.values() if options.all or row.name in options.names]
    if not chosen:
        show(listed(rows.values()))
        return 0
    return max(compared(row, options.record) for row in chosen)


def listed(rows: Iterable[Row]) -> Report:
    """Every row with its observation."""
    body = tuple((row.name, row.observation, row.constant.rpartition(".")[2], str(len(row.expected))) for row in rows)
    how = Paragraph("python -m benchmarks.evidence NAME compiles a row's programs and compares their figures.")
    return Report(SUMMARY, (Table(("name", "observation", "supports", ">programs"), body), how))


def compared(row: Row, keep: bool) -> int:
    """Measures a row's programs and shows their figures beside those expected; 1 where they differ and are not to be kept."""
    observed: dict[str, Figure] = {}
    try:
        with progress() as tell:
            for n, name in enumerate(row.expected):
                tell(f"{row.name}: {name}", n / len(row.expected))
                observed[name] = PROGRAMS[name].figure()
    except CompilerError as error:
        show(Report(row.name, (Paragraph(f"Could not run: {error}"),)))
        return 1
    table = tuple(
        (name, PROGRAMS[name].measure.name, str(row.expected[name]), str(found), "" if found == row.expected[name] else "differs")
        for name, found in observed.items()
    )
    compiler = compiler_of(row)
    version = row.compiler if compiler == row.compiler else f"{row.compiler}; compiled here by {compiler}"
    figures = Table(("program", "figure", ">expected", ">observed", ""), table)
    show(Report(row.name, (Paragraph(row.observation), figures, Paragraph(f"{row.constant}; {version}"))))
    if keep:
        record(row, compiler, observed)
    return int(not keep and observed != row.expected)


def compiler_of(row: Row) -> str:
    """The compilers here of a row's programs, with their versions, in one line."""
    clusters = (Cluster.parse(PROGRAMS[name].on) for name in row.expected)
    return " and ".join(dict.fromkeys(COMPILERS[topology_of(cluster).platform].version for cluster in clusters))


if __name__ == "__main__":
    sys.exit(main())
