"""Calls like the call before: `jax.jit` checks the arguments, and no array is looked at twice.

A step that is called with arguments of one structure and one set of types, again and again, goes straight to the jitted function. That
raises where an argument is committed to another sharding, and traces again where a structure, a shape, a type or a weak type is another;
`Guarded` makes it raise there too. Whoever calls it then takes the long way. What older jaxlib does not check is checked here: whether
arrays are used up, where arguments are donated. That one array is donated in two places is noticed on the long way alone.
"""

from __future__ import annotations

import functools
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from itertools import chain, islice
from operator import is_, itemgetter
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.extend.core import get_opaque_trace_state
from jax.sharding import AbstractMesh, Mesh, NamedSharding, get_abstract_mesh
from jax.tree_util import default_registry, treedef_is_leaf

from autoshard.compilers import TARGETS
from autoshard.errors import TraceError
from autoshard.run.collecting import rarely_collecting
from autoshard.run.placing import put

UNLIKE: Any = object()  # what comes back of arguments that are unlike those of the call before
CRASHES = tuple(map(int, jax.__version__.split(".")[:2])) < (0, 12)  # on several devices, of a used up array where some are donated
OFTEN = 3  # an argument that had to be moved so often after calls in which it did not is looked through in every call


class UnlikeError(Exception):
    """A program is about to be traced for arguments of other types than it was made for; never seen by a user."""


def in_turn(call: Callable[..., Any], mesh: Mesh | AbstractMesh) -> Callable[..., Any]:
    """A function of arrays on a mesh, of which each call waits for its arguments and for the call before where a runtime asks for that.

    XLA:CPU (jaxlib 0.10.2) waits forever once 32 programs are under way on a device: the next is started by a thread that waits for one of
    them to end, which needs that thread while all others wait in collectives. A hundred steps without a look at a result are enough.
    """
    compiler = TARGETS.get(mesh.devices.flat[0].platform) if isinstance(mesh, Mesh) and mesh.size > 1 else None
    if compiler is None or not compiler.hangs_ahead:
        return call
    latest: list[Any] = []

    def called(*args: Any) -> Any:
        jax.block_until_ready([x for x in jax.tree.leaves((args, latest)) if _is_there(x)])
        result = call(*args)
        latest[:] = sorted(filter(_is_there, jax.tree.leaves(result)), key=lambda x: x.size)[:1]
        return result

    return called


def _is_there(x: Any) -> bool:
    return isinstance(x, jax.Array) and not isinstance(x, Tracer) and not x.is_deleted()


class Guarded:
    """A jitted function that is traced only for arguments that were looked at: here, and not where ``jitted`` is called directly.

    Where it would be traced for others, ``jitted`` raises `UnlikeError`. The type of an array on a mesh differs from that of one that is
    not yet there, so that neither is compiled for. It never raises for arguments that it is called with here: of types for which a first
    call raised, jaxlib 0.10 to 0.12 takes every later call through Python (`fall_back_to_python` in its pjit.cc), at three times the price.

    Attributes:
        jitted: `jax.jit` of the function.
        call: the same, in turn on CPUs (`in_turn`).
    """

    def __init__(self, function: Callable[..., Any], mesh: Mesh | AbstractMesh, **options: Any):
        """``mesh`` is the one that it runs on; ``options`` are those of `jax.jit`."""
        self._known: set[tuple] = set()
        self._in_this_thread = threading.local()
        self.jitted = jax.jit(self._checked(function), **options)
        self.call = in_turn(self.jitted, mesh)

    @property
    def is_new(self) -> bool:
        """Whether it was never traced."""
        return not self._known

    def __call__(self, *args: Any) -> Any:
        """The result for arguments that were looked at."""
        return self._looked_at(self.call, args)

    def trace(self, *args: Any) -> jax.stages.Traced:
        """The traced function for abstract arguments that were looked at."""
        return self._looked_at(self.jitted.trace, args)

    def _looked_at(self, call: Callable, args: tuple) -> Any:
        self._in_this_thread.looked_at = True
        try:
            with rarely_collecting():
                return call(*args)
        finally:
            self._in_this_thread.looked_at = False

    def _checked(self, function: Callable) -> Callable:
        @functools.wraps(function)
        def checked(*args: Any) -> Any:
            leaves, tree = jax.tree.flatten(args)
            types = tree, jax.sharding.get_abstract_mesh(), *map(jax.typeof, leaves)
            if types not in self._known and not getattr(self._in_this_thread, "looked_at", False):
                raise UnlikeError("arguments of other types")
            self._known.add(types)
            return function(*args)

        return checked


class Alike:
    """A function that `jax.jit` does not call, such as a pipeline, which raises `UnlikeError` where `Guarded` would.

    Types and shardings that are the very objects of the call before, as those of results are, are not looked at again.
    """

    def __init__(self, function: Callable[[list[Any]], Any], in_tree: Any, avals: Sequence[Any], in_shardings: Sequence[NamedSharding]):
        """``function`` is of the list of the arguments' leaves, which have these types."""
        self._function, self._in_tree, self._in_shardings = function, in_tree, in_shardings
        self._types = [_type_of(aval) for aval in avals]
        self._seen: list[list[Any]] = [[], []]

    def __call__(self, *args: Any) -> Any:
        leaves, tree = jax.tree.flatten(args)
        if tree != self._in_tree or get_abstract_mesh().axis_names:
            raise UnlikeError("arguments of another structure, or a mesh around")
        found = [[x.aval for x in leaves], [x.sharding for x in leaves]]
        if not all(len(new) == len(old) and all(map(is_, new, old)) for new, old in zip(found, self._seen, strict=True)):
            if not all(map(self._fits, leaves, self._types, self._in_shardings)):
                raise UnlikeError("arguments of other types, or elsewhere")
            self._seen = found
        return self._function(leaves)

    @staticmethod
    def _fits(x: Any, type_: tuple, sharding: NamedSharding) -> bool:
        return _type_of(x) == type_ and x.committed and (x.sharding == sharding or x.sharding.is_equivalent_to(sharding, x.ndim))


