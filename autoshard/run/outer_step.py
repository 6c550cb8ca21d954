"""A step on loosely coupled slices: one program over a mesh with a first axis of slices, each of which steps with a copy of the state.

The step itself is the planned program of one slice, manual over all axes; what is exchanged is ordinary JAX on whole arrays after it, so
that any outer optimizer sees whole parameters, and XLA's partitioner makes the sum over slices.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from autoshard.cluster import Cluster
from autoshard.compilers import compiler_of
from autoshard.errors import StrategyError
from autoshard.explanation.groups import shard_bytes
from autoshard.lower import abstract_mesh, manual_program, mesh_of_stages, obstacle, rows_spec, stage_meshes
from autoshard.run.calls import in_turn, is_traced
from autoshard.run.diloco import DiLoCo, OuterState, exchanged
from autoshard.run.placing import put
from autoshard.run.program import program_of
from autoshard.run.sharded import Sharded, check_alive
from autoshard.run.structure import dtype_of
from autoshard.strategy import Record
from autoshard.trace import Traced, outside_mesh
from autoshard.verify import Options

SLICES = "slices"
"""The first axis of the mesh."""


@dataclass(frozen=True, slots=True)
class Division:
    """How the arguments of a step are divided among slices, by the positions of their leaves.

    Attributes:
        n: the number of slices.
        dims: the dimension of the batch, of which each slice has a part; None of leaves without one.
        has_copies: whether each slice may have a copy of its own, which results replace.
        parameters: the leaves that are exchanged.
        holder: the argument that comes back as an `OuterState`, the first with parameters.
        first, last: its leaves.
        place: which part of the result replaces it; None: the result as a whole.
    """

    n: int
    dims: tuple[int | None, ...]
    has_copies: tuple[bool, ...]
    parameters: tuple[int, ...]
    holder: int
    first: int
    last: int
    place: int | None

    @property
    def places(self) -> tuple[int, ...]:
        """Per leaf of the holder its place among the parameters; -1 where it is none of them."""
        where = {leaf: at for at, leaf in enumerate(self.parameters)}
        return tuple(where.get(leaf, -1) for leaf in range(self.first, self.last))


def is_copied(x: Any, shape: Sequence[int], n: int) -> bool:
    """Whether an array of this shape, or of all slices' copies of it, is the latter."""
    return np.shape(x) == (n, *shape)


def parameter_bytes(record: Record, division: Division) -> list[float]:
    """The bytes of a device's shard of each parameter."""
    tensors = [record.arguments[leaf] for leaf in division.parameters]
    return [shard_bytes(each.shape, each.dtype, each.spec, record.mesh) for each in tensors]


