"""The meshes that a search tries: the one that is given, the one that pins or the program fix, or all that have the axes of pins."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from itertools import pairwise, product
from typing import Any

import jax

from autoshard.cluster import Cluster
from autoshard.errors import ClusterError, ShardingError
from autoshard.ir import Graph, Mesh, Op, axes_of_product
from autoshard.lower import STAGE_AXIS
from autoshard.mesh_search.candidates import candidate_meshes, placed
from autoshard.plan.argument_shardings import spec_words
from autoshard.plan.user_pins import UserPins, constraints
from autoshard.search import Searcher
from autoshard.trace import axes_of, mesh_in_force

MOST_AXES = 3  # of meshes that are searched
ALIKE = 0.75  # of two names of mesh axes, as `difflib` has it: 'dta' is 'data' misspelt, 'batch' is not

Written = tuple[str, Any]
"""What a spec is on, in words, and the spec."""


@dataclass(frozen=True, slots=True)
class _Fixed:
    """A mesh that something is on, the axes that the spec there names, and what that is, in words."""

    mesh: Mesh
    named: frozenset[str]
    what: str


def meshes_of(
    cluster: Cluster,
    pins: UserPins,
    given: Mesh | None,
    max_axes: int,
    stages: int = 1,
    more: Sequence[Written] = (),
    is_part: bool = False,
) -> tuple[tuple[Mesh, ...], bool]:
    """The meshes to try, and whether nobody named their axes.

    They are the given one in its best placements, the one that the program or an argument fixes, or all that have the axes of pins. Where
    specs have several axes on one dimension, layouts have these in the same order.

    Args:
        stages: those of one program, which have the first axis; others are for the devices of each.
        more: further specs, with what they are on.
        is_part: whether the cluster is a part of the devices, as of a stage, so that a mesh of more is taken with fewer of them.

    Raises:
        ShardingError: an axis of a pin is misspelt, two of the pins, the program and ``given`` are on different meshes, or have axes in
            different orders.
        ClusterError: a mesh does not cover the cluster.
    """
    is_part = is_part or stages > 1
    check_meshes(pins, given, is_part)
    written = [*pins.ordering(), *more]
    n = cluster.n_devices // stages
    if given is not None and given.placement is not None and given.size == cluster.n_devices:
        return (in_order(with_idle_axes(given, pins), written, pins.graph),), False
    if (mesh := _of_user(cluster, pins, given, is_part)) is not None:
        found = _with_fewer(mesh, n) if is_part and mesh.size != n else [mesh]
        if not found:
            raise ClusterError(f"a stage has {n} devices of {cluster}, on which there is no mesh with the axes of {mesh}. {_FEWER}")
        return placed(cluster, [with_stage_axis(in_order(each, written, pins.graph), stages) for each in found], renamed=False), False
    if (mesh := _mesh_of_program(pins)) is not None:
        found = [in_order(each, written, pins.graph) for each in (_with_fewer(mesh, n) if is_part else [mesh])]
        if not found or found[0].size != n or (is_part and mesh.size != n and any(_shard_maps(pins.graph))):
            what = next(one.what for one in _of_program(pins.graph) if one.mesh.axes == mesh.axes)
            raise ClusterError(
                f"a program runs on as many devices as the mesh that it names has: {what} is on {mesh}, of {mesh.size} devices, and "
                f"{cluster} has {n}. Search for a cluster of {mesh.size}, or write that mesh for {n}."
            )
        return tuple(with_stage_axis(each, stages) for each in found), False
    names = _ordered(pins.axes, written)
    _check_spelling(pins.asked.axes)
    if stages > 1:
        names = tuple(axis for axis in names if axis != STAGE_AXIS)
        own = candidate_meshes(n, names, max_axes) if n > 1 or names else (Mesh(()),)
        return placed(cluster, [with_stage_axis(mesh, stages) for mesh in own], renamed=False), False
    found = candidate_meshes(cluster.n_devices, names, max_axes)
    return placed(cluster, found, renamed=not names), not names


def check_covers(cluster: Cluster, given: Mesh, stages: int) -> None:
    """Raises `ClusterError` where a mesh is neither that of all devices nor, with stages, that of each stage's."""
    n = cluster.n_devices // stages
    if stages == 1:
        cluster.check(given)
    elif given.size not in (n, cluster.n_devices):
        raise ClusterError(
            f"with stages={stages} a mesh is that of each stage, on {n} of the {cluster.n_devices} devices of {cluster.name}, or of all, "
            f"of which stages have fewer; the mesh {given} has {given.size}. Use axis sizes whose product is {n}."
        )


_FEWER = "Use a mesh of as many devices, or one of which they are a divisor."