def _type_of(x: Any) -> tuple:
    return x.shape, x.dtype, x.weak_type


with jax.ensure_compile_time_eval():
    _EVALUATING = get_opaque_trace_state(convention="autoshard")


def is_traced() -> bool:
    """Whether a call stands inside a transformation, such as `jax.grad` or `jax.jit`, so that arguments may be tracers."""
    return get_opaque_trace_state(convention="autoshard") != _EVALUATING


class Repeat:
    """A guarded and jitted function on arguments like those before, which are where they should be, but for some that are moved.

    Which arguments hold arrays that have to be moved, such as a batch that comes from the host, is learned from the calls. Where some are
    static, or NNX objects, there are two ``ways``: from the arguments to those of arrays alone, and from the arguments, what the function
    returns and these arrays to the result.
    """

    # What a call like the one before raises where it is unlike it; any of them leads to the long way, which says what is wrong.
    FAILURES = (UnlikeError, TraceError, AttributeError, LookupError, TypeError, ValueError)

    def __init__(
        self,
        jitted: Callable[..., Any],
        in_tree: Any,
        in_shardings: Sequence[NamedSharding],
        is_state: Sequence[bool],
        paths: Sequence[str],
        donates: bool,
        ways: tuple[Callable[..., Any], Callable[..., Any]] | None = None,
    ):
        self._jitted, self._ways = jitted, ways
        arguments, flat = in_tree.children(), iter(zip(in_shardings, paths, is_state, strict=True))
        self._places = [[*zip(*islice(flat, argument.num_leaves), strict=True)] for argument in arguments]
        self._is_array = [treedef_is_leaf(argument) and argument.num_leaves == 1 for argument in arguments]
        self._leaves, self._is_deleted = reader(in_tree) if donates and CRASHES else None, _is_deleted()
        self._moved: tuple[int, ...] = ()
        self._times: Counter[int] = Counter()
        self._is_new = True

    def learn(self, before: Sequence[Any], after: Sequence[Any]) -> bool:
        """Takes from a call's leaves and from where they were put which arguments had to be moved; whether it is the first that is seen."""
        is_first, self._is_new = self._is_new, False
        pairs = zip(before, after, strict=True)
        moved = [any([a is not b for a, b in islice(pairs, len(places[0]) if places else 0)]) for places in self._places]
        found = tuple(position for position, is_moved in enumerate(moved) if is_moved)
        self._times.update(found)
        self._moved = tuple(sorted({*self._moved, *found}))
        return is_first

    def __call__(self, args: tuple[Any, ...]) -> Any:
        """The result, or `UNLIKE` inside a transformation, and where an array is used up while some are donated.

        Raises:
            FAILURES: the arguments are unlike those before.
        """
        given = args if self._ways is None else self._ways[0](args)
        if self._leaves is None:
            if get_opaque_trace_state(convention="autoshard") != _EVALUATING:
                return UNLIKE
        else:
            try:
                if any(map(self._is_deleted, self._leaves((given,)))):
                    return UNLIKE
            except TypeError:  # there are tracers, numbers, keys or arrays of the host among them
                if any(isinstance(x, Tracer) or (isinstance(x, jax.Array) and x.is_deleted()) for x in jax.tree.leaves(given)):
                    return UNLIKE
        try:
            result = self._jitted(*(self._with_moved(given) if self._moved else given))
        except RuntimeError as error:
            if "has been deleted" in str(error):  # the long way says of which argument
                return UNLIKE
            raise
        return result if self._ways is None else self._ways[1](args, result, given)

    def _with_moved(self, args: tuple) -> list[Any]:
        """The arguments, each of those that are looked through where it should be; one of which nothing is moved is forgotten."""
        found = list(args)
        for position in self._moved:
            x = args[position]
            if self._is_array[position] and isinstance(x, np.ndarray) and jax.process_count() == 1:
                found[position] = jax.device_put(x, self._places[position][0][0])
                continue
            leaves, tree = jax.tree.flatten(x)
            there = put(leaves, *self._places[position])
            if any(a is not b for a, b in zip(leaves, there, strict=True)):
                found[position] = tree.unflatten(there)
            elif self._times[position] < OFTEN:
                self._moved = tuple(other for other in self._moved if other != position)
        return found


@functools.cache
def _is_deleted() -> Callable[[Any], bool]:
    """The method of JAX's arrays: mapped, it is asked in a third of the time."""
    with jax.ensure_compile_time_eval():
        return type(jnp.zeros(())).is_deleted


Reader = Callable[[Iterable[Any]], Iterable[Any]]


def reader(tree: Any) -> Reader:
    """What gives the leaves of pytrees of this structure, in any order; several times as fast as flattening, which sorts keys.

    All parts of equal structure are read at once, by functions of C. Of another structure, it raises or gives what it finds.

    >>> sorted(reader(jax.tree.structure({"a": 0, "b": [0, 0]}))([{"a": 1, "b": [2, 3]}]))
    [1, 2, 3]
    """
    return _reader(tree, {})


def _reader(tree: Any, shared: dict[Any, Reader]) -> Reader:
    """From nodes of one structure to their leaves."""
    if tree not in shared:
        shared[tree] = (lambda _: ()) if not tree.num_leaves else iter if treedef_is_leaf(tree) else _inner(tree, shared)
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


def _children(node: Any) -> Sequence[Any]:
    """The children of a node of a registered type."""
    return tuple(default_registry.flatten_one_level(node)[0])