class OuterStep(Sharded):
    """``fn`` on each slice as a strategy says, with an outer optimization of its parameters.

    The argument with the parameters may be given as the step was written for it, and comes back as an `OuterState`.
    """

    def __init__(
        self,
        fn: Callable[..., Any],
        args: tuple[Any, ...],
        record: Record,
        traced: Traced | None,
        division: Division,
        diloco: DiLoCo,
        devices: Sequence[Any] | None = None,
        compiler_options: Options | None = None,
    ):
        """``args`` are those of one slice, abstract, and ``record`` and ``traced`` the strategy for them.

        Raises:
            StrategyError: the step can only be lowered by sharding constraints.
        """
        functools.update_wrapper(self, fn, updated=())
        self.donate_argnums: tuple[int, ...] = record.donate_argnums
        self._record, self._division, self._diloco = record, division, diloco
        with outside_mesh(keep_auto=True):
            self._traced, rules, path = program_of(fn, args, record, before=traced)
        graph = self._traced.graph
        self._mesh: Mesh = mesh_of_stages(stage_meshes([record.mesh] * division.n, devices), SLICES)
        inner = abstract_mesh(record.mesh)
        if (reason := obstacle(graph, inner)) is not None:
            raise StrategyError(
                f"a step on loosely coupled slices is lowered manually, and this one cannot be: {reason} Leave out outer=."
            )
        program = self._traced.jaxpr, graph, rules, record.assignment, inner, path
        self._flat = manual_program(*program, copies=self._mesh, compiler=compiler_of(Cluster.from_dict(record.cluster)))
        self._fragments = diloco.fragments_of(parameter_bytes(record, division))
        self._copies = [self._sharding(SLICES, *each.spec) for each in record.arguments]
        self._whole = [self._sharding(*each.spec) for each in record.arguments]
        own = zip(record.arguments, division.dims, division.has_copies, self._copies, self._whole, strict=True)
        self._entering = [
            copies if has_copy else whole if dim is None else self._sharding(*rows_spec(tensor.spec, dim, SLICES))
            for tensor, dim, has_copy, copies, whole in own
        ]
        donated = [position in record.donate_argnums for position, n in enumerate(self._sizes) for _ in range(n)]
        self._donated = [leaf for leaf, is_donated in enumerate(donated) if is_donated]
        self._others = [leaf for leaf, is_donated in enumerate(donated) if not is_donated]
        outer = self._outer_shardings()
        results = [self._sharding(SLICES, *each.spec) for each in record.results]
        jitted = functools.partial(
            jax.jit,
            self._program,
            in_shardings=(outer, *self._donated_and_others(self._entering)),
            out_shardings=(outer, results),
            donate_argnums=(0, 1) if division.holder in record.donate_argnums else 1,
        )
        self.jitted = jitted(compiler_options=dict(compiler_options or {}) or None)
        self._call = in_turn(self.jitted, self._mesh)
        self._inside = jitted()  # of another jitted function, whose compiler options count

    def __call__(self, *args: Any) -> Any:
        args = args if isinstance(args[self._division.holder], OuterState) else self.start(*args)
        inner, parts = self._parts(args)
        leaves = [*parts[1], *parts[2], *parts[0][0]]
        if self.donate_argnums:
            check_alive(leaves, [self._record.arguments[0].path] * len(leaves))
        with outside_mesh():
            (parameters, optimizer, count), results = (self._inside if is_traced() else self._call)(*parts)
        whole = self._traced.merge(inner, self._traced.pack(results))
        place = self._division.place

        def with_state(result: Any) -> OuterState:
            return OuterState(result, parameters, optimizer, count, self._division.places)

        if place is None:
            return with_state(whole)
        made = [with_state(x) if k == place else x for k, x in enumerate(whole)]
        return type(whole)(*made) if hasattr(whole, "_fields") else type(whole)(made)

    def lower(self) -> jax.stages.Lowered:
        """The lowered program, as `jax.jit(fn).lower` gives it; no arrays are needed."""
        division, types = self._division, [jax.ShapeDtypeStruct(x.shape, dtype_of(x.dtype)) for x in self._record.arguments]
        parameters = [types[leaf] for leaf in division.parameters]
        outer = parameters, jax.eval_shape(self._optimizers, parameters), jax.ShapeDtypeStruct((), jnp.int32)
        for leaf, (dim, has_copies) in enumerate(zip(division.dims, division.has_copies, strict=True)):
            own = types[leaf].shape
            shape = (division.n, *own) if has_copies else own if dim is None else (*own[:dim], own[dim] * division.n, *own[dim + 1 :])
            types[leaf] = types[leaf].update(shape=shape)
        with outside_mesh():
            return self.jitted.lower(outer, *self._donated_and_others(types))

    def start(self, *args: Any) -> tuple[Any, ...]:
        """The arguments with a copy of the state for each slice, the one with the parameters as an `OuterState`, before the first step."""
        division, record = self._division, self._record
        pure = self._traced.split(args)
        leaves, tree = jax.tree.flatten(pure)
        state = [k for k, has_copy in enumerate(division.has_copies) if has_copy]
        paths = [record.arguments[k].path for k in state]
        there = put([leaves[k] for k in state], [self._whole[k] for k in state], paths, (True,) * len(state))

        def made(state: list[Any]) -> tuple[list[Any], Any]:
            copies = [jnp.broadcast_to(x, (division.n, *jnp.shape(x))) for x in state]
            parameters = [jnp.copy(state[where[k]]) for k in division.parameters]
            return copies, (parameters, self._optimizers(parameters), jnp.zeros((), jnp.int32))

        where = {k: at for at, k in enumerate(state)}
        shardings = [self._copies[k] for k in state], self._outer_shardings()
        with outside_mesh():
            copies, (parameters, optimizer, count) = jax.jit(made, out_shardings=shardings)(there)
        for k, x in zip(state, copies, strict=True):
            leaves[k] = x
        found = list(tree.unflatten(leaves))
        found = [given if was is None else now for given, was, now in zip(args, pure, found, strict=True)]  # static as a whole
        found[division.holder] = OuterState(found[division.holder], parameters, optimizer, count, division.places)
        return tuple(found)

    # -- parts ------------------------------------------------------------------------------------------------------------------

    @property
    def _sizes(self) -> list[int]:
        """How many leaves each argument has."""
        return [child.num_leaves for child in self._traced.in_tree.children()]

    def _sharding(self, *spec: Any) -> NamedSharding:
        return NamedSharding(self._mesh, PartitionSpec(*spec))

    def _parts(self, args: tuple) -> tuple[tuple, tuple]:
        """The arguments without the outer state, and those of the program."""
        outer = args[self._division.holder]
        inner = tuple(x.inner if isinstance(x, OuterState) else x for x in args)
        n, copies = self._division.n, self._division.has_copies
        there = []
        for x, each, may in zip(jax.tree.leaves(self._traced.split(inner)), self._record.arguments, copies, strict=True):
            there.append(jnp.broadcast_to(x, (n, *each.shape)) if may and not is_copied(x, each.shape, n) else x)
        there = put(there, self._entering, [each.path for each in self._record.arguments], copies)
        return inner, ((outer.parameters, outer.optimizer, outer.count), *self._donated_and_others(there))

    def _donated_and_others(self, leaves: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        return [leaves[k] for k in self._donated], [leaves[k] for k in self._others]

    def _optimizers(self, parameters: Sequence[Any]) -> list[Any]:
        """The outer optimizer's state of each fragment, before the first step."""
        return [self._diloco.transformation.init([parameters[k] for k in fragment]) for fragment in self._fragments]

    def _outer_shardings(self) -> tuple:
        """The shardings of parameters, of the outer optimizer's states, whose arrays are those of parameters, and of the count."""
        import optax

        whole, tensors = self._sharding(), [self._record.arguments[leaf] for leaf in self._division.parameters]
        parameters = [self._whole[leaf] for leaf in self._division.parameters]
        types = [jax.ShapeDtypeStruct(each.shape, each.dtype) for each in tensors]
        states = jax.eval_shape(self._optimizers, types)
        found = [
            optax.tree_map_params(
                self._diloco.transformation,
                lambda _, sharding: sharding,
                state,
                [parameters[k] for k in fragment],
                transform_non_params=lambda _: whole,
            )
            for state, fragment in zip(states, self._fragments, strict=True)
        ]
        return parameters, found, whole

    def _program(self, outer: tuple, donated: list[Any], others: list[Any]) -> tuple[tuple, list[Any]]:
        """The step on each slice, and the outer step of the fragments whose turn it is."""
        parameters, optimizer, count = list(outer[0]), list(outer[1]), outer[2] + 1
        leaves = sorted(zip([*self._donated, *self._others], [*donated, *others], strict=True), key=lambda each: each[0])
        results = self._flat(*(self._entered(x, leaf) for leaf, x in leaves))
        replaced = {argument: result for result, argument in self._traced.graph.aliases}
        own = [replaced[leaf] for leaf in self._division.parameters]
        for number, (fragment, offset) in enumerate(zip(self._fragments, self._diloco.offsets, strict=True)):
            before = [parameters[k] for k in fragment], [results[own[k]] for k in fragment], optimizer[number]
            outer_step = functools.partial(exchanged, self._diloco)
            after, copies, optimizer[number] = jax.lax.cond(
                count % self._diloco.every == offset, outer_step, lambda *unchanged: unchanged, *before
            )
            for k, x, copy in zip(fragment, after, copies, strict=True):
                parameters[k], results[own[k]] = x, copy
        return (parameters, optimizer, count), results

    def _entered(self, x: Any, leaf: int) -> Any:
        """An argument with a first dimension of slices, each on its own."""
        n, dim = self._division.n, self._division.dims[leaf]
        if self._division.has_copies[leaf]:
            return x
        if dim is None:
            x = jnp.broadcast_to(x, (n, *jnp.shape(x)))
        else:
            x = jnp.moveaxis(x.reshape(*x.shape[:dim], n, x.shape[dim] // n, *x.shape[dim + 1 :]), dim, 0)
        return jax.lax.with_sharding_constraint(x, self._copies[leaf])
