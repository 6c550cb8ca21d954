"""``autoshard strategies``: the strategies that come with autoshard, listed, shown, verified, and made anew."""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Iterator
from fnmatch import fnmatchcase
from typing import Any

from autoshard.cli.options import command
from autoshard.cli.terminal import show, show_json

ACTIONS = ("list", "show", "verify", "refresh")


def add(commands) -> None:
    """Adds the subcommand's options."""
    what = "list, show, verify or make anew the strategies that come with autoshard"
    parser = command(commands, "strategies", run, what, "autoshard strategies list 'gpt*' --cluster 'v5e*'")
    parser.description = (
        f"{parser.description} verify says whether programs and predicted costs are still those of the files, with exit code 1 where one "
        "is not. refresh searches these again, by the commands in the files, one after the other; verify and refresh run where the "
        "programs can be imported, as in a checkout."
    )
    parser.add_argument(
        "names",
        metavar="ACTION NAME",
        nargs="*",
        help="list (default), show, verify or refresh; names or patterns of strategies, all unless given",
    )
    parser.add_argument("--cluster", metavar="PATTERN", default="*", help="those on such clusters only, as v5e*")
    parser.add_argument("--all", action="store_true", help="refresh: also what is reproduced")


def run(options: argparse.Namespace) -> int:
    """Does what is asked."""
    action, *patterns = (
        options.names if options.names[:1] and options.names[0] in ACTIONS else ("show" if options.names else "list", *options.names)
    )
    records = _chosen(patterns, options.cluster)
    if action == "verify":
        return _verify(records, options)
    if action == "refresh":
        return _refresh(records, options)
    if options.json:
        from autoshard import library
        from autoshard.api.explain import summary

        ratios = library.against_expert(_chosen((), "*"))
        show_json([{"strategy": name, **summary(record), "against_expert": ratios[name]} for name, record in records.items()])
    elif action == "show":
        from autoshard.api.explain import explain

        for record in records.values():
            show(explain(record))
    else:
        show(_table(records))
    return 0


def _chosen(patterns: list[str] | tuple[str, ...], cluster: str) -> dict[str, Any]:
    """The library's strategies of these names or patterns, and on such clusters; a name that there is not is refused."""
    from autoshard import library

    known = library.names()
    chosen = [name for pattern in patterns for name in _matching(pattern, known)] if patterns else list(known)
    records = {name: library.load(name) for name in dict.fromkeys(chosen)}
    return {name: record for name, record in records.items() if fnmatchcase(record.cluster["name"], cluster)}


def _matching(pattern: str, known: tuple[str, ...]) -> list[str]:
    return [name for name in known if fnmatchcase(name, pattern)] or [pattern]  # a name that is unknown is refused when it is loaded


def _table(records: dict[str, Any]):
    """A line a strategy."""
    from autoshard import library
    from autoshard.render import Report, Table, format_bytes, format_percent, format_seconds

    ratios = library.against_expert(_chosen((), "*"))
    rows = tuple(
        (
            name,
            record.cluster["name"],
            str(record.mesh),
            format_seconds(record.cost.makespan_seconds),
            format_bytes(record.cost.peak_bytes),
            format_percent(record.gap) if record.lower_bound_seconds else "",
            "" if ratios[name] is None or record.searcher.name in library.EXPERTS else f"{ratios[name]:.2f} x",
        )
        for name, record in records.items()
    )
    notes = (
        "gap: how far the step time may be from the optimum on this mesh, where that is known.",
        "expert: step time in multiples of that of the sharding that is usual for the model, on the same cluster.",
    )
    columns = ("strategy", "cluster", "mesh", ">step time", ">peak", ">gap", ">expert")
    return Report("Strategies of the library", (Table(columns, rows, notes),))


def _verify(records: dict[str, Any], options: argparse.Namespace) -> int:
    found = []
    for name, words in _reproduced(records):
        found.append({"strategy": name, "reproduced": None if words is None else not words, "differences": words or []})
        if not options.json:
            print(f"{name}: {UNCHECKED if words is None else '; '.join(words) or 'reproduced'}", flush=True)
    if options.json:
        show_json(found)
    return int(any(each["differences"] for each in found))


UNCHECKED = "not checked, since its command is no search"


def _reproduced(records: dict[str, Any]) -> Iterator[tuple[str, list[str] | None]]:
    """Per strategy what of it is not reproduced today, in words; None where its command does not say what its program is."""
    from autoshard.api.reproduced import differences
    from autoshard.api.strategy import Strategy
    from autoshard.errors import AutoshardError

    for name, record in records.items():
        given = _given(record.provenance.command)
        try:
            yield name, None if given is None else differences(Strategy(record), *_program(given))
        except AutoshardError as error:
            yield name, [str(error)]


def _program(given: argparse.Namespace) -> tuple:
    """The function and its arguments, in one tuple."""
    from autoshard.cli.program import load

    function, arguments = load(given.program, given.args)
    return function, *arguments


def _given(line: str) -> argparse.Namespace | None:
    """The options of a search's command line; None where it is another command."""
    from autoshard.cli.main import parser

    words = shlex.split(line)[1:]
    return parser().parse_args(words) if words[:1] == ["search"] else None


def _refresh(records: dict[str, Any], options: argparse.Namespace) -> int:
    """Runs the commands of strategies that are not reproduced; an interrupted run goes on with those that are left."""
    from autoshard.cli.main import main

    failed = 0
    for name, words in _reproduced(records):
        line = records[name].provenance.command
        if options.all or words:
            print(f"{name}: {line}", file=sys.stderr)
            failed |= main(shlex.split(line)[1:])
        else:
            print(f"{name}: {UNCHECKED if words is None else 'reproduced'}", file=sys.stderr)
    return int(bool(failed))
