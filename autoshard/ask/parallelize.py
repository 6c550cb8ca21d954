"""The decorator: search at the first call, then run as `jax.jit` does."""

from __future__ import annotations

import functools
import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MethodType
from typing import Any

import jax

from autoshard.ask.first_call import exhausted, is_whole, refusal, searched_again
from autoshard.ask.outer import LooselyCoupled
from autoshard.ask.searched_at_call import SearchedAtCall
from autoshard.ask.strategy import Strategy
from autoshard.cluster import Cluster
from autoshard.errors import TraceError
from autoshard.plan.confirm import Confirm
from autoshard.plan.microbatching import Microbatches
from autoshard.plan.request import Request, given
from autoshard.plan.searching import answered
from autoshard.plan.user_pins import Pins
from autoshard.progress import Progress
from autoshard.rewrite import Padding
from autoshard.run.calls import UNLIKE, is_traced
from autoshard.run.diloco import DiLoCo
from autoshard.run.padded import PaddedArguments
from autoshard.run.sharded import Sharded, call_type, plain
from autoshard.run.step import Step
from autoshard.search import Searcher
from autoshard.trace import Batch, Held, Static, function_name, held
from autoshard.verify import Options


class Parallelized(SearchedAtCall):
    """A function that is searched for at its first call with arguments of some structure and types, and then runs sharded.

    Attributes:
        strategy: the strategy of the latest search.
    """

    def __init__(self, fn: Callable[..., Any], request: Request, progress: Progress | bool, running: Mapping[str, Any]):
        super().__init__(fn, request, progress, running)
        self._step: Step | None = None  # of the latest call
        self._by_names: dict[Any, Parallelized] = {}

    def search(self, *args: Any, **kwargs: Any) -> Strategy:
        """The strategy for arguments like these, arrays or abstract, without running anything: devices are not needed."""
        if (named := self._named(kwargs)) is not self:
            self._latest = named.search(*args, **kwargs)
            return self._latest
        return self._lookup(held(self._fn, self._ordered(args, kwargs))).strategy

    def __get__(self, instance: Any, owner: type[Any] | None = None) -> Any:
        return self if instance is None else Bound(self, instance)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if kwargs and (named := self._named(kwargs)) is not self:
            result = named(*args, **kwargs)
            self._latest = named.strategy
            return result
        result = UNLIKE if self._step is None else self._step.again(args, kwargs)
        if result is not UNLIKE:
            return result
        args = held(self._fn, self._ordered(args, kwargs))
        found = self._lookup(args)
        if found.has_run or is_traced():
            return self._taken(found).anew(args, {})
        result = self._first(found, args)
        found.has_run = True
        return result

    def _taken(self, found: _Found) -> Step:
        """The step of a strategy, which the next call is taken to be of, too."""
        step = self._applied(found)
        if self._step is not None and step is not self._step:
            self._step.forget()
        self._step = step
        return step

    def _first(self, found: _Found, args: tuple) -> Any:
        """The result of a step's first call; where it does not fit the devices' memory, of another strategy that is predicted to need less.

        In several processes only what the compiler says counts, which is the same in all of them.
        """
        step = self._taken(found)
        refused = refusal(found.strategy, step, args)
        if refused is None:
            try:
                return step.anew(args, {})
            except jax.errors.JaxRuntimeError as error:
                refused = exhausted(error) if jax.process_count() == 1 and is_whole(args) else None
                if refused is None:
                    raise
        again = searched_again(self._fn, args, self._request, self._progress, found.strategy, refused)
        if again is not None:
            found.strategy, found.step = again, None
            self._latest = again
        return self._taken(found).anew(args, {})

    def lower(self, *args: Any, **kwargs: Any) -> jax.stages.Lowered:
        """The lowered program, as `jax.jit(fn).lower` gives it."""
        if (named := self._named(kwargs)) is not self:
            return named.lower(*args, **kwargs)
        args = held(self._fn, self._ordered(args, kwargs))
        return self._applied(self._lookup(args)).lower(*args)

    def _named(self, kwargs: dict[str, Any]) -> Parallelized:
        """The function with what is static and has no position bound, taken out of the keywords; itself where there is nothing."""
        if not kwargs or not isinstance(self._fn, Static) or not (names := self._fn.by_name_alone & kwargs.keys()):
            return self
        given = {name: kwargs.pop(name) for name in sorted(names)}
        key = tuple(map(Held.of, given.values())), tuple(given)
        if key not in self._by_names:
            fn = functools.update_wrapper(functools.partial(self._fn.__wrapped__, **given), self._fn.__wrapped__, updated=())
            names = [name for name in self._fn.static_argnames if name not in given]
            self._by_names[key] = Parallelized(Static(fn, self._fn.static_argnums, names), self._request, self._progress, self._running)
        return self._by_names[key]

    def _applied(self, found: _Found) -> Step:
        if found.step is None:
            found.step = found.strategy.apply(self._fn, **self._running)
        return found.step

    def _lookup(self, args: tuple) -> _Found:
        key = call_type(args)
        if key not in self._found:
            before = [*self._found.items()]
            alike = (found for (_, types), found in before if _arrays(types) == _arrays(call_type(found.as_written(args))[1]))
            self._found[key] = next((found for found in alike if found.runs(self._fn, args)), None) or self._searched(args)
        return self._found[key]

    def _searched(self, args: tuple) -> _Found:
        if self._found:
            warnings.warn(f"{function_name(self._fn)} {_searched_again(args, next(reversed(self._found)))}", stacklevel=4)
        self._latest = Strategy.of(answered(self._fn, args, self._request, self._progress))
        return _Found(self._latest)


