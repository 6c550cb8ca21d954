"""Validating reader of untrusted JSON: values with their position in the document, for error messages."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import MISSING, dataclass, fields, is_dataclass
from functools import cache, partial
from itertools import repeat
from types import NoneType
from typing import Any, Self, TypeVar, get_args, get_origin, get_type_hints

from autoshard.errors import StrategyError

MAX_DEPTH = 100
"""The greatest nesting of values; pytrees of real programs stay below 20."""

MAX_INTEGER = 2**63 - 1
MAX_NUMBER = 1e30
MAX_SHOWN = 80

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Node:
    """A value of a JSON document and its position, such as ``arguments[3].shape``."""

    value: Any
    where: str = ""

    def error(self, expected: str) -> StrategyError:
        """The error for an unexpected value."""
        place = "".join(c if printable(c) else "?" for c in self.where)
        if len(place) > 2 * MAX_SHOWN:
            place = f"{place[:MAX_SHOWN]}...{place[-MAX_SHOWN:]}"
        return StrategyError(f"at {place or 'its top'}: expected {expected}, got {shown(self.value)}")

    def fields(self, *names: str, optional: Iterable[str] = ()) -> dict[str, Node]:
        """The members of an object that has exactly these names, and possibly the optional ones."""
        found = dict(self.members())
        names = (*names, *(name for name in optional if name in found))
        for name in names:
            if name not in found:
                raise self.error(f"an object with {name!r}")
        if len(found) > len(names):
            raise self.error(f"an object with no other names than {', '.join(names)}")
        return found

    def members(self) -> Iterator[tuple[str, Node]]:
        """Name and value of each member of an object."""
        if not isinstance(self.value, dict):
            raise self.error("an object")
        prefix = f"{self.where}." if self.where else ""
        for name, value in self.value.items():
            yield name, Node(value, f"{prefix}{name[:MAX_SHOWN]}")

    def items(self, length: int | None = None) -> list[Node]:
        """The items of a list, of the given length if any."""
        if not isinstance(self.value, list) or length not in (None, len(self.value)):
            raise self.error("a list" if length is None else f"a list of {length}")
        return [Node(value, f"{self.where}[{position}]") for position, value in enumerate(self.value)]

    def text(self, empty: bool = False) -> str:
        """A string without control characters."""
        if not isinstance(self.value, str) or not (self.value or empty):
            raise self.error("a string" if empty else "a string that is not empty")
        if not printable(self.value):
            raise self.error("a string without control characters or lone surrogates")
        return self.value

    def one_of(self, words: Collection[str]) -> str:
        """One of these words."""
        if not isinstance(self.value, str) or self.value not in words:
            raise self.error(f"one of {', '.join(words)}")
        return self.value

    def true(self) -> bool:
        """``true``, which is left out where it is not so."""
        if self.value is not True:
            raise self.error("true, where it is written")
        return True

    def integer(self, low: int, high: int = MAX_INTEGER) -> int:
        """A whole number from low to high, both included."""
        if isinstance(self.value, bool) or not isinstance(self.value, int) or not low <= self.value <= high:
            raise self.error(f"a whole number from {low} to {high}")
        return self.value

    def number(self) -> float:
        """A number, zero or more, of a size that seconds, bytes and operations may have: sums of it stay finite."""
        if isinstance(self.value, bool) or not isinstance(self.value, int | float) or not 0 <= self.value <= MAX_NUMBER:
            raise self.error(f"a number from 0 to {MAX_NUMBER:g}")
        if self.value > MAX_INTEGER and isinstance(self.value, int):
            raise self.error(f"a whole number up to {MAX_INTEGER}, or a float")
        return float(self.value)

    def record(self, kind: type[T], **readers: Callable[[Node], Any]) -> T:
        """A dataclass of such values, in tuples and in other dataclasses; fields with defaults may be left out, as `written` does.

        A whole number is at least what its field has as ``least`` in its metadata, or 0.

        Args:
            readers: of fields that are read otherwise.
        """
        assert is_dataclass(kind)
        own, hints = fields(kind), _types(kind)
        optional = [each.name for each in own if each.default is not MISSING]
        part = self.fields(*(each.name for each in own if each.name not in optional), optional=optional)
        given = ((each, part[each.name]) for each in own if each.name in part)
        usual = {each.name: partial(Node._typed, kind=hints[each.name], least=each.metadata.get("least", 0)) for each in own}
        return kind(**{each.name: (usual | readers)[each.name](node) for each, node in given})

    def _typed(self, kind: Any, least: int) -> Any:
        origin, inner = get_origin(kind), get_args(kind)
        if is_dataclass(kind) and isinstance(kind, type):
            return self.record(kind)
        if NoneType in inner:  # None is left out
            return self._typed(inner[0], least)
        if origin is tuple:
            kinds = repeat(inner[0]) if inner[-1] is Ellipsis else inner
            nodes = self.items(None if inner[-1] is Ellipsis else len(inner))
            return tuple(node._typed(each, least) for node, each in zip(nodes, kinds, strict=False))
        return self.integer(least) if kind is int else {str: self.text, bool: self.true, float: self.number}[kind]()

    def json(self, depth: int = 0) -> Any:
        """Any value of bounded depth, its strings and numbers checked."""
        if depth > MAX_DEPTH:
            raise self.error(f"values nested at most {MAX_DEPTH} deep")
        if isinstance(self.value, dict):
            return {Node(name, self.where).text(empty=True): child.json(depth + 1) for name, child in self.members()}
        if isinstance(self.value, list):
            return [child.json(depth + 1) for child in self.items()]
        if isinstance(self.value, str):
            return self.text(empty=True)
        if isinstance(self.value, int) and not -MAX_INTEGER <= self.value <= MAX_INTEGER:
            raise self.error("a whole number of at most 63 bits")
        return self.value


@cache
def _types(kind: type) -> dict[str, Any]:
    """The types of a dataclass's fields, by name."""
    return get_type_hints(kind)


