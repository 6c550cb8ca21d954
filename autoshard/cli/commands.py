"""The command line: picks the subcommand, and turns every failure into one paragraph and an exit code."""

from __future__ import annotations

import argparse
import os
import sys
import sysconfig
import traceback
from collections.abc import Sequence
from glob import glob
from importlib.util import find_spec
from pathlib import Path

from autoshard.cli import (
    calibrate,
    clusters,
    compare,
    demo,
    evaluate,
    explain,
    launch,
    lint,
    mcp,
    pins,
    reshard,
    search,
    strategies,
    sweep,
    verify,
    what_if,
)
from autoshard.errors import AutoshardError
from autoshard.version import __version__

COMMANDS = (
    *(search, evaluate, explain, what_if, lint, verify, pins, compare, reshard, sweep, calibrate, clusters, strategies, launch, mcp, demo),
)

ACCELERATORS = ("/dev/accel*", "/dev/vfio/*", "/dev/nvidia[0-9]*", "/dev/dxg", "/dev/kfd", "/dev/dri/*")  # as Linux shows them

USAGE_ERROR = 2  # as argparse exits

_PACKAGE = Path(__file__).resolve().parents[1]
_LIBRARIES = tuple(Path(sysconfig.get_path(name)).resolve() for name in ("stdlib", "platstdlib", "purelib", "platlib"))
_MAX_SHOWN = 400  # characters of another library's message


def run(argv: Sequence[str] | None = None) -> int:
    """The exit code of a command line, as of `autoshard.cli.main`; the user's interruption is raised."""
    arguments = sys.argv[1:] if argv is None else list(argv)
    try:
        options = _parsed(_with_defaults(arguments))
    except SystemExit as stop:  # argparse has printed help, version or what is wrong
        return stop.code if isinstance(stop.code, int) else USAGE_ERROR
    if options.run is None:
        parser().print_help(sys.stderr)
        return USAGE_ERROR
    options.command_line, options.main = ("autoshard", *arguments), run
    if sys.platform == "linux" and find_spec("libtpu") and not any(map(glob, ACCELERATORS)):
        os.environ.setdefault("JAX_PLATFORMS", "cpu")  # else libtpu looks for a TPU all the same, and reports at length that there is none
    try:
        code = options.run(options)
        sys.stdout.flush()
        return code
    except BrokenPipeError:  # the reader of our output, such as head, has gone
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # else Python complains once more when it flushes at exit
        return 0
    except Exception as error:
        if options.debug:
            traceback.print_exc()
        print(f"autoshard {options.command}: {_described(error)}", file=sys.stderr)
        return USAGE_ERROR


def _parsed(arguments: Sequence[str]) -> argparse.Namespace:
    """The options; names of strategies may stand before and after an option, where argparse ends a list of names at the first one.

    >>> _parsed(["strategies", "refresh", "--all", "gpt*"]).names
    ['refresh', 'gpt*']
    """
    whole = parser()
    options, left = whole.parse_known_args(arguments)
    if getattr(options, "names", None) and not any(word.startswith("-") for word in left):
        options.names, left = [*options.names, *left], []
    if left:
        commands = next(action.choices for action in whole._actions if isinstance(action, argparse._SubParsersAction))
        commands.get(options.command, whole).error(f"unrecognized arguments: {' '.join(left)}")  # with the command's own usage
    return options


def _with_defaults(arguments: Sequence[str]) -> list[str]:
    """The arguments, with the value spelt out of an option that may stand alone, where what follows it is none of its values.

    >>> _with_defaults(["search", "--confirm", "train:step"])
    ['search', '--confirm=compiler', 'train:step']
    """
    found = list(arguments)
    if arguments[:1] == ["launch"]:  # the script's options are its own
        return ["launch", *launch.with_defaults(arguments[1:])]
    for at, argument in enumerate(arguments):
        default = search.MAY_STAND_ALONE.get(argument)
        if default is not None and ":" in "".join(arguments[at + 1 : at + 2]):
            found[at] = f"{argument}={default}"
    return found


def parser() -> argparse.ArgumentParser:
    """The whole command line."""
    whole = argparse.ArgumentParser(
        prog="autoshard",
        description="Finds how to shard a JAX program over a cluster, says what a step will cost, and runs it.",
        epilog="Try: autoshard demo",
        allow_abbrev=False,
    )
    whole.add_argument("--version", action="version", version=f"autoshard {__version__}")
    whole.set_defaults(run=None)
    commands = whole.add_subparsers(title="commands", metavar="COMMAND", dest="command")
    for command in COMMANDS:
        command.add(commands)
    return whole


def _described(error: Exception) -> str:
    """One paragraph: an error of ours speaks for itself; of others, what was raised, the user's line it comes from, and how to see more."""
    if isinstance(error, AutoshardError):
        return f"{error} Add --debug to see the traceback." if error.__cause__ else str(error)
    what = f"{type(error).__name__}: {_shortened(str(error))}"
    place = user_place(error)
    if place is None:
        return f"{what} This looks like a fault in autoshard, not in your input. Add --debug to see the traceback, and please report it."
    return f"your program raised {what} It happened at {place}. Add --debug to see the traceback."


def user_place(error: BaseException) -> str | None:
    """``file:line (function)`` of the innermost line of the user's own code; None where no such line was running."""
    if isinstance(error, SyntaxError) and error.filename:
        return f"{error.filename}:{error.lineno}"
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if _is_users(frame.filename)]
    return f"{frames[-1].filename}:{frames[-1].lineno} ({frames[-1].name})" if frames else None


def _is_users(filename: str) -> bool:
    """Whether a file is neither ours nor a library's; names like ``<string>`` are nobody's."""
    path = Path(filename)
    if not path.is_absolute() or not path.exists():
        return False
    path = path.resolve()
    ours = path.is_relative_to(_PACKAGE) and not path.is_relative_to(_PACKAGE / "demo")
    return not ours and not any(path.is_relative_to(library) for library in _LIBRARIES)


def _shortened(message: str) -> str:
    """The first paragraph on one line, with a full stop."""
    line = " ".join(message.strip().split("\n\n")[0].split())
    line = line if len(line) <= _MAX_SHOWN else f"{line[:_MAX_SHOWN]}..."
    return line if line.endswith((".", "!", "?")) else f"{line}."
