"""The compact form of strategy files: what repeats, such as layers, is written once.

Four rules, on the JSON values that `autoshard.strategy.schema` encodes and decodes:

- Leaves of arguments and results whose paths differ in one number share a line: ``"path": "state['layers'][*]['up']", "first": 0,
  "count": 12, "every": 9`` are twelve leaves, numbered from 0, of which each is the ninth after the one before. Lines are in the order
  of their first leaves, so that the next free place is always the first leaf's.
- A run of leaves laid out as others, such as a new state or moments of parameters, is ``"path": "[0]*", "of": "state*", "first": 0,
  "count": 148``: the 148 arguments from the first one on, whose paths start otherwise.
- In lists of choices, layouts, copies, collectives and children of pytrees, ``{"again": 24, "back": 8, "shift": 45}`` are the 24 entries
  that start 8 entries before, with numbers greater by 45; these may reach into the 24 themselves, which makes three more layers of
  eight entries, as in LZ77 (Ziv, Lempel 1977). The numbers are those of ops and values, the leaves' in pytrees. Collectives have a
  shift of each kind of number: ``ops``, and places in the lists of ``arguments`` and ``results``, whose paths they name.
- A collective that is left may be an earlier line with other fields (`autoshard.strategy.changes`).

`unfold` gives back what `fold` was given.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from autoshard.reader import MAX_DEPTH, MAX_INTEGER, Node
from autoshard.strategy.changes import with_changes, without_changes
from autoshard.strategy.folded_leaves import Budget, fold_leaves, text, unfold_leaves

NUMBERED = ("choices", "layouts", "copies", "ahead", "windows")
LEAVES = ("arguments", "results")
STRUCTURES = ("argument_structure", "result_structure")
CHILDREN = ("tuple", "list", "children")

LEAST = 3  # entries alike by which earlier ones are found: rarer and fewer candidates than with two
CANDIDATES = 64  # the latest of them that are tried

Shift = tuple[int, ...]


def fold(document: dict[str, Any]) -> dict[str, Any]:
    """A strategy's JSON values with repeated parts written once; the same values always give the same form. Linear time."""
    places = _places(document)
    folded = dict(document)
    folded["arguments"] = fold_leaves(document["arguments"], document["arguments"])
    folded["results"] = fold_leaves(document["results"], document["arguments"])
    for name in NUMBERED:
        if name in document:
            folded[name] = _fold_list(document[name], _numbered)
    for name in STRUCTURES:
        folded[name] = _fold_structure(document[name])
    collectives = _fold_list(document["cost"]["collectives"], lambda item: _collective(item, places))
    folded["cost"] = document["cost"] | {"collectives": with_changes(collectives)}
    if "pipeline" in document:
        stages = [stage | {"strategy": fold(stage["strategy"])} for stage in document["pipeline"]["stages"]]
        folded["pipeline"] = document["pipeline"] | {"stages": stages}
    return folded


def unfold(document: Node) -> Node:
    """The values that `fold` was given; parts that are no strategy's are left to `decode`, which refuses them.

    Raises:
        StrategyError: a folded part is invalid; the message has its position.
    """
    return Node(_unfold(document, Budget()), document.where)


def _unfold(document: Node, budget: Budget) -> Any:
    if not isinstance(document.value, dict):
        return document.value
    found, parts = dict(document.value), dict(document.members())
    for name in LEAVES:
        if isinstance(found.get(name), list):
            found[name] = unfold_leaves(parts[name], found.get("arguments") if name == "results" else None, budget)
    for name in NUMBERED:
        if isinstance(found.get(name), list):
            found[name] = _unfold_list(parts[name], _shift_numbered, 1, budget)
    for name in STRUCTURES:
        if name in found:
            found[name] = _unfold_structure(parts[name], budget)
    cost, pipeline = found.get("cost"), found.get("pipeline")
    if isinstance(cost, dict) and isinstance(cost.get("collectives"), list):
        node, places = without_changes(dict(parts["cost"].members())["collectives"]), _places(found)
        found["cost"] = cost | {"collectives": _unfold_list(node, lambda item, shift: _shift_collective(item, shift, places), 3, budget)}
    if isinstance(pipeline, dict) and isinstance(pipeline.get("stages"), list):
        stages = [
            stage.value | {"strategy": _unfold(dict(stage.members())["strategy"], budget)}
            if isinstance(stage.value, dict) and "strategy" in stage.value
            else stage.value
            for stage in dict(parts["pipeline"].members())["stages"].items()
        ]
        found["pipeline"] = pipeline | {"stages": stages}
    return found


