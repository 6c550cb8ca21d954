"""``autoshard compare``: saved strategies side by side, and where two of them differ."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from autoshard.cli.found import record_of
from autoshard.cli.options import add_devices, command
from autoshard.cli.program import ProgramError, load
from autoshard.cli.terminal import show, show_json, working


def add(commands: Any) -> None:
    """Adds the subcommand's options."""
    what = "put saved strategies side by side; of two, say what differs and what it costs"
    parser = command(commands, "compare", run, what, "autoshard compare found.json data_parallel.json")
    parser.add_argument("strategies", metavar="FILE", nargs="+", help="files that --save wrote, or names that autoshard strategies lists")
    parser.add_argument(
        "--program",
        metavar="MODULE:FUNCTION",
        action="append",
        default=[],
        help="of two strategies their program, where files lack what differs by layer; of two programs twice, in the order of the files",
    )
    parser.add_argument(
        "--args", metavar="MODULE:NAME", action="append", default=[], help="the program's arguments, as for autoshard search; once or twice"
    )
    add_devices(parser)


def run(options: argparse.Namespace) -> int:
    """Loads and compares."""
    from autoshard.explanation.explain import side_by_side, summary

    titles = _titles(options.strategies)
    if (options.program and len(titles) != 2) or max(len(options.program), len(options.args)) > 2:
        raise ProgramError(
            f"--program and --args are of two strategies, once for both or once for each; got {len(titles)} files, {len(options.program)} "
            f"programs and {len(options.args)} of --args. Name two files."
        )
    records = {title: record_of(path) for path, title in titles.items()}
    two = None
    if len(records) == 2:
        two = _compared(records, options)
    if options.json:
        rows = [{"strategy": path, **summary(record)} for path, record in zip(titles, records.values(), strict=True)]
        show_json(rows if two is None else {"strategies": rows, "difference": two.to_dict()})
        return 0
    show(side_by_side(records))
    if two is not None:
        print()
        show(two)
    return 0


def _compared(records: Mapping[str, Any], options: argparse.Namespace):
    """The comparison of two strategies, by their files or by their programs where these are given."""
    (first, before), (second, after) = records.items()
    if not options.program:
        from autoshard.explanation.comparison import comparison

        return comparison(before, after, (first, second))
    from autoshard.ask.comparing import compare
    from autoshard.ask.strategy import Strategy

    with working():
        loaded = [load(program, args, options.devices) for program, args in zip(_both(options.program), _both(options.args), strict=True)]
        pairs = zip((before, after), loaded, strict=True)
        one, two = (Strategy(record).with_program(function, *arguments) for record, (function, arguments) in pairs)
    return compare(one, two, names=(first, second))


def _both(given: Sequence[str]) -> list[Any]:
    """What is given for the first and for the second strategy; what is given once is for both.

    >>> _both(["train:step"])
    ['train:step', 'train:step']
    """
    return [given[0], given[-1]] if given else [None, None]


def _titles(paths: Sequence[str]) -> dict[str, str]:
    """By path its file's name without the ending, where no other one has the same.

    >>> _titles(["found/gpt.json", "old/t5.json", "new/t5.json"])
    {'found/gpt.json': 'gpt', 'old/t5.json': 'old/t5.json', 'new/t5.json': 'new/t5.json'}
    """
    stems = [Path(path).stem for path in paths]
    return {path: stem if stems.count(stem) == 1 else path for path, stem in zip(paths, stems, strict=True)}
