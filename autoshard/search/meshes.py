"""The mesh shapes worth trying on a cluster: its devices, split over one or two named axes."""

from __future__ import annotations

from collections.abc import Sequence

from autoshard.ir import Mesh

NAMES = ("data", "model", "third", "fourth")


def candidate_meshes(n_devices: int, names: Sequence[str] = (), max_axes: int = 2) -> tuple[Mesh, ...]:
    """All ordered factorisations of a device count into at most ``max_axes`` axes, fewest axes first.

    Args:
        names: axis names that the mesh must have (those that pins name), outermost first; of size one only where there are too few devices.

    >>> [str(mesh) for mesh in candidate_meshes(4)]
    ['data=4', 'data=2 x model=2']
    """
    axis_names = tuple(dict.fromkeys((*names, *NAMES)))
    fewest = max(1, len(names))
    found = []
    for n_axes in range(fewest, max(max_axes, fewest) + 1):
        for sizes in _factorisations(n_devices, n_axes, smallest=1 if names else 2):
            found.append(Mesh(tuple(zip(axis_names, sizes, strict=False))))
    splitting = [mesh for mesh in found if 1 not in mesh.sizes[: len(names)]]
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