def _of_user(cluster: Cluster, pins: UserPins, given: Mesh | None, is_part: bool) -> Mesh | None:
    """The mesh that is given, or else the one on which arguments are that keep their shardings; None: neither."""
    if given is not None:
        return with_idle_axes(given, pins)
    first = next(_of_arguments(pins), None)
    if first is None:
        return None
    return with_idle_axes(first.mesh, pins) if is_part else fixed_mesh(cluster, pins)


def with_stage_axis(mesh: Mesh, stages: int) -> Mesh:
    """The mesh of all devices, of which each stage of one program has a part with this mesh; itself for one stage."""
    if stages == 1:
        return mesh
    if STAGE_AXIS in mesh.names:
        raise ShardingError(
            f"a pipeline has a mesh axis {STAGE_AXIS!r} of its own, and so has the mesh {mesh}. Give that axis another name, or size 1."
        )
    axis = STAGE_AXIS, stages
    return Mesh((axis, *mesh.axes), shape=(axis, *(other for other in mesh.shape if other[0] != STAGE_AXIS)))


def _with_fewer(mesh: Mesh, n: int) -> list[Mesh]:
    """The meshes of so many devices with the same axes, of sizes that divide theirs; an axis of stages has none of them."""
    parts = [[1] if name == STAGE_AXIS and mesh.size > n else [k for k in range(size, 0, -1) if size % k == 0] for name, size in mesh.shape]
    return [Mesh(tuple(zip(mesh.all_names, sizes, strict=True))) for sizes in product(*parts) if math.prod(sizes) == n]


def fixed_mesh(cluster: Cluster, pins: UserPins) -> Mesh:
    """The mesh on which arguments are that keep their shardings.

    Raises:
        ShardingError: none is, or it does not cover the cluster.
    """
    first = next(_of_arguments(pins), None)
    if first is None:
        raise ShardingError("shardings are on a mesh, and no argument that is sharded has one. Give the sizes of its axes: mesh=.")
    mesh = with_idle_axes(first.mesh, pins)
    if mesh.size != cluster.n_devices:
        raise ShardingError(
            f"the mesh on which arguments are covers the cluster: {first.what} is on {mesh}, of {mesh.size} devices, and {cluster} has "
            f"{cluster.n_devices}. Search for a cluster of {mesh.size}."
        )
    return mesh


def with_idle_axes(mesh: Mesh, pins: UserPins) -> Mesh:
    """The mesh with the axes of size 1 that specs name on others, of which it has all larger ones."""
    fixed = [*_of_arguments(pins), *_of_program(pins.graph)]
    idle = {name: 1 for one in fixed for name, size in one.mesh.shape if size == 1 and name in one.named and name not in mesh.all_names}
    return replace(mesh, shape=(*mesh.shape, *idle.items()))


def in_order(mesh: Mesh, written: Iterable[Written], graph: Graph) -> Mesh:
    """The mesh with its axes numbered in the order in which specs have them on one dimension.

    Raises:
        ShardingError: two specs have different orders.
    """
    names = _ordered(mesh.names, written)
    if names == mesh.names:
        return mesh
    if (op := next(_shard_maps(graph), None)) is not None:
        raise ShardingError(
            f"specs beside a shard_map have the axes of one dimension in the order of its mesh: that at {op.origin} is on {mesh}, and "
            f"other specs have the order {names}. Write the axes there as the mesh has them, or make a mesh with the axes in that order."
        )
    return mesh.ordered(names)


def _ordered(names: Sequence[str], written: Iterable[Written]) -> tuple[str, ...]:
    """The names in the order that specs demand of those on one dimension, and else as they are."""
    after: dict[tuple[str, str], tuple[str, Any]] = {}  # by two axes of which the first one comes before, the spec that says so
    for what, spec in written:
        for entry in spec:
            axes = [axis for axis in axes_of((entry,)) if axis in names]
            after.update((pair, (what, spec)) for pair in pairwise(axes) if pair not in after)
    left, found = [*names], []
    while left:
        free = (name for name in left if not any((other, name) in after for other in left))
        if (name := next(free, None)) is None:
            one, other = _contradiction(left, after)
            raise ShardingError(
                f"axes that split one dimension together do so in the same order in every spec of a program: {one[0]} has "
                f"{spec_words(one[1])}, and {other[0]} has {spec_words(other[1])}. Write them in the same order in both; arrays that are "
                "sharded in the other one are moved when the step is called, or before by jax.device_put."
            )
        left.remove(name)
        found.append(name)
    return tuple(found)


def _contradiction(names: Sequence[str], after: Mapping[tuple[str, str], tuple[str, Any]]) -> tuple[tuple[str, Any], tuple[str, Any]]:
    """Two specs, and what they are on, of a circle of axes each of which comes before the next."""
    walk = [names[0]]
    while walk.count(walk[-1]) < 2:
        walk.append(next(other for other in names if (other, walk[-1]) in after))
    circle = walk[walk.index(walk[-1]) :]
    specs = [after[other, name] for name, other in pairwise(circle)]
    return specs[0], next((each for each in specs if each != specs[0]), specs[-1])