# -- lists of entries ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Entry:
    """An entry of a list: its value, what of it must be equal in a copy, and the numbers that are shifted; None where it has none."""

    value: Any
    same: str
    numbers: tuple[int | None, ...]


def _fold_list(items: Sequence[Any], read: Callable[[Any], _Entry]) -> list[Any]:
    """The list with copies of earlier entries, each as long as possible, wherever that is shorter."""
    entries = [read(item) for item in items]
    same = [entry.same for entry in entries]
    texts = [len(text(entry.value)) + 2 for entry in entries]
    starts: dict[tuple[str, ...], list[int]] = defaultdict(list)
    folded, place = [], 0

    def passed(until: int) -> int:
        for start in range(place, until):
            starts[tuple(same[start : start + LEAST])].append(start)
        return until

    while place < len(entries):
        candidates = starts.get(tuple(same[place : place + LEAST]), ())[-CANDIDATES:]
        matches = ((*_match(entries, start, place), start) for start in candidates)
        length, shift, start = max(matches, key=lambda each: (each[0], each[2]), default=(0, (), 0))  # of equally long ones the nearest
        copy = {"again": length, "back": place - start, **_written(shift)} if length else {}
        if copy and len(text(copy)) < sum(texts[place : place + length]):
            folded.append(copy)
            place = passed(place + length)
        else:
            folded.append(entries[place].value)
            place = passed(place + 1)
    return folded


def _match(entries: Sequence[_Entry], start: int, place: int) -> tuple[int, Shift]:
    """How many entries from ``place`` on are those from ``start`` on with constant shifts, and the shifts."""
    shift: list[int | None] = [None] * len(entries[place].numbers)
    length = 0
    while place + length < len(entries):
        old, new = entries[start + length], entries[place + length]
        if old.same != new.same:
            break
        differences = [None if b is None or a is None else b - a for a, b in zip(old.numbers, new.numbers, strict=True)]
        if any(d is not None and s is not None and d != s for d, s in zip(differences, shift, strict=True)):
            break
        shift = [s if d is None else d for d, s in zip(differences, shift, strict=True)]
        length += 1
    return length, tuple(each or 0 for each in shift)


SHIFTS = ("ops", *LEAVES)


def _written(shift: Shift) -> dict[str, Any]:
    if len(shift) == 1:
        return {"shift": shift[0]}
    return {"shift": {name: each for name, each in zip(SHIFTS, shift, strict=True) if each}}


def _unfold_list(node: Node, shifted: Callable[[Any, Shift], Any], n_shifts: int, budget: Budget) -> list[Any]:
    """The list without copies; ``shifted`` gives an entry with its numbers shifted, or None where it has none of the kind."""
    found: list[Any] = []
    for child in node.items():
        if not isinstance(child.value, dict) or "again" not in child.value:
            budget.take(1, child)
            found.append(child.value)
            continue
        part = child.fields("again", "back", "shift")
        count, back = part["again"].integer(1), part["back"].integer(1, len(found))
        budget.take(count, child)
        shift = _read_shift(part["shift"], n_shifts)
        for _ in range(count):
            copy = shifted(found[-back], shift)
            if copy is None:
                raise part["back"].error("the distance to entries whose numbers can be shifted so")
            found.append(copy)
    return found


def _read_shift(node: Node, n_shifts: int) -> Shift:
    if n_shifts == 1:
        return (node.integer(-MAX_INTEGER),)
    part = node.fields(optional=SHIFTS)
    return tuple(part[name].integer(-MAX_INTEGER) if name in part else 0 for name in SHIFTS)


def _numbered(item: Any) -> _Entry:
    number, entry = item
    return _Entry(item, text(entry), (number,))


def _shift_numbered(item: Any, shift: Shift) -> Any:
    if not isinstance(item, list) or len(item) != 2 or not _whole(item[0]):
        return None
    return [item[0] + shift[0], item[1]]


Places = tuple[dict[str, int], ...]


def _places(document: dict[str, Any]) -> Places:
    """Per list of leaves the place of each path."""
    found = []
    for name in LEAVES:
        leaves = document.get(name)
        paths = [leaf.get("path") for leaf in leaves if isinstance(leaf, dict)] if isinstance(leaves, list) else []
        found.append({path: place for place, path in reversed(list(enumerate(paths))) if isinstance(path, str)})
    return tuple(found)


