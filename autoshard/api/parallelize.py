"""The decorator: search at the first call, then run as `jax.jit` does."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from autoshard.api.search import Pins, search
from autoshard.api.step import Sharded, Step, call_type, positional
from autoshard.api.strategy import Strategy
from autoshard.cluster import Cluster
from autoshard.errors import StrategyError, TraceError
from autoshard.search import Searcher


class Parallelized(Sharded):
    """A function that is searched for at its first call with arguments of some structure and types, and then runs sharded.

    Attributes:
        strategy: the strategy of the latest search.
    """

    def __init__(self, fn: Callable, options: Mapping[str, Any], devices: Sequence[Any] | None):
        functools.update_wrapper(self, fn, updated=())
        self._fn = fn
        self._options = options
        self._devices = devices
        self._found: dict[Any, tuple[Strategy, Step]] = {}
        self._latest: Strategy | None = None

    @property
    def strategy(self) -> Strategy:
        """The strategy of the latest search.

        Raises:
            StrategyError: nothing has been searched yet.
        """
        if self._latest is None:
            name = getattr(self._fn, "__name__", self._fn)
            raise StrategyError(f"{name} has a strategy once it was called, or after its .search(*args). Call one of them first.")
        return self._latest

    def search(self, *args: Any) -> Strategy:
        """The strategy for arguments like these, arrays or abstract, without running anything."""
        return self._lookup(args)[0]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        args = positional(self._fn, args, kwargs)
        return self._lookup(args)[1](*args)

    def lower(self, *args: Any) -> jax.stages.Lowered:
        """The lowered program, as `jax.jit(fn).lower` gives it."""
        return self._lookup(args)[1].lower(*args)

    def _lookup(self, args: tuple) -> tuple[Strategy, Step]:
        key = call_type(args)
        if key not in self._found:
            strategy = search(self._fn, *args, **self._options)
            self._found[key] = strategy, strategy.apply(self._fn, self._devices)
            self._latest = strategy
        return self._found[key]


def parallelize(
    fn: Callable | None = None,
    *,
    cluster: Cluster | str | None = None,
    searcher: str | Searcher = "auto",
    mesh: Mapping[str, int] | int | None = None,
    pins: Pins | None = None,
    memory_limit_bytes: float | None = None,
    donate_argnums: int | Sequence[int] = (),
    devices: Sequence[Any] | None = None,
) -> Any:
    """The function, sharded as `search` finds best for the arguments of its first call; a decorator with or without options.

    Options are those of `search`; ``devices`` those of `Strategy.apply`.

    >>> import jax.numpy as jnp
    >>> @parallelize(cluster="cpu:1")
    ... def double(x):
    ...     return 2 * x
    >>> double(jnp.ones(3))
    Array([2., 2., 2.], dtype=float32)
    """
    options = {
        "cluster": cluster,
        "searcher": searcher,
        "mesh": mesh,
        "pins": pins,
        "memory_limit_bytes": memory_limit_bytes,
        "donate_argnums": donate_argnums,
    }
    if fn is not None and not callable(fn):
        raise TraceError(f"parallelize takes a function, and options by name, got {fn!r:.80}. Write @parallelize(cluster='cpu:8').")
    if fn is None:
        return lambda function: Parallelized(function, options, devices)
    return Parallelized(fn, options, devices)