class Bound(Sharded):
    """A method of an instance: its first argument is the instance, static where that is no pytree."""

    def __init__(self, method: Parallelized, instance: Any):
        functools.update_wrapper(self, method, updated=())
        self.__wrapped__ = MethodType(plain(method), instance)
        self.donate_argnums: tuple[int, ...] = tuple(position - 1 for position in method.donate_argnums if position > 0)
        self._method = method
        self._instance = instance

    @property
    def strategy(self) -> Strategy:
        """The strategy of the latest search, for whichever instance.

        Raises:
            StrategyError: nothing has been searched yet.
        """
        return self._method.strategy

    def search(self, *args: Any, **kwargs: Any) -> Strategy:
        """The strategy for arguments like these, without running anything."""
        return self._method.search(self._instance, *args, **kwargs)

    def lower(self, *args: Any, **kwargs: Any) -> jax.stages.Lowered:
        """The lowered program, as `jax.jit(fn).lower` gives it."""
        return self._method.lower(self._instance, *args, **kwargs)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._method(self._instance, *args, **kwargs)


@dataclass(slots=True, eq=False)
class _Found:
    """A strategy, and the step that runs so once there was a call."""

    strategy: Strategy
    step: Step | None = None
    has_run: bool = False

    def as_written(self, args: tuple) -> tuple:
        return PaddedArguments(self.strategy.record).as_written(args)

    def runs(self, fn: Callable[..., Any], args: tuple) -> bool:
        return (self.step or self.strategy.lowerable(fn)).runs(args)


def _searched_again(args: tuple, before: tuple) -> str:
    """Why a call waits for another search: what is new of its arguments."""
    structure, types = call_type(args)
    was_structure, was_types = before
    what = "arguments of another structure"
    if structure == was_structure:
        paths = [f"args{jax.tree_util.keystr(path)}" for path, _ in jax.tree_util.tree_leaves_with_path(args)]
        path, now, was = next(found for found in zip(paths, types, was_types, strict=True) if found[1] != found[2])
        what = f"{path} of {_described(now)}, after {_described(was)}"
        if isinstance(now[1], Held):
            return f"is searched again for {what}. Pass the same static values in every step to search only once."
        if now[:2] == was[:2]:
            return f"is searched again for {what}. Weak types are those of arrays made of Python's numbers: give jnp.full(...) a dtype."
        if now[0] == was[0]:
            return f"is searched again for {what}. Pass the same dtypes in every step to search only once."
    return f"is searched again for {what}. Pass the same shapes in every step, a padded last batch for instance, to search only once."


