"""Calls like the call before: `jax.jit` checks the arguments, and no array is looked at twice.

A step that is called with arguments of one structure and one set of types, again and again, goes straight to the jitted function. That
raises where an argument is committed to another sharding, and traces again where a structure, a shape, a type or a weak type is another;
`guarded` makes it raise there too. Whoever calls it then takes the long way. What `jax.jit` does not check is checked here: whether
arrays are used up, where arguments are donated.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from itertools import chain, islice
from operator import itemgetter
from typing import Any

import jax
import jax.extend.core
from jax.sharding import NamedSharding
from jax.tree_util import default_registry, treedef_is_leaf

from autoshard.api.collecting import rarely_collecting
from autoshard.api.placing import put
from autoshard.errors import TraceError

UNLIKE: Any = object()  # what comes back of arguments that are unlike those of the call before
OFTEN = 3  # an argument that had to be moved so often after calls in which it did not is looked through in every call


class UnlikeError(Exception):
    """A program is about to be traced for arguments of other types than it was made for; never seen by a user."""

    def __init__(self, types: tuple):
        super().__init__("arguments of other types")
        self.types = types


def guarded(function: Callable, known: set[tuple]) -> Callable:
    """The function, raising `UnlikeError` where it is traced with arguments whose types are not known.

    The type of an array on a mesh differs from that of one that is not yet there, so that neither is compiled for.
    """

    @functools.wraps(function)
    def checked(*args: Any) -> Any:
        leaves, tree = jax.tree.flatten(args)
        types = tree, *map(jax.typeof, leaves)
        if types not in known:
            raise UnlikeError(types)
        return function(*args)

    return checked


def anew(function: Callable, known: set[tuple], args: tuple) -> Any:
    """What a guarded and jitted function returns of arguments that it was made for, whose types are known from then on."""
    try:
        return function(*args)
    except UnlikeError as error:
        known.add(error.types)
    with rarely_collecting():
        return function(*args)


with jax.ensure_compile_time_eval():
    _EVALUATING = jax.extend.core.get_opaque_trace_state(convention="autoshard")


def is_traced() -> bool:
    """Whether a call stands inside a transformation, such as `jax.grad` or `jax.jit`, so that arguments may be tracers."""
    return jax.extend.core.get_opaque_trace_state(convention="autoshard") != _EVALUATING


class Repeat:
    """A guarded and jitted function on arguments like those before, which are where they should be, but for some that are moved.

    Which arguments hold arrays that have to be moved, such as a batch that comes from the host, is learned from the calls. Where some are
    static, there are two ``ways``: from the arguments to those of arrays alone, and from both and what the function returns to the result.
    """

    # What a call like the one before raises where it is unlike it; any of them leads to the long way, which says what is wrong.
    FAILURES = (UnlikeError, TraceError, AttributeError, LookupError, TypeError, ValueError)

    def __init__(
        self,
        jitted: Callable,
        in_tree: Any,
        in_shardings: Sequence[NamedSharding],
        paths: Sequence[str],
        donates: bool,
        ways: tuple[Callable, Callable] | None = None,
    ):
        arguments = in_tree.children()
        flat, named = iter(in_shardings), iter(paths)
        self._jitted = jitted
        self._ways = ways
        self._shardings = [list(islice(flat, argument.num_leaves)) for argument in arguments]
        self._paths = [list(islice(named, argument.num_leaves)) for argument in arguments]
        shared: dict[Any, Reader] = {}
        holding = [position for position, argument in enumerate(arguments) if argument.num_leaves]
        self._readers = [(position, reader(arguments[position], shared)) for position in holding] if donates else []
        self._moved: tuple[int, ...] = ()
        self._times: Counter[int] = Counter()
        self._is_new = True

    def learn(self, before: Sequence[Any], after: Sequence[Any]) -> bool:
        """Takes from a call's leaves and from where they were put which arguments had to be moved; whether it is the first that is seen."""
        is_first, self._is_new = self._is_new, False
        pairs = zip(before, after, strict=True)
        moved = [any([a is not b for a, b in islice(pairs, len(shardings))]) for shardings in self._shardings]
        found = tuple(position for position, is_moved in enumerate(moved) if is_moved)
        self._times.update(found)
        self._moved = tuple(sorted({*self._moved, *found}))
        return is_first

    def __call__(self, args: tuple) -> Any:
        """The result, or `UNLIKE` where an array is used up, or given twice, of those that may be donated.

        Raises:
            FAILURES: the arguments are unlike those before.
        """
        given = args if self._ways is None else self._ways[0](args)
        found: list[Any] = []
        for position, leaves in self._readers:
            found += leaves(given[position])
        if self._readers and (_used_up(found) or len({*map(id, found)}) < len(found)):
            return UNLIKE
        result = self._jitted(*(self._with_moved(given) if self._moved else given))
        return result if self._ways is None else self._ways[1](args, result)

    def _with_moved(self, args: tuple) -> list[Any]:
        """The arguments, each of those that are looked through where it should be; one of which nothing is moved is forgotten."""
        found = list(args)
        for position in self._moved:
            leaves, tree = jax.tree.flatten(args[position])
            there = put(leaves, self._shardings[position], self._paths[position])
            if any(a is not b for a, b in zip(leaves, there, strict=True)):
                found[position] = tree.unflatten(there)
            elif self._times[position] < OFTEN:
                self._moved = tuple(other for other in self._moved if other != position)
        return found