def _of_arguments(pins: UserPins) -> Iterator[_Fixed]:
    for position, kept in pins.kept.items():
        if kept.mesh is not None and kept.axes:
            yield _Fixed(Mesh(kept.mesh), frozenset(kept.axes), f"{pins.graph.argument_paths[position]} (by {kept.source})")


def _mesh_of_program(pins: UserPins) -> Mesh | None:
    """The mesh that the program fixes, of several shard_maps' meshes one whose axes make up all others'; None where it fixes none."""
    fixed = [*_of_program(pins.graph)]
    if not fixed:
        return None
    finest = next((one for one in fixed if all(axes_of_product(other.mesh.sizes, one.mesh.sizes) is not None for other in fixed)), fixed[0])
    return with_idle_axes(finest.mesh, pins)


def _of_program(graph: Graph) -> Iterator[_Fixed]:
    for op in _shard_maps(graph):
        yield _Fixed(Mesh(op.mapped), frozenset(), f"the shard_map at {op.origin}")
    for place, spec, mesh in constraints(graph):
        if mesh is not None:
            yield _Fixed(Mesh.of(mesh), frozenset(axes_of(spec)), place.what)


def _shard_maps(graph: Graph) -> Iterator[Op]:
    """The ends of the program's shard_maps."""
    return (op for op in graph.walk() if "entries" in op.params and op.mapped)


def check_meshes(pins: UserPins, given: Mesh | None, is_part: bool = False) -> None:
    """Raises `ShardingError` where two specs name axes of different meshes; of the mesh in force they only name axes, if one is given.

    Args:
        is_part: whether ``given`` may have fewer devices.
    """
    in_force = tuple(mesh_in_force().shape.items())
    fixed = [*_of_arguments(pins), *_of_program(pins.graph)]
    named = [one for one in fixed if one.named and (given is None or one.mesh.shape != in_force)]
    if given is not None:
        sizes = dict(given.shape)

        def differs(one: _Fixed) -> bool:
            pairs = [(size, sizes.get(axis, size)) for axis, size in one.mesh.shape if axis in one.named]
            return any(theirs % ours if is_part else theirs != ours for theirs, ours in pairs)

        wrong = next(filter(differs, named), None)
        if wrong is not None:
            raise ShardingError(
                f"specs name axes of one mesh, and mesh= has {given}, while {wrong.what} is on {wrong.mesh}. Leave out mesh=, or "
                f"give that one: mesh={dict(wrong.mesh.shape)}."
            )
        return
    other = next((one for one in named if one.mesh.axes != named[0].mesh.axes), None)
    if other is not None:
        raise ShardingError(
            f"a strategy has one mesh, and {named[0].what} is on {named[0].mesh}, while {other.what} is on {other.mesh}. "
            "Use one mesh for both, or specs without a mesh, which only name axes."
        )


def _check_spelling(names: Sequence[str]) -> None:
    """Raises `ShardingError` for an axis that looks like a usual or another pinned one misspelt: it would be one of its own."""
    for name in names:
        others = [other for other in ("data", "model", *names) if other != name and not name.startswith(other)]
        near = get_close_matches(name, others, n=1, cutoff=ALIKE) if name.isalpha() and name not in ("data", "model") else []
        if near:
            raise ShardingError(
                f"pins name the axes of a mesh that is searched, and {name!r} looks like {near[0]!r} misspelt. Write {near[0]!r}, or "
                f"give the mesh if it is an axis of its own: mesh={{{name!r}: ...}}, or --mesh {name}=..."
            )


def most_axes(mesh: Any, searcher: Searcher) -> int:
    """How many axes a mesh may have that is searched."""
    if not isinstance(mesh, int):
        return 2 if searcher.automatic or searcher.differs_by_mesh else 1
    if isinstance(mesh, bool) or not 1 <= mesh <= MOST_AXES:
        raise ShardingError(f"a number as the mesh is how many axes it may have, 1 to {MOST_AXES}; got {mesh!r}. Name the axes for more.")
    return mesh


def given_mesh(mesh: Any) -> Mesh:
    """The mesh a user gives: axis sizes by name, or a JAX mesh; or that of another strategy, whose placement is kept."""
    if isinstance(mesh, Mesh):
        return mesh
    shape = mesh.shape if isinstance(mesh, jax.sharding.Mesh | jax.sharding.AbstractMesh) else mesh
    if not isinstance(shape, Mapping) or not shape:
        raise ShardingError(f"a mesh is axis sizes by name, as in {{'data': 4, 'model': 2}}, or a jax.sharding.Mesh; got {mesh!r}.")
    return Mesh.of(shape)
