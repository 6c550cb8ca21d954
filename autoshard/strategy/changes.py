"""Lines of strategy files that are written as an earlier line with other fields.

``{"as": 2, "op": [10, "reduce_sum", 2], "reason": 3}`` is the line two lines before, with another op and another reason. Lines that are
copies of several entries (`autoshard.strategy.folding`) stay as they are, and nothing refers to them.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from autoshard.reader import Node

NEAR = 32  # lines before, that a line may refer to: convolutional networks have 20 collectives a block


def with_changes(lines: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The lines, each written by what it changes in one of the lines before it where that is shorter; of equally short ones the nearest."""
    return [min([line, *_changes(lines, place)], key=_length) for place, line in enumerate(lines)]


def without_changes(node: Node) -> Node:
    """The lines in full, which `with_changes` was given.

    Raises:
        StrategyError: a line refers to one that there is not, or to a copy of several.
    """
    found: list[Any] = []
    for child in node.items():
        line = child.value
        if isinstance(line, dict) and "as" in line:
            back = dict(child.members())["as"]
            earlier = found[-back.integer(1, len(found))]
            if not isinstance(earlier, dict) or "again" in earlier:
                raise back.error("the distance to a line that is no copy")
            line = earlier | {name: part for name, part in line.items() if name != "as"}
        found.append(line)
    return Node(found, node.where)


def _changes(lines: Sequence[dict[str, Any]], place: int) -> list[dict[str, Any]]:
    """A line by what it changes in each of the lines before it that have no fields but its own."""
    line = lines[place]
    if "again" in line:
        return []
    near = ((back, lines[place - back]) for back in range(1, min(NEAR, place) + 1))
    alike = ((back, earlier) for back, earlier in near if "again" not in earlier and earlier.keys() <= line.keys())
    return [{"as": back} | {name: part for name, part in line.items() if earlier.get(name) != part} for back, earlier in alike]


def _length(line: dict[str, Any]) -> int:
    return len(json.dumps(line, separators=(",", ":")))