def _used_up(leaves: Sequence[Any]) -> bool:
    """Whether an array was donated or deleted."""
    try:
        return any(map(_array_type().is_deleted, leaves))
    except TypeError:  # there are numbers, keys or arrays of the host among them
        return any(isinstance(x, jax.Array) and x.is_deleted() for x in leaves)


@functools.cache
def _array_type() -> Any:
    """The class of JAX's arrays: its own method, mapped, is asked in a third of the time."""
    return type(jax.numpy.zeros(()))


Reader = Callable[[Iterable[Any]], Iterable[Any]]


def reader(tree: Any, shared: dict[Any, Reader]) -> Callable[[Any], Iterable[Any]]:
    """What gives the leaves of a pytree of this structure, in any order; several times as fast as flattening, which sorts keys.

    All parts of equal structure are read at once, by functions of C. Of another structure, it raises or gives what it finds.

    >>> sorted(reader(jax.tree.structure({"a": 0, "b": [0, 0]}), {})({"a": 1, "b": [2, 3]}))
    [1, 2, 3]
    """
    read = _reader(tree, shared)
    return lambda node: read((node,))


def _reader(tree: Any, shared: dict[Any, Reader]) -> Reader:
    """From nodes of one structure to their leaves."""
    if tree not in shared:
        shared[tree] = _nothing if not tree.num_leaves else iter if treedef_is_leaf(tree) else _inner(tree, shared)
    return shared[tree]


def _inner(tree: Any, shared: dict[Any, Reader]) -> Reader:
    """From nodes with children to leaves; children of equal structure are read together."""
    kind, keys = tree.node_data()
    children = tree.children()
    places: dict[Any, list[Any]] = {}
    for place, child in zip(keys if kind is dict else range(len(children)), children, strict=True):
        places.setdefault(child, []).append(place)
    opened = _children if kind is not dict and not issubclass(kind, tuple | list) else None
    if len(places) == 1:
        (read,), every = (_reader(child, shared) for child in places), dict.values if kind is dict else opened or iter
        return lambda nodes: read(chain.from_iterable(map(every, nodes)))
    parts = [(_reader(child, shared), itemgetter(*found), len(found) > 1) for child, found in places.items() if child.num_leaves]

    def leaves(nodes: Iterable[Any]) -> Iterable[Any]:
        nodes = list(nodes if opened is None else map(opened, nodes))
        found = [(read, map(get, nodes), several) for read, get, several in parts]
        return chain.from_iterable([read(chain.from_iterable(got) if several else got) for read, got, several in found])

    return leaves


def _nothing(_: Any) -> Iterable[Any]:
    return ()


def _children(node: Any) -> Sequence[Any]:
    """The children of a node of a registered type."""
    return tuple(default_registry.flatten_one_level(node)[0])
