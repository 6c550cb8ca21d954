"""``autoshard strategies``: the strategies that come with autoshard, listed, shown, verified, and made anew."""

from __future__ import annotations

import argparse
import os
import shlex
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from typing import Any

from autoshard.cli.options import command
from autoshard.cli.terminal import show, show_json

ACTIONS = ("list", "show", "verify", "refresh", "confirm")


def add(commands: Any) -> None:
    """Adds the subcommand's options."""
    what = "list, show, verify, make anew or confirm the strategies that come with autoshard"
    parser = command(commands, "strategies", run, what, "autoshard strategies list 'gpt*' --cluster 'v5e*'")
    parser.description = (
        f"{parser.description} verify says whether programs and predicted costs are still those of the files, with exit code 1 where one "
        "is not. refresh searches these again, by the commands in the files. confirm compiles those that no compiler "
        "has confirmed, for their clusters and without these, and records the compiled figures in the files; refresh keeps them where it "
        "finds the same strategy. All three run where the programs can be imported, as in a checkout."
    )
    parser.add_argument(
        "names",
        metavar="ACTION NAME",
        nargs="*",
        help="list (default), show, verify, refresh or confirm; names or patterns of strategies, all unless given",
    )
    parser.add_argument("--cluster", metavar="PATTERN", default="*", help="those on such clusters only, as v5e*")
    parser.add_argument("--on", metavar="ray|ADDRESS", help="refresh, confirm: at the same time on a Ray cluster, else one after the other")
    parser.add_argument("--all", action="store_true", help="refresh: also what is reproduced; confirm: also what is confirmed")


def run(options: argparse.Namespace) -> int:
    """Does what is asked."""
    action, *patterns = (
        options.names if options.names[:1] and options.names[0] in ACTIONS else ("show" if options.names else "list", *options.names)
    )
    records = _chosen(patterns, options.cluster)
    if action in _WORK:
        os.environ["AUTOSHARD_CORRECTIONS"] = "off"  # the library's figures are the same on all machines, whatever was compiled there
        return _WORK[action](records, options)
    if options.json:
        from autoshard.explanation.explain import summary

        ratios = _against_experts(records)
        show_json([{"strategy": name, **summary(record), "against_expert": ratios[name]} for name, record in records.items()])
    elif action == "show":
        from autoshard.explanation.explain import explain

        for name, record in records.items():
            show(explain(record))
            if record.confirmation is None:
                print(f"No compiler has confirmed these predictions; autoshard strategies confirm {name} compiles it, without the devices.")
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


def _against_experts(records: dict[str, Any]) -> dict[str, float | None]:
    """The step times in multiples of the experts', which need not be among the records."""
    from autoshard import library

    names = {f"{library.group(record)}_{expert}" for record in records.values() for expert in library.EXPERTS}
    experts = {name: library.load(name) for name in names.intersection(library.names()).difference(records)}
    return library.against_expert({**records, **experts})


def _table(records: dict[str, Any]):
    """A line a strategy, or two where its mesh has two axes; names are whole, also in a terminal of 80 columns."""
    from autoshard import library
    from autoshard.render import Report, Table, format_bytes, format_seconds

    ratios = _against_experts(records)
    rows = tuple(
        (
            name,
            str(record.mesh).replace(" x ", " x\n"),
            format_seconds(record.cost.makespan_seconds),
            format_bytes(record.cost.peak_bytes),
            "" if ratios[name] is None or record.searcher.name in library.EXPERTS else f"{ratios[name]:.2f} x",
        )
        for name, record in records.items()
    )
    unconfirmed = [name for name, record in records.items() if record.confirmation is None]
    notes = (
        "step, peak: predicted time of a step, and memory of a device at its fullest moment.",
        "expert: step time in multiples of that of the sharding that is usual for the model, on the same cluster.",
        f"Compilers have confirmed {'all' if not unconfirmed else 'all but ' + ', '.join(unconfirmed)}: autoshard strategies show NAME.",
    )
    columns = ("strategy", "mesh", ">step", ">peak", ">expert")
    return Report("Strategies of the library", (Table(columns, rows, notes),))


def _verify(records: dict[str, Any], options: argparse.Namespace) -> int:
    found = []
    for name, words in _reproduced(records):
        found.append({"strategy": name, "reproduced": not words, "differences": words})
        if not options.json:
            print(f"{name}: {'; '.join(words) or 'reproduced'}", flush=True)
    if options.json:
        show_json(found)
    return int(any(each["differences"] for each in found))


def _reproduced(records: dict[str, Any]) -> Iterator[tuple[str, list[str]]]:
    """Per strategy what of it is not reproduced today, in words."""
    from autoshard.ask.reproduced import differences
    from autoshard.ask.strategy import Strategy
    from autoshard.errors import AutoshardError

    for name, record in records.items():
        try:
            yield name, differences(Strategy(record), *_program(record))
        except AutoshardError as error:
            yield name, [str(error)]


