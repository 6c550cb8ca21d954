"""The decorator: search at the first call, then run as `jax.jit` does."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax

from autoshard.api.calls import UNLIKE
from autoshard.api.confirm import Confirm, confirm_of
from autoshard.api.search import Pins, search
from autoshard.api.step import Sharded, Step, call_type, positional
from autoshard.api.strategy import Strategy
from autoshard.cluster import Cluster
from autoshard.errors import StrategyError, TraceError
from autoshard.search import Progress, Searcher, searcher_of
from autoshard.trace import function_name


class Parallelized(Sharded):
    """A function that is searched for at its first call with arguments of some structure and types, and then runs sharded.

    Attributes:
        strategy: the strategy of the latest search.
    """

    def __init__(self, fn: Callable, options: Mapping[str, Any], devices: Sequence[Any] | None):
        functools.update_wrapper(self, fn, updated=())
        self._fn = fn
        self._options = options
        donated = options["donate_argnums"]
        self.donate_argnums = (donated,) if isinstance(donated, int) else tuple(donated)
        self._devices = devices
        self._found: dict[Any, _Found] = {}
        self._latest: Strategy | None = None
        self._step: Step | None = None  # of the latest call

    @property
    def strategy(self) -> Strategy:
        """The strategy of the latest search.

        Raises:
            StrategyError: nothing has been searched yet.
        """
        if self._latest is None:
            raise StrategyError(
                f"{function_name(self._fn)} has a strategy once it was called, or after its .search(*args). Call one of them."
            )
        return self._latest

    def search(self, *args: Any) -> Strategy:
        """The strategy for arguments like these, arrays or abstract, without running anything: devices are not needed."""
        return self._lookup(args).strategy

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        result = UNLIKE if self._step is None else self._step.again(args, kwargs)
        if result is not UNLIKE:
            return result
        args = positional(self._fn, args, kwargs)
        step = self._applied(self._lookup(args))
        if self._step is not None and step is not self._step:
            self._step.forget()
        self._step = step
        return step.anew(args, {})

    def lower(self, *args: Any) -> jax.stages.Lowered:
        """The lowered program, as `jax.jit(fn).lower` gives it."""
        return self._applied(self._lookup(args)).lower(*args)

    def _applied(self, found: _Found) -> Step:
        if found.step is None:
            found.step = found.strategy.apply(self._fn, self._devices)
        return found.step

    def _lookup(self, args: tuple) -> _Found:
        key = call_type(args)
        if key not in self._found:
            alike = (found for (_, types), found in self._found.items() if types == key[1])
            self._found[key] = next((found for found in alike if found.runs(self._fn, args)), None) or self._searched(args)
        return self._found[key]

    def _searched(self, args: tuple) -> _Found:
        if self._found:
            warnings.warn(f"{function_name(self._fn)} {_searched_again(args, next(reversed(self._found)))}", stacklevel=4)
        self._latest = search(self._fn, *args, **self._options)
        return _Found(self._latest)


@dataclass(slots=True, eq=False)
class _Found:
    """A strategy, and the step that runs so once there was a call."""

    strategy: Strategy
    step: Step | None = None

    def runs(self, fn: Callable, args: tuple) -> bool:
        return (self.step or Step(fn, self.strategy.record, None)).runs(args)


def _searched_again(args: tuple, before: tuple) -> str:
    """Why a call waits for another search: what is new of its arguments."""
    structure, types = call_type(args)
    was_structure, was_types = before
    what = "arguments of another structure"
    if structure == was_structure:
        paths = [f"args{jax.tree_util.keystr(path)}" for path, _ in jax.tree_util.tree_leaves_with_path(args)]
        path, now, was = next(found for found in zip(paths, types, was_types, strict=True) if found[1] != found[2])
        what = f"{path} of {_described(now)}, after {_described(was)}"
        if now[0] == was[0]:
            return f"is searched again for {what}. Pass the same dtypes in every step to search only once."
    return f"is searched again for {what}. Pass the same shapes in every step, a padded last batch for instance, to search only once."


def _described(leaf: tuple) -> str:
    shape, dtype, weak = leaf
    return f"{'weak ' if weak else ''}{getattr(dtype, '__name__', dtype)}[{','.join(map(str, shape))}]"


def parallelize(
    fn: Callable | None = None,
    *,
    cluster: Cluster | str | Path | None = None,
    searcher: str | Searcher = "auto",
    mesh: Mapping[str, int] | int | None = None,
    pins: Pins | None = None,
    memory_limit_bytes: float | None = None,
    donate_argnums: int | Sequence[int] = (),
    progress: Progress | bool = True,
    time_limit_seconds: float | None = None,
    interruptible: bool = False,
    confirm: str | Confirm | None = None,
    devices: Sequence[Any] | None = None,
) -> Any:
    """The function, sharded as `search` finds best for the arguments of its first call; a decorator with or without options.

    Options are those of `search`, whose progress shows in a terminal; ``devices`` those of `Strategy.apply`. Arguments of other shapes or
    types are searched for as well, with a warning.

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
        "progress": progress,
        "time_limit_seconds": time_limit_seconds,
        "interruptible": interruptible,
        "confirm": confirm_of(confirm),
    }
    if fn is not None and not callable(fn):
        raise TraceError(f"parallelize takes a function, and options by name, got {fn!r:.80}. Write @parallelize(cluster='cpu:8').")
    searcher_of(searcher)  # what is misspelt is said here, not at the first call
    if cluster is not None:
        options["cluster"] = Cluster.of(cluster)
    if fn is None:
        return lambda function: Parallelized(function, options, devices)
    return Parallelized(fn, options, devices)