def _arrays(types: Sequence[tuple]) -> list[tuple | None]:
    """Types of leaves, but for those that are static."""
    return [None if isinstance(leaf[1], Held) else leaf for leaf in types]


def _described(leaf: tuple) -> str:
    shape, dtype, weak = leaf
    if isinstance(dtype, Held):
        return f"static {dtype.value!r:.60}"
    return f"{'weak ' if weak else ''}{getattr(dtype, '__name__', dtype)}[{','.join(map(str, shape))}]"


def parallelize(
    fn: Callable[..., Any] | None = None,
    *,
    cluster: Cluster | str | Path | None = None,
    searcher: str | Searcher = "auto",
    mesh: Mapping[str, int] | int | None = None,
    pins: Pins | None = None,
    batch_axes: str | Sequence[str] | None = None,
    batch: Batch = None,
    memory_limit_bytes: float | None = None,
    donate_argnums: int | Sequence[int] = (),
    static_argnums: int | Sequence[int] = (),
    static_argnames: str | Sequence[str] = (),
    progress: Progress | bool = True,
    time_limit_seconds: float | None = None,
    interruptible: bool = False,
    confirm: str | Confirm | bool | None = None,
    microbatches: Microbatches = "fit",
    remat: str | None = "fit",
    offload: str | None = None,
    stages: int | None = None,
    schedule: str | None = None,
    plan: str = "sharding",
    start: Strategy | None = None,
    kernels: str | None = None,
    slow_reduction: str | None = None,
    balance: float | None = 1.0,
    padding: bool | Padding = True,
    devices: Sequence[Any] | None = None,
    compiler_options: Options | None = None,
    bucket_bytes: int | None = None,
    save_graphs: str | os.PathLike[str] | None = None,
    outer: DiLoCo | str | None = None,
) -> Any:
    """The function, sharded as `search` finds best for the arguments of its first call; a decorator with or without options.

    Options are those of `search`, whose progress shows in a terminal; ``devices``, ``compiler_options``, ``bucket_bytes`` and
    ``save_graphs`` those of `Strategy.apply`; ``donate_argnums``, ``static_argnums`` and ``static_argnames`` those of `jax.jit`, where
    ``self`` is argument 0 of a method. Leaves that are no arrays are static by themselves. Arguments of other shapes or types are searched
    for as well, with a warning, and so are static values that make another program. So is, once, a step that does not fit its devices as
    compiled at its first call, or ends there in RESOURCE_EXHAUSTED before any state is used up, within less predicted memory.

    ``outer="diloco"``, or an `autoshard.DiLoCo`, trains a copy of the state on each slice of the cluster, and exchanges what they learned
    every so many steps (`autoshard.run.diloco`): the batch is that of all slices, the function is that of one.

    >>> import jax.numpy as jnp
    >>> @parallelize(cluster="cpu:1")
    ... def double(x):
    ...     return 2 * x
    >>> double(jnp.ones(3))
    Array([2., 2., 2.], dtype=float32)
    """
    options = given(locals())
    if fn is not None and not callable(fn):
        raise TraceError(f"parallelize takes a function, and options by name, got {fn!r:.80}. Write @parallelize(cluster='cpu:8').")
    request = Request.of(**{**options, "cluster": None if cluster is None else Cluster.of(cluster)})
    running = {"devices": devices, "compiler_options": compiler_options, "bucket_bytes": bucket_bytes, "save_graphs": save_graphs}

    def made(function: Callable[..., Any]) -> Parallelized | LooselyCoupled:
        is_static = static_argnums not in ((), None) or static_argnames not in ((), None)
        whole = Static(function, static_argnums, static_argnames) if is_static else function
        own = whole, request, progress, running
        return Parallelized(*own) if outer is None else LooselyCoupled(*own, outer)

    return made if fn is None else made(fn)