class Written:
    """A dataclass that files have as `written` writes it."""

    __slots__ = ()

    def json(self) -> dict[str, Any]:
        """The fields as JSON values."""
        return written(self)

    @classmethod
    def from_json(cls, node: Node) -> Self:
        """The object with these fields.

        Raises:
            StrategyError: they are not its own.
        """
        return node.record(cls)


def written(value: Any) -> Any:
    """A dataclass as JSON values: its fields by name, without those that are as by default."""
    if isinstance(value, tuple):
        return [*map(written, value)]
    if not is_dataclass(value):
        return value
    found, hints = ((each, getattr(value, each.name)) for each in fields(value)), _types(type(value))
    return {each.name: _written(own, hints[each.name]) for each, own in found if own != each.default}


def _written(value: Any, kind: Any) -> Any:
    return float(value) if kind is float or (float in get_args(kind) and not isinstance(value, tuple)) else written(value)


def parse(text: str) -> Node:
    """The document of a JSON text, with distinct names in each object and finite numbers.

    Raises:
        StrategyError: the text is not such a document.
    """
    try:
        return Node(json.loads(text, object_pairs_hook=_unique, parse_constant=_constant, parse_float=_finite))
    except json.JSONDecodeError as error:
        raise StrategyError(f"at line {error.lineno}, column {error.colno}: expected JSON, got {error.msg!r}") from None
    except ValueError:  # Python's limit on the digits of an int
        raise StrategyError(f"in one of its numbers: expected at most {len(str(MAX_INTEGER))} digits, got thousands") from None
    except RecursionError:
        raise StrategyError(f"at some place: expected values nested at most {MAX_DEPTH} deep, got far more") from None


def printable(text: str) -> bool:
    """Whether the text has no characters that control a terminal."""
    return text.isprintable() or not any(ord(c) < 32 or 127 <= ord(c) < 160 or 0xD800 <= ord(c) < 0xE000 for c in text)


def shown(value: Any) -> str:
    """A short form of any value, for a message."""
    if isinstance(value, dict):
        return f"an object with {', '.join(shown(name) for name in list(value)[:8]) or 'nothing'}"
    if isinstance(value, list):
        return f"a list of {len(value)}"
    text = json.dumps(value)
    return text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]}... ({len(text)} characters)"


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        seen: set[str] = set()
        twice = next(name for name, _ in pairs if name in seen or seen.add(name))
        raise StrategyError(f"in an object: expected each name once, got {shown(twice)} twice")
    return found


def _constant(name: str) -> float:
    raise StrategyError(f"in one of its numbers: expected a finite one, got {name}")


def _finite(text: str) -> float:
    value = float(text)
    if math.isinf(value):
        raise StrategyError(f"in one of its numbers: expected a finite one, got {text[:MAX_SHOWN]}")
    return value
