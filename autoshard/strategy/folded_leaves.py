"""Leaves of arguments and results in the compact form of strategy files: series of numbers, and runs that are laid out as others.

The first two rules of `autoshard.strategy.folding`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

from autoshard.reader import Node

MAX_ENTRIES = 2**22
"""Entries of all lists of a file once they are unfolded, so that a small file cannot fill the memory; 96 layers have 10**5."""


class Budget:
    """Counts the entries that a document unfolds to."""

    def __init__(self):
        self.left = MAX_ENTRIES

    def take(self, count: int, node: Node) -> None:
        self.left -= count
        if self.left < 0:
            raise node.error(f"lists of at most {MAX_ENTRIES} entries in all")


def text(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"))


def fold_leaves(leaves: Sequence[Any], arguments: Sequence[Any]) -> list[Any]:
    """The lines of leaves: runs of (earlier) arguments, series in which one number of the path counts up, and the rest."""
    tails = _tails(arguments)
    first: dict[tuple[str, str, str, int], int] = {}  # rest of the leaf, path before and after a number, the number: place
    keys: list[list[tuple[str, str, str, int]]] = []
    for place, leaf in enumerate(leaves):
        keys.append([(text(_rest(leaf)), *parts) for parts in _numbers(leaf["path"])])
        for key in keys[-1]:
            first.setdefault(key, place)
    lines, taken = [], set()
    for place, leaf in enumerate(leaves):
        if place in taken:
            continue
        run = _run(leaves, place, arguments, tails)
        if run and taken.isdisjoint(range(place, place + run["count"])):
            taken.update(range(place, place + run["count"]))
            lines.append(run)
            continue
        series = [(_series(place, key, first, taken), key) for key in keys[place]]
        places, key = max(series, key=lambda each: len(each[0]), default=([place], None))
        if key is None or len(places) < 2:
            lines.append(leaf)
            continue
        taken.update(places)
        _, before, after, number = key
        counted = {"first": number, "count": len(places), "every": places[1] - places[0]}
        lines.append({"path": f"{before}*{after}", **counted, **_rest(leaf)})
    return lines


def _cuts(path: str) -> list[int]:
    """The positions at which a path can be cut before a key."""
    return [m.start() for m in re.finditer(r"[\[.]", path)]


def _tails(arguments: Sequence[Any]) -> dict[tuple[str, str], int]:
    """The place of the first argument by its rest and each end of its path."""
    found: dict[tuple[str, str], int] = {}
    for place, leaf in enumerate(arguments):
        rest = text(_rest(leaf))
        for cut in _cuts(leaf["path"]):
            found.setdefault((rest, leaf["path"][cut:]), place)
    return found


def _run(leaves: Sequence[Any], place: int, arguments: Sequence[Any], tails: dict[tuple[str, str], int]) -> dict[str, Any] | None:
    """The line of two leaves or more, from this place on, that are laid out as arguments in a row; None where there is none."""
    path, rest, last = leaves[place]["path"], text(_rest(leaves[place])), place if leaves is arguments else len(arguments)
    if "*" in path:
        return None
    cut = next((cut for cut in _cuts(path) if tails.get((rest, path[cut:]), last) < last), None)
    if cut is None:
        return None
    first = tails[rest, path[cut:]]
    new, old = path[:cut], arguments[first]["path"].removesuffix(path[cut:])
    count = 0
    for result, argument in zip(leaves[place:], arguments[first:last], strict=False):
        tail = argument["path"].removeprefix(old)
        if not argument["path"].startswith(old) or result != {**argument, "path": f"{new}{tail}"}:
            break
        count += 1
    return {"path": f"{new}*", "of": f"{old}*", "first": first, "count": count} if count > 1 and "*" not in old else None


def _series(place: int, key: tuple[str, str, str, int], first: dict[Any, int], taken: set[int]) -> list[int]:
    """The places of leaves alike whose number is one greater each time, at equal distances."""
    places, number = [place], key[-1]
    while (following := first.get((*key[:-1], number + len(places)))) is not None:
        every = places[1] - place if len(places) > 1 else following - place
        if every < 1 or following != places[-1] + every or following in taken:
            break
        places.append(following)
    return places


def _numbers(path: str) -> list[tuple[str, str, int]]:
    """Each number in a path with what is before and after it; none where the path has a star already."""
    if "*" in path:
        return []
    found = ((path[: m.start()], path[m.end() :], m[0]) for m in re.finditer("[0-9]+", path))
    return [(before, after, int(digits)) for before, after, digits in found if len(digits) < 10 and str(int(digits)) == digits]


def _rest(leaf: dict[str, Any]) -> dict[str, Any]:
    return {name: part for name, part in leaf.items() if name != "path"}


def unfold_leaves(node: Node, arguments: Any, budget: Budget) -> list[Any]:
    """All leaves; runs are of these arguments, of arguments themselves of earlier ones, which is None here."""
    lines = node.items()
    counts = [line.value.get("count", 1) if isinstance(line.value, dict) else 1 for line in lines]
    for line, count in zip(lines, counts, strict=True):
        budget.take(Node(count, f"{line.where}.count").integer(1), line)
    found: list[Any] = [None] * sum(counts)
    free = 0
    for line, count in zip(lines, counts, strict=True):
        while found[free] is not None:
            free += 1
        if not isinstance(line.value, dict) or "count" not in line.value:
            found[free] = line.value
            continue
        copied = "of" in line.value
        part = dict(line.members())
        for name in ("path", "first", "of" if copied else "every"):
            if name not in part:
                raise line.error(f"an object with {name!r}")
        before, star, after = part["path"].text().partition("*")
        first, every = part["first"].integer(0), 1 if copied else part["every"].integer(1)
        places = range(free, free + count * every, every)
        if not star or places[-1] >= len(found) or any(found[place] is not None for place in places):
            raise line.error("a path with a star, whose leaves have free places")
        if copied:
            known = found[:free] if arguments is None else arguments if isinstance(arguments, list) else []
            made = _as_arguments(part, before, known[first : first + count])
            if len(made) < count:
                raise part["count"].error(f"a count of arguments that there are from {first} on")
        else:
            rest = {name: value for name, value in line.value.items() if name not in ("path", "first", "count", "every")}
            made = [{"path": f"{before}{first + index}{after}", **rest} for index in range(count)]
        for place, leaf in zip(places, made, strict=True):
            found[place] = leaf
    return found


def _as_arguments(part: dict[str, Node], start: str, arguments: Sequence[Any]) -> list[Any]:
    """Leaves as those arguments, whose paths start otherwise."""
    old, made = part["of"].text().removesuffix("*"), []
    for argument in arguments:
        if not isinstance(argument, dict) or not isinstance(argument.get("path"), str) or not argument["path"].startswith(old):
            raise part["of"].error("the start of the paths of the arguments from the first one on, and a star")
        made.append({**argument, "path": start + argument["path"].removeprefix(old)})
    return made
