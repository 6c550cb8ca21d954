"""Options that several subcommands share, and the text forms they take."""

from __future__ import annotations

import argparse
import ast
import math
import os
import re
from typing import Any

from autoshard.options import OPTIONS

UNITS = {"": 1, "B": 1} | {
    f"{prefix}{unit}": base**power for power, prefix in enumerate("kMGTP", 1) for unit, base in (("", 1000), ("B", 1000), ("iB", 1024))
}

SPEC_HELP = (
    "A SPEC names, for each dimension, the mesh axes that shard it: 'data,None' shards dimension 0 over data, "
    "'(data+model),None' over data and model together; 'replicated' shards nothing. "
    "PATH is an argument's path as 'autoshard explain' prints it, such as state['params']['w']; * and ? stand for any text."
)


class PrintSchema(argparse.Action):
    """An option that prints the JSON Schema of its command's ``--json``, as ``--help`` prints help."""

    def __init__(self, option_strings, dest, help=None):
        super().__init__(option_strings, argparse.SUPPRESS, nargs=0, default=argparse.SUPPRESS, help=help)

    def __call__(self, parser, namespace, values, option_string=None):
        from importlib.resources import files

        print((files("autoshard.cli") / "schemas" / f"{parser.prog.split()[-1]}.json").read_text(encoding="utf-8"), end="")
        parser.exit()


