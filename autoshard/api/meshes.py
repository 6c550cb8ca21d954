"""The meshes that a search tries: the one that is given, the one that pins or the program fix, or all that have the axes of pins."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

import jax

from autoshard.api.user_pins import UserPins, constraints
from autoshard.cluster import Cluster
from autoshard.errors import ClusterError, ShardingError
from autoshard.ir import Graph, Mesh, axes_of_product
from autoshard.lower import STAGE_AXIS
from autoshard.mesh_search.candidates import candidate_meshes, placed
from autoshard.search import Searcher
from autoshard.trace import axes_of, mesh_in_force

MOST_AXES = 3  # of meshes that are searched
ALIKE = 0.75  # of two names of mesh axes, as `difflib` has it: 'dta' is 'data' misspelt, 'batch' is not


@dataclass(frozen=True, slots=True)
class _Fixed:
    """A mesh that something is on: its axes, those that the spec there names, and what that is, in words."""

    mesh: tuple[tuple[str, int], ...]
    axes: frozenset[str]
    what: str


def meshes_of(cluster: Cluster, pins: UserPins, given: Mesh | None, max_axes: int, stages: int = 1) -> tuple[tuple[Mesh, ...], bool]:
    """The meshes to try, and whether nobody named their axes.

    They are the given one in its best placements, the one that the program or an argument fixes, or all that have the axes of pins.

    Args:
        stages: those of one program, which have the first axis; others are for the devices of each.

    Raises:
        ShardingError: an axis of a pin is misspelt, or two of the pins, the program and ``given`` are on different meshes.
        ClusterError: a mesh does not cover the cluster.
    """
    check_meshes(pins, given)
    if given is not None:
        return placed(cluster, [given], renamed=False) if given.placement is None else (given,), False
    if next(_of_arguments(pins), None) is not None:
        return placed(cluster, [fixed_mesh(cluster, pins)], renamed=False), False
    if (mesh := _mesh_of_program(cluster, pins.graph)) is not None:
        return (mesh,), False
    names = pins.axes
    _check_spelling(pins.asked.axes)
    if stages > 1:
        names, n = tuple(axis for axis in names if axis != STAGE_AXIS), cluster.n_devices // stages
        own = candidate_meshes(n, names, max_axes) if n > 1 or names else (Mesh(()),)
        return placed(cluster, [with_stage_axis(mesh, stages) for mesh in own], renamed=False), False
    found = candidate_meshes(cluster.n_devices, names, max_axes)
    return placed(cluster, found, renamed=not names), not names


def with_stage_axis(mesh: Mesh, stages: int) -> Mesh:
    """The mesh of all devices, of which each stage of one program has a part with this mesh; itself for one stage."""
    return mesh if stages == 1 else Mesh(((STAGE_AXIS, stages), *mesh.axes))


def fixed_mesh(cluster: Cluster, pins: UserPins) -> Mesh:
    """The mesh on which arguments are that keep their shardings.

    Raises:
        ShardingError: none is, or it does not cover the cluster.
    """
    first = next(_of_arguments(pins), None)
    if first is None:
        raise ShardingError("shardings are on a mesh, and no argument that is sharded has one. Give the sizes of its axes: mesh=.")
    mesh = Mesh(first.mesh)
    if mesh.size != cluster.n_devices:
        raise ShardingError(
            f"the mesh on which arguments are covers the cluster: {first.what} is on {mesh}, of {mesh.size} devices, and {cluster} has "
            f"{cluster.n_devices}. Search for a cluster of {mesh.size}."
        )
    return mesh


def _of_arguments(pins: UserPins) -> Iterator[_Fixed]:
    for position, kept in pins.kept.items():
        if kept.mesh is not None and kept.axes:
            yield _Fixed(kept.mesh, frozenset(kept.axes), f"{pins.graph.argument_paths[position]} (by {kept.source})")


def _mesh_of_program(cluster: Cluster, graph: Graph) -> Mesh | None:
    """The mesh that the program fixes, of several shard_maps' meshes one whose axes make up those of all others; None where it fixes none.

    Raises:
        ClusterError: it does not cover the cluster.
    """
    fixed = [*_of_program(graph)]
    if not fixed:
        return None
    sizes = [[size for _, size in each.mesh] for each in fixed]
    finest = next((each for each, own in zip(fixed, sizes, strict=True) if all(axes_of_product(other, own) for other in sizes)), fixed[0])
    mesh = Mesh(finest.mesh)
    if mesh.size != cluster.n_devices:
        raise ClusterError(
            f"a program runs on as many devices as the mesh that it names has: {finest.what} is on {mesh}, of {mesh.size} devices, and "
            f"{cluster} has {cluster.n_devices}. Search for a cluster of {mesh.size}, or write that mesh for {cluster.n_devices}."
        )
    return mesh


def _of_program(graph: Graph) -> Iterator[_Fixed]:
    for op in graph.walk():
        if "entries" in op.params and op.mapped:
            yield _Fixed(op.mapped, frozenset(), f"the shard_map at {op.origin}")
    for place, spec, mesh in constraints(graph):
        if mesh is not None:
            yield _Fixed(tuple(mesh.items()), frozenset(axes_of(spec)), place.what)


def check_meshes(pins: UserPins, given: Mesh | None) -> None:
    """Raises `ShardingError` where two specs name axes of different meshes; of the mesh in force they only name axes, if one is given."""
    in_force = tuple(mesh_in_force().shape.items())
    fixed = [*_of_arguments(pins), *_of_program(pins.graph)]
    named = [one for one in fixed if one.axes and (given is None or one.mesh != in_force)]
    if given is not None:
        sizes = dict(given.axes)
        wrong = next((one for one in named if any(sizes.get(axis, size) != size for axis, size in one.mesh if axis in one.axes)), None)
        if wrong is not None:
            raise ShardingError(
                f"specs name axes of one mesh, and mesh= has {given}, while {wrong.what} is on {Mesh(wrong.mesh)}. Leave out mesh=, or "
                f"give that one: mesh={dict(wrong.mesh)}."
            )
        return
    other = next((one for one in named if one.mesh != named[0].mesh), None)
    if other is not None:
        raise ShardingError(
            f"a strategy has one mesh, and {named[0].what} is on {Mesh(named[0].mesh)}, while {other.what} is on {Mesh(other.mesh)}. "
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
