"""What a report shows of a strategy's program, as a text that the strategy's file keeps: an explanation, and the data of the page."""

from __future__ import annotations

import base64
import json
import lzma
import types
import typing
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from itertools import accumulate, pairwise
from typing import Any

from autoshard.errors import StrategyError
from autoshard.explanation.data import Explanation
from autoshard.render import format_bytes
from autoshard.strategy.record import plain

MAX_BYTES = 2**28  # of what a text may unpack to
DIFFERENCES = "+"  # the key of a list of whole numbers that is written as the first one and the differences: equal layers are equal then
LEAST = 8  # numbers of such a list


def packed(explanation: Explanation, page: Mapping[str, Any]) -> str:
    """The text of an explanation and the data of its page (`autoshard.report.data.to_data`); `unpacked` gives them back."""
    text = json.dumps([plain(explanation), _differences(page)], separators=(",", ":"), allow_nan=False)
    return base64.b85encode(lzma.compress(text.encode(), preset=9)).decode()


def unpacked(text: str) -> tuple[Explanation, dict[str, Any]]:
    """The explanation and the page's data of a text.

    Raises:
        StrategyError: the text is damaged.
    """
    try:
        unpacking = lzma.LZMADecompressor()
        data = unpacking.decompress(base64.b85decode(text), MAX_BYTES)
        if not unpacking.eof:
            raise ValueError(f"it is cut, or unpacks to more than {format_bytes(MAX_BYTES)}")
        explanation, page = json.loads(data)
        return _built(Explanation, explanation), _sums(page)
    except (ValueError, TypeError, KeyError, StopIteration, RecursionError, lzma.LZMAError) as error:
        raise StrategyError(
            f"the report in the strategy's file cannot be read ({error}). Restore the file, or pass the program: "
            "strategy.with_program(fn, *args), or MODULE:FUNCTION on the command line."
        ) from None


def _differences(value: Any) -> Any:
    """The value with lists of whole numbers as their differences."""
    if isinstance(value, Mapping):
        return {f"{DIFFERENCES}{key}" if key.startswith(DIFFERENCES) else key: _differences(child) for key, child in value.items()}
    if not isinstance(value, list | tuple):
        return value
    if len(value) >= LEAST and all(type(each) is int for each in value):
        return {DIFFERENCES: [value[0], *(after - before for before, after in pairwise(value))]}
    return [_differences(child) for child in value]


def _sums(value: Any) -> Any:
    """The inverse of `_differences`."""
    if isinstance(value, dict):
        if DIFFERENCES in value:
            return [*accumulate(value[DIFFERENCES])]
        return {key.removeprefix(DIFFERENCES): _sums(child) for key, child in value.items()}
    return [_sums(child) for child in value] if isinstance(value, list) else value


def _built(kind: Any, value: Any) -> Any:
    """The value of a type from JSON: dataclasses from objects, tuples from lists."""
    if is_dataclass(kind) and isinstance(kind, type):
        types_of = typing.get_type_hints(kind)
        return kind(**{each.name: _built(types_of[each.name], value[each.name]) for each in fields(kind)})
    inner = typing.get_args(kind)
    if isinstance(kind, types.UnionType):
        return None if value is None else _built(next(each for each in inner if _fits(each, value)), value)
    if typing.get_origin(kind) is tuple:
        members = [inner[0]] * len(value) if inner[-1] is Ellipsis else inner
        return tuple(_built(each, child) for each, child in zip(members, value, strict=True))
    return value


def _fits(kind: Any, value: Any) -> bool:
    """Whether a JSON value may be of a type of a union: an object a dataclass, a list a tuple, anything else itself."""
    if isinstance(value, dict):
        return is_dataclass(kind)
    return typing.get_origin(kind) is tuple if isinstance(value, list) else isinstance(kind, type) and isinstance(value, kind)