def command(commands, name: str, run, what: str, example: str, reports: bool = True) -> argparse.ArgumentParser:
    """A subcommand's parser, with the options that all have; ``--json`` only where there is a report."""
    parser = commands.add_parser(
        name,
        help=what,
        description=f"{what[0].upper()}{what[1:]}.",
        epilog=f"example:\n  {example}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    if reports:
        parser.add_argument("--json", action="store_true", help="print JSON instead of a report")
        parser.add_argument("--json-schema", action=PrintSchema, help="print the schema of that JSON and exit")
    parser.add_argument("--debug", action="store_true", help="show the traceback of an error")
    parser.set_defaults(run=run)
    return parser


def add_function(parser: argparse.ArgumentParser, more: str = "") -> None:
    """Which program, with which arguments; ``more`` says more of these."""
    parser.add_argument(
        "program",
        metavar="MODULE:FUNCTION",
        type=reference,
        help="the function to shard; modules are found from the current folder too",
    )
    parser.add_argument(
        "--args",
        metavar="MODULE:NAME",
        type=reference,
        help="its arguments: a tuple of arrays, jax.ShapeDtypeStructs or pytrees of them, or a function without arguments that returns it; "
        f"jax.eval_shape makes shapes of what need not be computed{more}",
    )
    add_devices(parser)


def add_optional_function(parser: argparse.ArgumentParser, what: str) -> None:
    """A program that a saved strategy may do without; ``what`` says what for."""
    parser.add_argument("program", metavar="MODULE:FUNCTION", type=reference, nargs="?", help=what)
    parser.add_argument("--args", metavar="MODULE:NAME", type=reference, help="the program's arguments, as for autoshard search")
    add_devices(parser)


def add_devices(parser: argparse.ArgumentParser) -> None:
    """How many devices a program may build a mesh of."""
    parser.add_argument("--devices", metavar="N", type=int, help="give JAX N virtual CPU devices, for a program that builds its own mesh")


def add_saved(parser: argparse.ArgumentParser) -> None:
    """Which program, with which arguments, and the strategy that was found for it."""
    add_function(parser)
    parser.add_argument(
        "--strategy", metavar="FILE", required=True, help="a file that --save wrote, or a name that autoshard strategies lists"
    )


def add_program(parser: argparse.ArgumentParser) -> None:
    """Which program, with which arguments, on which cluster, and where the strategy goes."""
    add_function(parser)
    parser.add_argument("--cluster", metavar="CLUSTER", required=True, help=OPTIONS["cluster"].help)
    parser.add_argument(
        "--donate",
        dest="donate_argnums",
        metavar="N,...",
        type=numbers,
        default=(),
        help=OPTIONS["donate_argnums"].help,
    )
    parser.add_argument("--save", metavar="FILE", help="write the strategy to a JSON file")
    add_page(parser)


def add_page(parser: argparse.ArgumentParser) -> None:
    """Where the report goes that browsers show."""
    parser.add_argument("--html", metavar="FILE", help="write a report that browsers open offline: timeline, memory, mesh, tables, graph")
    parser.add_argument("--open", action="store_true", help="open that report in a browser; without --html in a temporary file")


def add_in_specs(parser: argparse.ArgumentParser, otherwise: str) -> None:
    """The arguments' shardings; ``otherwise`` says what those have that none is given for."""
    add_specs(parser, "--in-spec", f"an argument's sharding; repeatable, later ones override; {otherwise}")


def add_specs(parser: argparse.ArgumentParser, flag: str, meaning: str) -> None:
    """An option that may be given for several arguments, each with its path and a spec."""
    parser.add_argument(flag, metavar="PATH=SPEC", type=path_spec, action="append", default=[], help=f"{meaning}. {SPEC_HELP}")


def check_writable(path: str | None, option: str) -> None:
    """Raises `StrategyError` where a file could not be written: found out before a search rather than after it, and not where a stored
    command is only read.
    """
    from autoshard.errors import StrategyError

    if path is not None and (not os.path.isdir(os.path.dirname(os.path.abspath(path))) or os.path.isdir(path)):
        raise StrategyError(f"{option} names a file in a folder that exists, got {path!r}. Make the folder first, or name another file.")


def check_request(options: argparse.Namespace) -> None:
    """Raises an `AutoshardError` for files that could not be written and for what is no cluster, before a program is loaded."""
    check_writable(options.save, "--save")
    check_writable(getattr(options, "html", None), "--html")
    if options.cluster is not None:
        cluster_of(options.cluster)


def cluster_of(text: str):
    """The cluster of its short form or of a TOML file."""
    from autoshard.cluster import Cluster

    return Cluster.of(text)


# -- text forms: argparse prints the messages after the option's name ----------------------------------------------------


def reference(text: str) -> str:
    """The name of an object of a module, as it is.

    >>> reference("train:train_step")
    'train:train_step'
    """
    module, _, name = text.partition(":")
    if not name or not all(part.isidentifier() for part in module.split(".")):
        raise argparse.ArgumentTypeError(f"a program reads module:function, such as train:train_step, got {text!r}")
    return text


def mesh(text: str) -> dict[str, int]:
    """The mesh shape of ``data=4,model=2``.

    >>> mesh("data=4,model=2")
    {'data': 4, 'model': 2}
    """
    shape: dict[str, int] = {}
    for part in text.split(","):
        name, _, size = (piece.strip() for piece in part.partition("="))
        if not name.isidentifier() or not size.isdecimal() or int(size) < 1 or name in shape:
            raise argparse.ArgumentTypeError(f"a mesh reads data=4,model=2 with distinct names and positive sizes, got {text!r}")
        shape[name] = int(size)
    return shape


def mesh_or_axes(text: str) -> dict[str, int] | int:
    """The mesh shape, or the number of axes that it may have.

    >>> mesh_or_axes("3")
    3
    """
    return int(text) if text.strip().isdecimal() else mesh(text)


def spec(text: str) -> tuple[None | str | tuple[str, ...], ...]:
    """The spec, one entry a dimension, of ``data,None`` or ``(data+model),None``.

    >>> spec("data,None"), spec("(data+model),None"), spec("replicated")
    (('data', None), (('data', 'model'), None), ())
    >>> spec("P(('data', 'model'), None)")  # as reports print it
    (('data', 'model'), None)
    """
    if text.strip().startswith("P("):
        text = _unprinted(text)
    if text.strip() in ("replicated", ""):
        return ()
    entries: list[None | str | tuple[str, ...]] = []
    for part in (part.strip() for part in text.split(",")):
        inner = part[1:-1] if part.startswith("(") and part.endswith(")") else part
        axes = tuple(axis.strip() for axis in inner.split("+"))
        if axes == ("None",):
            entries.append(None)
        elif all(axis.isidentifier() and axis != "None" for axis in axes):
            entries.append(axes[0] if len(axes) == 1 else axes)
        else:
            raise argparse.ArgumentTypeError(f"a spec reads data,None or (data+model),None, one entry a dimension, got {text!r}")
    return tuple(entries)


def _unprinted(text: str) -> str:
    """The short form of ``P(('data', 'model'), None)``; the text itself where it is no such spec."""
    try:
        entries = ast.literal_eval(f"[{text.strip().removeprefix('P(').removesuffix(')')}]")
        return ",".join(str(entry) if entry is None else f"({'+'.join([entry] if isinstance(entry, str) else entry)})" for entry in entries)
    except (SyntaxError, TypeError, ValueError):
        return text


def path_spec(text: str) -> tuple[str, tuple[Any, ...]]:
    """Path or pattern, and spec, of ``PATH=SPEC``.

    >>> path_spec("state['w']=model,None")
    ("state['w']", ('model', None))
    """
    path, equals, right = text.rpartition("=")
    if not equals or not path.strip():
        raise argparse.ArgumentTypeError(f"a pin reads PATH=SPEC, such as \"state['w']=data,None\", got {text!r}")
    return path.strip(), spec(right)


def path_price(text: str) -> tuple[str, float]:
    """Cluster or device, and the price of a device-hour.

    >>> path_price("h100=2.5")
    ('h100', 2.5)
    """
    name, _, price = text.rpartition("=")
    try:
        found = float(price)
    except ValueError:
        found = 0.0
    if not name.strip() or not 0 < found < math.inf:
        raise argparse.ArgumentTypeError(f"a price of a device-hour reads h100=2.5, got {text!r}")
    return name.strip(), found


def size(text: str) -> float:
    """The number of bytes of ``12GB``, ``11.5GiB`` or ``1e9``.

    >>> size("12GB"), size("1.5 GiB"), size("1e9")
    (12000000000.0, 1610612736.0, 1000000000.0)
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d*)?(?:[eE]\d+)?)\s*([A-Za-z]*)\s*", text)
    unit = match and next((factor for name, factor in UNITS.items() if name.lower() == match[2].lower()), None)
    if not match or not unit or float(match[1]) <= 0:
        raise argparse.ArgumentTypeError(f"a size reads 12GB, 11.5GiB or 1e9 (bytes), got {text!r}")
    return float(match[1]) * unit


def numbers(text: str) -> tuple[int, ...]:
    """The positions of ``0,2``."""
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() for part in parts):
        raise argparse.ArgumentTypeError(f"positions read 0 or 0,2, got {text!r}")
    return tuple(int(part) for part in parts)


def names(text: str) -> tuple[str, ...]:
    """The mesh axes of ``data,fsdp``.

    >>> names("data, fsdp")
    ('data', 'fsdp')
    """
    found = tuple(part.strip() for part in text.split(","))
    if not all(name.isidentifier() for name in found) or len({*found}) < len(found):
        raise argparse.ArgumentTypeError(f"mesh axes read data or data,fsdp, got {text!r}")
    return found


def argument(text: str) -> int | str:
    """The position of an argument, or its path or a pattern.

    >>> argument("1"), argument("batch['x']")
    (1, "batch['x']")
    """
    return int(text) if text.removeprefix("-").isdecimal() else text


def positive(text: str) -> int:
    """A whole number from one up."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"a whole number from 1 up is expected, got {text!r}")
    return int(text)


def seconds(text: str) -> float:
    """A positive number of seconds."""
    try:
        found = float(text)
    except ValueError:
        found = 0.0
    if not 0 < found < math.inf:
        raise argparse.ArgumentTypeError(f"a positive number of seconds is expected, got {text!r}")
    return found
