"""Static values among arguments and results: a program is traced with the arrays alone, and what is no array counts by its value.

Static are the arguments that a function names, as for `jax.jit`; by themselves functions, strings and other leaves that are no arrays; and
the numbers inside Equinox modules, on which their Python code branches.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from inspect import Parameter
from itertools import islice
from typing import Any

import jax
import numpy as np
from jax.tree_util import treedef_is_leaf

from autoshard.errors import TraceError

_ARRAY: Any = object()  # stands where a leaf is an array


@dataclass(frozen=True, slots=True)
class Held:
    """A static value as one leaf, whatever it is made of; equal numbers of different types are different values."""

    value: Any
    kind: type[Any]

    @classmethod
    def of(cls, value: Any) -> Held:
        return value if isinstance(value, Held) else cls(value, type(value))


class Static:
    """A function with static arguments, as `jax.jit` takes them; it is its ``__wrapped__``.

    Raises:
        TraceError: the function has no such parameters.
    """

    __wrapped__: Callable

    def __init__(self, fn: Callable[..., Any], static_argnums: int | Sequence[int], static_argnames: str | Sequence[str]):
        functools.update_wrapper(self, fn, updated=())
        self.static_argnums: tuple[int, ...] = (static_argnums,) if isinstance(static_argnums, int) else tuple(static_argnums)
        self.static_argnames: tuple[str, ...] = (static_argnames,) if isinstance(static_argnames, str) else tuple(static_argnames)
        parameters = inspect.signature(fn).parameters
        kinds, n = [each.kind for each in parameters.values()], len(_positional(parameters.values()))
        within = range(-n, n) if Parameter.VAR_POSITIONAL not in kinds else None
        wrong = [at for at in self.static_argnums if not isinstance(at, int) or (within is not None and at not in within)]
        if wrong:
            raise TraceError(f"static_argnums are positions among the {n} parameters, got {wrong[0]!r}. Use 0 to {n - 1}.")
        unknown = [name for name in self.static_argnames if Parameter.VAR_KEYWORD not in kinds and name not in parameters]
        if unknown:
            raise TraceError(f"static_argnames are names of parameters, got {unknown[0]!r}. Use some of: {', '.join(parameters)}.")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.__wrapped__(*args, **kwargs)

    @functools.cached_property
    def by_name_alone(self) -> frozenset[str]:
        """The static parameters that have no position."""
        return frozenset(self.static_argnames).difference(_positional(inspect.signature(self.__wrapped__).parameters.values()))


def held(fn: Callable[..., Any], args: tuple[Any, ...]) -> tuple[Any, ...]:
    """The arguments, with each that the function holds static as one leaf, and each number inside an Equinox module."""
    if positions := _static_positions(fn, len(args)):
        args = tuple(Held.of(x) if position in positions else x for position, x in enumerate(args))
    filters = hasattr(fn, "donate_first")  # as what Equinox's filter_jit returns has
    return tuple(jax.tree.map(_without_numbers, x) if filters else held_modules(x) for x in args)


def without(statics: Sequence[tuple[int, Held]], args: tuple[Any, ...]) -> tuple[Any, ...]:
    """The arguments with None for each of those that are static, by position.

    Raises:
        TraceError: one of them has another value.
    """
    found = list(args)
    for position, value in statics:
        if Held.of(args[position]) != value:
            raise TraceError("A function is traced for one set of static values, and these are others. Trace or search again with these.")
        found[position] = None
    return tuple(found)


def held_modules(tree: Any) -> Any:
    """The tree with each number inside an Equinox module as one leaf; Equinox is not imported if nobody has."""
    equinox = sys.modules.get("equinox")
    if equinox is None:
        return tree

    def is_module(x: Any) -> bool:
        return isinstance(x, equinox.Module)

    if not any(map(is_module, jax.tree.leaves(tree, is_leaf=is_module))):
        return tree
    return jax.tree.map(lambda x: jax.tree.map(_without_numbers, x) if is_module(x) else x, tree, is_leaf=is_module)


def released(tree: Any) -> Any:
    """The tree with static values as they were before they were held; the same object where none was."""
    if not any(isinstance(x, Held) for x in jax.tree.leaves(tree)):
        return tree
    return jax.tree.map(lambda x: x.value if isinstance(x, Held) else x, tree)


def is_static(x: Any) -> bool:
    """Whether a leaf is no array, and nothing that JAX makes one of."""
    if isinstance(x, jax.Array | np.ndarray | np.generic | jax.ShapeDtypeStruct | bool | int | float | complex):
        return False
    return not isinstance(getattr(x, "shape", None), tuple) and not hasattr(type(x), "__jax_array__")


class Statics:
    """The static leaves of a tree, and where they stand."""

    def __init__(self, structure: Any, values: tuple[Any, ...]):
        self._structure = structure
        self._values = values  # per leaf; `_ARRAY` of an array

    @classmethod
    def of(cls, tree: Any) -> Statics | None:
        """Those of a tree; None where all leaves are arrays."""
        leaves, structure = jax.tree.flatten(tree)
        values = tuple(x if is_static(x) else _ARRAY for x in leaves)
        return None if all(value is _ARRAY for value in values) else cls(structure, values)

    def arrays(self, entries: Iterable[Any]) -> list[Any]:
        """Of one entry a leaf those of arrays."""
        return [x for x, value in zip(entries, self._values, strict=True) if value is _ARRAY]

    def whole(self) -> list[tuple[int, Held]] | None:
        """Of a tuple of arguments the position and the value of each that is static as a whole; None where others have static leaves."""
        values, found = iter(self._values), []
        for position, argument in enumerate(self._structure.children()):
            own = [value for value in islice(values, argument.num_leaves) if value is not _ARRAY]
            if own and not treedef_is_leaf(argument):
                return None
            found += [(position, Held.of(value)) for value in own]
        return found

    def check(self, paths: Iterable[str]) -> None:
        """Raises `TraceError` for a static value without a hash; ``paths`` has one a leaf."""
        for path, value in zip(paths, self._values, strict=True):
            x = value.value if isinstance(value, Held) else value
            try:
                hash(x)
            except TypeError:
                raise TraceError(
                    f"What is static, as all that is no array, counts by its hash: '{path}' is {type(x).__name__} {x!r:.60}, without one. "
                    "Pass an array, or bind the value beforehand with functools.partial."
                ) from None

    def split(self, tree: Any) -> Any:
        """The tree with None for each static leaf.

        Raises:
            TraceError: it has another structure or other static values.
        """
        leaves, structure = jax.tree.flatten(tree)
        pairs = [*zip(leaves, self._values, strict=True)] if structure == self._structure else []
        if structure != self._structure or any(value is not _ARRAY and x is not value and x != value for x, value in pairs):
            raise TraceError("A function is traced for one set of static values, and these are others. Trace or search again with these.")
        return structure.unflatten([x if value is _ARRAY else None for x, value in pairs])

    def merge(self, tree: Any) -> Any:
        """The tree with its static leaves back in place."""
        arrays = iter(jax.tree.leaves(tree))
        return self._structure.unflatten([next(arrays) if value is _ARRAY else value for value in self._values])


def _static_positions(fn: Callable, n_args: int) -> frozenset[int]:
    options = fn if isinstance(fn, Static) else getattr(fn, "_jit_info", None)  # JAX 0.10 has no public place for what is static
    if options is None:
        return frozenset()
    names = _positional(inspect.signature(fn).parameters.values())
    given = {position % n_args for position in options.static_argnums if -n_args <= position < n_args}
    return frozenset(given.union(names.index(name) for name in options.static_argnames if name in names[:n_args]))


def _positional(parameters: Iterable[Parameter]) -> list[str]:
    return [each.name for each in parameters if each.kind in (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD)]


def _without_numbers(x: Any) -> Any:
    return Held.of(x) if isinstance(x, bool | int | float | complex) else x
