"""The batch of a step as its user names it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Any

from autoshard.errors import TraceError
from autoshard.ir.naming import matches_of, near_words
from autoshard.trace.traced import Traced

Batch = str | int | Sequence[str | int] | None
"""What holds the examples: argument paths or patterns of them, positions of arguments, or several of either; None: it is found."""


def checked_batch(batch: Any) -> tuple[str | int, ...]:
    """The names of a batch, one after the other.

    Raises:
        TraceError: they are no paths and no positions.
    """
    several = () if batch is None else (batch,) if isinstance(batch, str | int) else batch
    if not isinstance(several, tuple | list) or any(isinstance(one, bool) or not isinstance(one, str | int) for one in several):
        raise TraceError(
            "batch names the arguments that hold examples, by path, pattern or position, or is a tuple of these, as in batch='x', "
            f"batch=\"batch['image']\" or batch=1; got {batch!r}."
        )
    return tuple(several)


def with_named_batch(traced: Traced, batch: tuple[str | int, ...]) -> Traced:
    """The traced function with the arguments that hold examples as they are named; itself where none is.

    Raises:
        TraceError: a name is no argument's, or none of the arguments has a dimension.
    """
    if not batch:
        return traced
    graph = traced.graph
    named = sorted({position for one in batch for position in _positions(traced, one)})
    ranks = {position: graph.values[graph.arguments[position]].rank for position in named}
    if not any(ranks.values()):
        raise TraceError(f"a batch has a dimension of examples, and batch={batch} names numbers alone. Name the arrays of examples.")
    first, second = (frozenset(position for position, rank in ranks.items() if rank > dim) for dim in (0, 1))
    paths = tuple(graph.argument_paths[position] for position in named)
    return replace(traced, graph=replace(graph, examples=(first, second)), batch=paths)


def _positions(traced: Traced, name: str | int) -> list[int]:
    """The positions of the leaves that a name stands for: that of an argument, or of a container, for all of its leaves."""
    paths, ends = traced.graph.argument_paths, [0, *accumulate(tree.num_leaves for tree in traced.in_tree.children())]
    if isinstance(name, int):
        n = len(ends) - 1
        if not -n <= name < n:
            raise TraceError(f"batch names an argument by path or position, and there are {n}; got {name}. Use 0 to {n - 1}.")
        return [*range(ends[name % n], ends[name % n + 1])]
    found = matches_of(name, paths) or [k for k, path in enumerate(paths) if path.startswith((f"{name}[", f"{name}."))]
    if not found:
        raise TraceError(f"batch names an argument by path or position, and {name!r} is none of {len(paths)}. {near_words(name, paths)}")
    return found
