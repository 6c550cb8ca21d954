"""What is done with a strategy once a command has it: saved, then shown."""

from __future__ import annotations

import argparse
import os
import shlex
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

from autoshard.cli.terminal import show, show_json


def finish(strategy, options: argparse.Namespace) -> int:
    """Saves the strategy where asked for, with the command that made it, and prints its report or its JSON."""
    from autoshard.strategy import to_json

    record = _saved(strategy, options)
    show_json(to_json(record)) if options.json else show(strategy.explain())
    return 0


def finish_frontier(frontier, options: argparse.Namespace) -> int:
    """Saves the fastest strategy where asked for, and prints a line for each, or their main facts as JSON."""
    from autoshard.explanation.explain import summary

    _saved(frontier[-1], options)
    show_json([summary(strategy.record) for strategy in frontier]) if options.json else show(frontier.report())
    return 0


def _saved(strategy, options: argparse.Namespace):
    """The strategy's record with the command that made it; it and its report are written where the options say."""
    from autoshard.ask.strategy import named
    from autoshard.strategy import save_record

    command = shlex.join(options.command_line)
    if getattr(options, "name", None):
        record = named(strategy, options.name, command).record
    else:
        record = replace(strategy.record, provenance=replace(strategy.record.provenance, command=command))
    if options.save:
        save_record(strategy.with_record(record).kept, options.save)
        print(f"saved to {options.save}", file=sys.stderr)
    if options.html is not None or options.open:
        write_pages(strategy.with_record(record).report(), options)
    return record


def write_pages(page, options: argparse.Namespace) -> None:
    """Writes the report, and the trace, where the options say, and opens the report in a browser where they ask for it."""
    if options.open and options.html is None:
        handle, options.html = tempfile.mkstemp(prefix="autoshard_", suffix=".html")
        os.close(handle)
    for path, save in ((options.html, page.save_html), (getattr(options, "trace", None), page.save_trace)):
        if path is not None:
            save(path)
            print(f"saved to {path}", file=sys.stderr)
    if options.open:
        import webbrowser

        if not webbrowser.open(Path(options.html).absolute().as_uri()):
            print(f"no browser was found: open {options.html} in one.", file=sys.stderr)


def record_of(name: str):
    """The record of a strategy file, or of a strategy of the library by its name."""
    from autoshard import library
    from autoshard.errors import StrategyError
    from autoshard.strategy import load_record

    if Path(name).exists():
        return load_record(name)
    if name in library.names():
        return library.load(name)
    raise StrategyError(
        f"a strategy is a file that a search saved, or has a name in the library, and {name!r} is neither. {library.near(name)}"
    )
