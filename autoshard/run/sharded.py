"""Functions that run sharded, and arguments of their calls: by which parameters they go, and what tells programs for them apart."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import jax
from jax.core import Tracer

from autoshard.errors import StrategyError, TraceError
from autoshard.run.tracing import TracedOnce
from autoshard.trace import Held, is_static


class Sharded:
    """A function that runs sharded; the function that it was made of is its ``__wrapped__``."""

    __wrapped__: Callable
    donate_argnums: tuple[int, ...]


def several(positions: int | Sequence[int]) -> tuple[Any, ...]:
    """Positions of arguments, one or several, as a tuple of what was given."""
    return tuple(positions) if isinstance(positions, Sequence) and not isinstance(positions, str) else (positions,)


def plain(fn: Callable[..., Any] | Sharded | TracedOnce) -> Callable[..., Any]:
    """The function without any sharding of ours: what a search, or another strategy, starts from."""
    return plain(fn.__wrapped__) if isinstance(fn, Sharded | TracedOnce) else fn


def call_type(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """What tells programs apart: the arguments' structure, and the leaves' shapes and dtypes."""
    leaves, tree = jax.tree.flatten(args)
    return tree, tuple(map(_leaf_type, leaves))


def _leaf_type(x: Any) -> tuple:
    """Shape, dtype and whether it is weakly typed, of a Python number as of the array that JAX makes of it; the value of what is static."""
    if is_static(x):
        with suppress(TypeError):
            hash(x)
            return (), Held.of(x), False
        return (), object(), False  # is found nowhere, and refused where it is traced
    if isinstance(x, bool | int | float | complex):
        with suppress(OverflowError):
            x = jax.typeof(x)
    return getattr(x, "shape", ()), getattr(x, "dtype", type(x)), getattr(x, "weak_type", False)


class Positional:
    """The order of a function's parameters: from a call's arguments, some by keyword, to all of them by position."""

    def __init__(self, fn: Callable[..., Any]):
        self._fn = fn
        self._names: dict[tuple, tuple[str, ...]] = {}  # per number of arguments and set of keywords these in order

    def __call__(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Any, ...]:
        """The arguments of a call in the order of the function's parameters.

        Raises:
            TraceError: a keyword names no positional parameter.
        """
        if not kwargs:
            return args
        key = len(args), *kwargs
        if (names := self._names.get(key)) is None:
            names = self._names[key] = self._found(len(args), tuple(kwargs))
        return *args, *map(kwargs.__getitem__, names)

    def _found(self, n: int, names: tuple[str, ...]) -> tuple[str, ...]:
        try:
            bound = inspect.signature(self._fn).bind(*(None,) * n, **dict(zip(names, names, strict=True)))
        except (TypeError, ValueError) as error:
            raise TraceError(
                f"A call passes the function's arguments by position or by name, and this one does not fit: {error}."
            ) from None
        if bound.kwargs:
            raise TraceError(
                f"A sharded function takes positional arguments; {sorted(bound.kwargs)} can be passed by keyword only. "
                "Bind them beforehand with functools.partial, or make them positional."
            )
        return bound.args[n:]


def check_alive(leaves: list[Any], paths: Sequence[str]) -> None:
    """Raises `StrategyError` for arrays that an earlier call was given to keep; jaxlib 0.10.2 may crash on these."""
    for x, path in zip(leaves, paths, strict=True):
        if isinstance(x, jax.Array) and not isinstance(x, Tracer) and x.is_deleted():
            raise StrategyError(
                f"a donated argument is used up by the call it is passed to, and {path} was passed to an earlier one. Pass what that call "
                "returned in its place, or leave the argument out of donate_argnums."
            )