def _program(record: Any) -> tuple:
    """The function and its arguments that a record's search was given, in one tuple."""
    from autoshard.cli import search
    from autoshard.cli.program import ProgramError, load

    words = shlex.split(record.provenance.command)[1:]
    if words[:1] != ["search"]:
        raise ProgramError(
            f"the program of a strategy is that of the autoshard search in its file, and {record.name!r} was made by "
            f"{record.provenance.command or 'no command'!r}. Search it on the command line, with --save."
        )
    parser = argparse.ArgumentParser()
    search.add(parser.add_subparsers())
    given = parser.parse_args(words)
    function, arguments = load(given.program, given.args)
    return function, *arguments


def _refresh(records: dict[str, Any], options: argparse.Namespace) -> int:
    """Runs the commands of strategies that are not reproduced; an interrupted run goes on with those that are left."""
    from autoshard import library
    from autoshard.plan.confirm import with_confirmation_of
    from autoshard.strategy import save_record

    failed, left = 0, list[str]()
    for name, words in _reproduced(records):
        print(f"{name}: {records[name].provenance.command if options.all or words else 'reproduced'}", file=sys.stderr)
        left += [name] if options.all or words else []
    tasks = [partial(_made_anew, options.main, records[name].provenance.command, os.getcwd()) for name in left]
    for number, (code, text) in _each(tasks, options.on):
        failed |= code
        if code == 0:
            path = library.path(left[number])
            path.write_text(text, "utf-8")
            save_record(with_confirmation_of(library.load(left[number]), records[left[number]]), path)
    return int(bool(failed))


def _made_anew(main: Callable[[list[str]], int], line: str, folder: str) -> tuple[int, str]:
    """The exit code of a command in a folder, and the file that it saves."""
    _as_in(folder)
    words = shlex.split(line)[1:]
    at = words.index("--save") + 1
    with tempfile.TemporaryDirectory() as made:
        saved = os.path.join(made, "found.json")
        code = main([*words[:at], saved, *words[at + 1 :]])
        return code, Path(saved).read_text("utf-8").replace(saved, words[at]) if code == 0 else ""  # which has its command


def _as_in(folder: str) -> None:
    """Makes this process, on whatever machine, find what one in a folder does, without what was learned of kernels there."""
    os.environ["AUTOSHARD_CORRECTIONS"] = "off"
    with suppress(OSError):  # another machine's, where programs are installed
        os.chdir(folder)


def _each(tasks: Sequence[Callable[[], Any]], on: str | None) -> Iterator[tuple[int, Any]]:
    """The number and the result of each task, here or on Ray."""
    if on is None:
        yield from ((number, task()) for number, task in enumerate(tasks))
    else:
        from autoshard.ray_cluster import results_on_ray

        yield from results_on_ray(tasks, on)


def _confirm(records: dict[str, Any], options: argparse.Namespace) -> int:
    """Compiles strategies and records what the compiler makes of them; one that it refuses keeps its file, and the exit code is 1."""
    from autoshard import library
    from autoshard.errors import AutoshardError
    from autoshard.strategy import save_record

    left = [name for name, record in records.items() if record.confirmation is None or options.all]
    found = {name: (record, _confirmed(record)) for name, record in records.items() if name not in left}
    for number, confirmation in _each([partial(_compiled, records[name], os.getcwd()) for name in left], options.on):
        record = records[name := left[number]]
        if isinstance(confirmation, AutoshardError):
            found[name] = replace(record, confirmation=None), str(confirmation)
        else:
            record = replace(record, confirmation=confirmation)
            save_record(record, library.path(name))
            found[name] = record, _confirmed(record)
        if not options.json:
            print(f"{name}: {found[name][1]}", flush=True)
    if options.json:
        rows = ((name, *found[name]) for name in records)
        show_json([{"strategy": name, "confirmed": record.confirmation is not None, "words": told} for name, record, told in rows])
    return int(not all(record.confirmation is not None for record, _ in found.values()))


def _compiled(record: Any, folder: str) -> Any:
    """What a compiler makes of a strategy, in a folder from which its program can be imported; the error where it refuses it."""
    from autoshard.ask.strategy import Strategy
    from autoshard.errors import AutoshardError
    from autoshard.plan.confirm import confirmation_of

    _as_in(folder)
    try:
        return confirmation_of(Strategy(record), *_program(record))
    except AutoshardError as error:
        return error


def _confirmed(record: Any) -> str:
    """The compiled figures next to the predicted ones, in words."""
    from autoshard.explanation.explain import compiled_table

    shares = (f"{share} of {what}" for what, _, _, share in compiled_table(record).rows if share)
    return f"confirmed by {record.confirmation.name} ({record.confirmation.version}); of what was predicted it has {', '.join(shares)}"


_WORK = {"verify": _verify, "refresh": _refresh, "confirm": _confirm}
