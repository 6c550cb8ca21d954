"""``autoshard compare``: saved strategies side by side, and where two of them differ."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from autoshard.cli.found import record_of
from autoshard.cli.options import command
from autoshard.cli.terminal import show, show_json


def add(commands) -> None:
    """Adds the subcommand's options."""
    what = "put saved strategies side by side; of two, say what differs and what it costs"
    parser = command(commands, "compare", run, what, "autoshard compare found.json data_parallel.json")
    parser.add_argument("strategies", metavar="FILE", nargs="+", help="files that --save wrote, or names that autoshard strategies lists")


def run(options: argparse.Namespace) -> int:
    """Loads and compares."""
    from autoshard.api.comparing import compare
    from autoshard.api.explain import side_by_side, summary
    from autoshard.api.strategy import Strategy

    titles = _titles(options.strategies)
    records = {title: record_of(path) for path, title in titles.items()}
    two = compare(*map(Strategy, records.values()), names=tuple(records)) if len(records) == 2 else None
    if options.json:
        rows = [{"strategy": path, **summary(record)} for path, record in zip(titles, records.values(), strict=True)]
        show_json(rows if two is None else {"strategies": rows, "difference": two.to_dict()})
        return 0
    show(side_by_side(records))
    if two is not None:
        print()
        show(two)
    return 0


def _titles(paths: Sequence[str]) -> dict[str, str]:
    """By path its file's name without the ending, where no other one has the same.

    >>> _titles(["found/gpt.json", "old/t5.json", "new/t5.json"])
    {'found/gpt.json': 'gpt', 'old/t5.json': 'old/t5.json', 'new/t5.json': 'new/t5.json'}
    """
    stems = [Path(path).stem for path in paths]
    return {path: stem if stems.count(stem) == 1 else path for path, stem in zip(paths, stems, strict=True)}
