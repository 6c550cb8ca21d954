"""Leaves of arguments and results: their paths, and the results that replace arguments."""

from __future__ import annotations

import inspect
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax.tree_util import keystr

from autoshard.ir import Value


@dataclass(frozen=True, slots=True)
class Leaf:
    """A leaf of the arguments: the argument's name and position, and the path inside it."""

    argument: int
    name: str
    key: str

    @property
    def path(self) -> str:
        return self.name + self.key


def argument_names(fn: Callable[..., Any], n_args: int) -> tuple[str, ...]:
    """The names of ``n_args`` positional arguments, from the function's signature."""
    try:
        parameters = inspect.signature(fn).parameters.values()
    except (TypeError, ValueError):  # some built-in callables have none
        parameters = ()
    names: list[str] = []
    for parameter in parameters:
        if parameter.kind is inspect.Parameter.VAR_POSITIONAL:
            names.extend(f"{parameter.name}[{i}]" for i in range(n_args - len(names)))
        elif parameter.kind is not inspect.Parameter.VAR_KEYWORD and parameter.kind is not inspect.Parameter.KEYWORD_ONLY:
            names.append(parameter.name)
    names.extend(f"argument{i}" for i in range(len(names), n_args))
    return tuple(names[:n_args])


def plain_leaves(args: Sequence[Any], names: Sequence[str]) -> list[Leaf]:
    """The leaves of a tuple of pytrees, in `jax.tree.leaves` order."""
    return [leaf_at(path, names) for path, _ in jax.tree_util.tree_flatten_with_path(tuple(args))[0]]


def leaf_at(path: Sequence[Any], names: Sequence[str], inside: str = "") -> Leaf:
    """The leaf at a path in the arguments tuple; ``inside`` continues the path, in a module."""
    position: int = path[0].idx
    return Leaf(position, names[position], keystr(tuple(path[1:])) + inside)


def result_path(path: Sequence[Any]) -> str:
    """The path of a result leaf: ``[0]['loss']``, or ``result`` for a result that is no container."""
    return keystr(tuple(path)) or "result"


def find_aliases(
    arguments: Sequence[tuple[str, Value]],
    results: Sequence[tuple[Sequence[Any], Value]],
    donated: Iterable[int],
    fixed: Mapping[int, int],
) -> tuple[tuple[int, int], ...]:
    """Pairs (result, argument) of state that replaces an argument, sorted; each result and argument is in at most one.

    Matched in this order: ``fixed`` pairs; equal paths, shapes and dtypes, where the result is either the state itself or a
    container of states, whichever matches more; single arrays in order; the remaining results with donated arguments.

    Args:
        arguments: per leaf its path inside its argument and its value.
        results: per leaf its key path and its value.
        donated: positions of donated argument leaves.
        fixed: result position to argument position.
    """
    pairs = dict(fixed)

    def match(keys: Mapping[int, str], positions: Iterable[int]) -> dict[int, int]:
        """Results to arguments of the same key, shape and dtype, in order."""
        taken = set(pairs.values())
        waiting: dict[tuple[Any, ...], deque[int]] = defaultdict(deque)
        for position in positions:
            if position not in taken:
                key, value = arguments[position]
                waiting[key, value.shape, value.dtype].append(position)
        found = {}
        for position, key in keys.items():
            value = results[position][1]
            if waiting[key, value.shape, value.dtype]:
                found[position] = waiting[key, value.shape, value.dtype].popleft()
        return found

    free = [position for position in range(len(results)) if position not in pairs]
    everything = range(len(arguments))
    whole = {i: keystr(tuple(results[i][0])) for i in free}
    inner = {i: keystr(tuple(results[i][0][1:])) for i in free}
    as_state, as_container = (match({i: key for i, key in keys.items() if key}, everything) for keys in (whole, inner))
    pairs |= as_state if len(as_state) > len(as_container) else as_container
    pairs |= match({i: key for i, key in inner.items() if not key and i not in pairs}, everything)
    # A donated argument matches any free result: their keys are made equal.
    arguments = [("", value) for _, value in arguments]
    pairs |= match({i: "" for i in free if i not in pairs}, donated)
    return tuple(sorted(pairs.items()))
