"""Options of a search on the command line, made from `autoshard.options`, and the keywords that they are in Python."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Collection
from typing import Any

from autoshard.cli.options import add_specs, argument, cluster_of, mesh_or_axes, names, numbers, seconds, size
from autoshard.errors import AutoshardError
from autoshard.options import OPTIONS, Option

PARSED: dict[str, Callable[[str], Any]] = {
    "mesh": mesh_or_axes,
    "batch_axes": names,
    "batch": argument,
    "memory_limit_bytes": size,
    "donate_argnums": numbers,
    "time_limit_seconds": seconds,
    "balance": lambda text: None if text == "none" else float(text),
}
"""Text forms of values that are neither words nor numbers."""


def add_asked(parser: argparse.ArgumentParser, *wanted: str) -> None:
    """Adds some options of a search, by their names in Python; what is not given on the command line is left to Python's default."""
    for name in wanted:
        option = OPTIONS[name]
        if name == "pins":
            _add_pins(parser, option)
        else:
            parser.add_argument(option.command, dest=name, default=argparse.SUPPRESS, help=option.help, **_form(option))


def _add_pins(parser: argparse.ArgumentParser, option: Option) -> None:
    add_specs(parser, option.command, option.help)
    parser.add_argument(
        "--pins-from",
        choices=("arguments",),
        help="keep the shardings that the arguments have, as arrays on a mesh or by Flax's metadata; what --pin says comes first",
    )


def _form(option: Option) -> dict[str, Any]:
    """How an option is given, as argparse takes it."""
    if option.name == "confirm":
        return {"choices": (*option.words, "off"), "nargs": "?", "const": option.words[0]}
    if option.name == "plan":
        return {"action": "store_const", "const": "full"}
    if isinstance(option.default, bool):
        return {"action": "store_const", "const": not option.default}
    if option.words and option.least is None:
        return {"choices": option.words if option.name == "schedule" else ("none", *option.words)}
    found: dict[str, Any] = {"metavar": option.metavar}
    if option.least is not None:
        found["type"] = lambda text: _number_or_word(option, text)
    elif option.name in PARSED:
        found["type"] = PARSED[option.name]
    return found | ({"action": "append"} if option.name == "batch" else {})


def _number_or_word(option: Option, text: str) -> Any:
    try:
        return option.parsed(text)
    except AutoshardError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def asked(options: argparse.Namespace, without: Collection[str] = ()) -> dict[str, Any]:
    """The keywords of `autoshard.search` and the like that the command line gives."""
    from jax.sharding import PartitionSpec

    import autoshard
    from autoshard.cli.found import record_of

    found = {name: getattr(options, name) for name in OPTIONS if hasattr(options, name) and name not in without}
    found |= {name: None for name, value in found.items() if value == "none"}
    if found.get("confirm") == "off":
        found["confirm"] = False
    if found.get("cluster") is not None:
        found["cluster"] = cluster_of(found["cluster"])
    if found.get("start") is not None:
        found["start"] = autoshard.Strategy(record_of(found["start"]))
    if hasattr(options, "pin"):
        specs = {path: PartitionSpec(*spec) for path, spec in options.pin}
        found["pins"] = (*filter(None, [options.pins_from]), specs) if specs or options.pins_from else None
    return found
