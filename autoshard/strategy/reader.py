"""Validating reader of untrusted JSON: values with their position in the document, for error messages."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from autoshard.errors import StrategyError

MAX_DEPTH = 100
"""The greatest nesting of values; pytrees of real programs stay below 20."""

MAX_INTEGER = 2**63 - 1
MAX_NUMBER = 1e30
MAX_SHOWN = 80


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
