"""Candidate meshes of a cluster: factorisations of its devices into named axes, and placements of these on its links."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import combinations, permutations

import numpy as np

from autoshard.cluster import Cluster, Link
from autoshard.cost.collectives import COLLECTIVES, Communication
from autoshard.ir import Mesh, Placement

AXIS_NAMES = ("data", "model", "third", "fourth")
FEW_AXES = 4  # whose placements are all tried, and collectives over all of their sets
ENOUGH = 10  # meshes; beyond it none is added that differs from another in the order of its axes alone
SIZES = np.array([1.0, 1e5, 1e7, 1e9])  # bytes; placements on which collectives of these sizes take the same seconds are one


def candidate_meshes(n_devices: int, names: Sequence[str] = (), max_axes: int = 2) -> tuple[Mesh, ...]:
    """All ordered factorisations of a device count into at most ``max_axes`` axes, fewest axes first.

    Args:
        names: axis names that the mesh must have (those that pins name), outermost first; of size one only where there are too few devices.

    >>> [str(mesh) for mesh in candidate_meshes(4)]
    ['data=4', 'data=2 x model=2']
    """
    axis_names = tuple(dict.fromkeys((*names, *AXIS_NAMES)))
    fewest = max(1, len(names))
    found = []
    for n_axes in range(fewest, max(max_axes, fewest) + 1):
        for sizes in _factorisations(n_devices, n_axes, smallest=1 if names else 2):
            found.append(Mesh(tuple(zip(axis_names, sizes, strict=False))))
    splitting = [mesh for mesh in found if all(size > 1 for _, size in mesh.shape[: len(names)])]
    return tuple(splitting or found) or (Mesh(((axis_names[0], n_devices),)),)


def _factorisations(n: int, n_axes: int, smallest: int) -> list[tuple[int, ...]]:
    if n_axes == 1:
        return [(n,)] if n >= smallest else []
    return [
        (first, *rest)
        for first in range(n, 0, -1)
        if n % first == 0 and first >= smallest
        for rest in _factorisations(n // first, n_axes - 1, smallest)
    ]


def placed(cluster: Cluster, meshes: Iterable[Mesh], renamed: bool, most: int = 6) -> tuple[Mesh, ...]:
    """The meshes row-major, then their other placements, fastest collectives first.

    A placement is left out if an earlier mesh is nowhere slower.

    Args:
        renamed: whether the axes have default names. Then a placement that equals an earlier mesh but for the order of its axes comes last,
            if there is room. It is of use since a dimension sharded over both axes can be gathered over the later one alone.
        most: the most placements of one mesh, row-major included.

    >>> [mesh.placement.dims for mesh in placed(Cluster.parse("v5e:2x4"), [Mesh.of({"data": 4, "model": 2})], renamed=False)]
    [(0, 1), (1, 0)]
    """
    given = tuple(_row_major(cluster, mesh) for mesh in meshes)
    kept = [(mesh, _seconds(cluster.links(mesh))) for mesh in given]
    others = [sorted(_distinct(cluster, mesh), key=lambda pair: np.log1p(1e6 * pair[1]).sum()) for mesh in given]
    for renaming in (True, False) if renamed else (False,):
        for mesh, placings in zip(given, others, strict=True):
            count = sum(one.axes == mesh.axes for one, _ in kept)
            for other, seconds in placings:
                room = count < most and (renaming or not renamed or len(kept) < ENOUGH)
                if room and not any(_as_fast(known, one, mesh, seconds, renaming) for known, one in kept):
                    kept.append((other, seconds))
                    count += 1
    return tuple(mesh for mesh, _ in kept)


def _row_major(cluster: Cluster, mesh: Mesh) -> Mesh:
    """The mesh row-major; on a torus its placement says so, since JAX would place it otherwise."""
    if cluster.interconnect.kind != "torus":
        return mesh
    topology = cluster.dimensions
    return replace(mesh, placement=Placement(topology, tuple(range(len(topology))), tuple(range(len(mesh.axes)))))


def _distinct(cluster: Cluster, mesh: Mesh) -> Iterator[tuple[Mesh, np.ndarray]]:
    """The mesh in every placement with new links, and the seconds of collectives there, as `_seconds`."""
    seen: set[tuple[Link, ...]] = set()
    topology = cluster.dimensions
    for axes in _orders(len(mesh.axes)):
        for dims in permutations(range(len(topology))):
            other = replace(mesh, placement=Placement(topology, dims, axes))
            links = cluster.links(other)
            if links not in seen:
                seen.add(links)
                yield other, _seconds(links)


def _orders(n: int) -> Iterable[tuple[int, ...]]:
    """All orders of few axes; of many those in which one is elsewhere."""
    if n <= FEW_AXES:
        return permutations(range(n))
    others = {axis: [*range(axis), *range(axis + 1, n)] for axis in range(n)}
    return dict.fromkeys((*others[axis][:to], axis, *others[axis][to:]) for axis in range(n) for to in range(n))


def _seconds(links: tuple[Link, ...]) -> np.ndarray:
    """The seconds of each collective and size over each set of axes, ``(2 ** n_axes, n)`` by the bits of the set.

    Of many axes those of small sets alone; others are 0.
    """
    model = Communication(links)
    rows = np.zeros((2 ** len(links), len(COLLECTIVES), len(SIZES)))
    for n in range(1, (len(links) if len(links) <= FEW_AXES else 3) + 1):
        for axes in combinations(range(len(links)), n):
            rows[sum(1 << axis for axis in axes)] = [model.seconds(kind, SIZES, axes) for kind in COLLECTIVES]
    return rows.reshape(len(rows), -1)


def _as_fast(known: Mesh, ours: np.ndarray, mesh: Mesh, theirs: np.ndarray, renamed: bool) -> bool:
    """Whether a known mesh is nowhere slower than another one, with its axes in their own order or in any."""
    n = len(mesh.axes)
    if len(known.axes) != n:
        return False
    for order in permutations(range(n)) if renamed else [tuple(range(n))]:
        if tuple(known.sizes[axis] for axis in order) == mesh.sizes:
            bits = [sum(1 << order[axis] for axis in range(n) if number >> axis & 1) for number in range(2**n)]
            if np.all(ours[bits] <= theirs * (1 + 1e-9)):
                return True
    return False