def _collective(item: dict[str, Any], places: Places) -> _Entry:
    """A collective; the op's number, and the places of leaves that its value and its op are named by, may differ in a copy."""
    op, value = item.get("op"), item.get("value") or {}
    same = {**item, "op": op[1:] if isinstance(op, list | tuple) else op, "value": dict(value)}
    argument, result = places[0].get(value.get("argument", "")), places[1].get(op) if isinstance(op, str) else None
    if argument is not None:
        same["value"]["argument"] = None
    if result is not None:
        same["op"] = None
    return _Entry(item, text(same), (op[0] if isinstance(op, list | tuple) else None, argument, result))


def _shift_collective(item: Any, shift: Shift, places: Places) -> Any:
    if not isinstance(item, dict):
        return None
    copy, op, value = dict(item), item.get("op"), item.get("value")
    if isinstance(op, list) and op and _whole(op[0]):
        copy["op"] = [op[0] + shift[0], *op[1:]]
    elif isinstance(op, str) and op in places[1]:
        copy["op"] = _moved(op, shift[2], places[1])
    if isinstance(value, dict) and isinstance(value.get("argument"), str) and value["argument"] in places[0]:
        copy["value"] = value | {"argument": _moved(value["argument"], shift[1], places[0])}
    return copy


def _moved(path: str, shift: int, places: dict[str, int]) -> Any:
    """The path so many places further; None where there is none, which no collective may have."""
    wanted = places[path] + shift
    return next((other for other, place in places.items() if place == wanted), None)


# -- pytrees ---------------------------------------------------------------------------------------------------------------


def _fold_structure(tree: Any) -> Any:
    if not isinstance(tree, dict):
        return tree
    return {
        name: _fold_list([_fold_structure(child) for child in part], _subtree)
        if name in CHILDREN
        else {key: _fold_structure(child) for key, child in part.items()}
        if name == "dict"
        else part
        for name, part in tree.items()
    }


def _subtree(tree: Any) -> _Entry:
    """A child of a pytree, whose leaves' numbers may differ by a constant in a copy."""
    least = min(_leaves(tree), default=None)
    return _Entry(tree, text(_moved_tree(tree, -least if least else 0)), (least,))


def _leaves(tree: Any) -> list[int]:
    if isinstance(tree, dict):
        if "again" in tree:
            return []
        parts = [part for name, part in tree.items() if name not in ("node", "keys")]
        children = [child for part in parts for child in (part.values() if isinstance(part, dict) else part)]
        return [leaf for child in children for leaf in _leaves(child)]
    return [tree] if _whole(tree) else []


def _moved_tree(tree: Any, shift: int, take: Callable[[], None] = lambda: None) -> Any:
    """The pytree with greater numbers of leaves."""
    take()
    if isinstance(tree, list):
        return [_moved_tree(child, shift, take) for child in tree]
    if not isinstance(tree, dict):
        return tree + shift if _whole(tree) else tree
    if "again" in tree:
        return tree
    return {name: part if name in ("node", "keys") else _moved_part(name, part, shift, take) for name, part in tree.items()}


def _moved_part(name: str, part: Any, shift: int, take: Callable[[], None]) -> Any:
    if name == "dict" and isinstance(part, dict):
        return {key: _moved_tree(child, shift, take) for key, child in part.items()}
    return _moved_tree(part, shift, take)


def _unfold_structure(node: Node, budget: Budget, depth: int = 0) -> Any:
    tree = node.value
    if not isinstance(tree, dict) or depth > MAX_DEPTH:
        return tree
    found = {}
    for name, child in node.members():
        if name in CHILDREN and isinstance(child.value, list):
            inner = [Node(_unfold_structure(each, budget, depth + 1), each.where) for each in child.items()]
            found[name] = _unfold_list(
                Node([each.value for each in inner], child.where),
                lambda item, shift: _moved_tree(item, shift[0], lambda: budget.take(1, node)),
                1,
                budget,
            )
        elif name == "dict" and isinstance(child.value, dict):
            found[name] = {key: _unfold_structure(each, budget, depth + 1) for key, each in child.members()}
        else:
            found[name] = child.value
    return found


# -- helpers ---------------------------------------------------------------------------------------------------------------


def _whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
