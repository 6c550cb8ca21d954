"""From the records' meshes and layouts to JAX's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec

from autoshard.errors import ClusterError
from autoshard.ir import Graph, Layout, Mesh, Placement, layout_to_spec

_NEED_DEVICES = frozenset({"custom_partitioning", "inspect_sharding", "io_callback", "pure_callback"})
"""What JAX 0.10 lowers for devices alone."""


def jax_mesh(mesh: Mesh, devices: Sequence[Any] | None = None) -> jax.sharding.Mesh:
    """The JAX mesh of Auto axes with these names and sizes, its devices where the mesh's placement says, so that links are as predicted.

    ``devices`` may be those of an ahead-of-time topology; the first ``mesh.size`` of them are used. Those of a TPU slice are taken by
    their coordinates, others in the order given: JAX lists GPUs host by host. A mesh without a placement is placed by JAX, as are those
    inside programs that bring their own.

    >>> dict(jax_mesh(Mesh.of({"data": 1})).shape)
    {'data': 1}

    Raises:
        ClusterError: there are fewer devices than the mesh has places.
    """
    found = list(jax.devices() if devices is None else devices)
    if len(found) < mesh.size:
        raise ClusterError(
            f"a mesh needs a device for each of its places: {mesh} has {mesh.size}, got {len(found)}. "
            f"Search on a smaller cluster, pass devices=..., or on a CPU set XLA_FLAGS=--xla_force_host_platform_device_count={mesh.size}."
        )
    found = found[: mesh.size]
    types = (AxisType.Auto,) * len(mesh.axes)
    if mesh.placement is None:
        return jax.make_mesh(mesh.sizes, mesh.names, axis_types=types, devices=found)
    return jax.sharding.Mesh(_placed(mesh, mesh.placement, sorted(found, key=_coordinates)), mesh.names, axis_types=types)


def _coordinates(device: Any) -> tuple[int, ...]:
    """Where a device stands in its slice, outermost dimension first; nowhere in particular if it has no coordinates."""
    coords = getattr(device, "coords", None)
    return () if coords is None else (getattr(device, "slice_index", None) or 0, *coords, getattr(device, "core_on_chip", 0))


def _placed(mesh: Mesh, placement: Placement, devices: Sequence[Any]) -> np.ndarray:
    """The devices, given row-major over the cluster, as an array shaped like the mesh."""
    grid = np.empty(len(devices), object)
    grid[:] = devices
    laid = grid.reshape(placement.topology).transpose(placement.dims).reshape([mesh.sizes[axis] for axis in placement.axes])
    return laid.transpose(np.argsort(placement.axes))


def abstract_mesh(mesh: Mesh) -> AbstractMesh:
    """The JAX mesh without devices: programs can be lowered for it, however large it is."""
    return AbstractMesh(mesh.sizes, mesh.names, axis_types=(AxisType.Auto,) * len(mesh.axes))


def lowering_mesh(mesh: Mesh, graph: Graph) -> jax.sharding.Mesh | AbstractMesh:
    """The JAX mesh for a program that is lowered and never run: without devices, unless an operation in it asks for them.

    Raises:
        ClusterError: one does, as callbacks do, and there are fewer devices than the mesh has places.
    """
    return jax_mesh(mesh) if any(op.primitive in _NEED_DEVICES for op in graph.walk()) else abstract_mesh(mesh)


def to_named_sharding(layout: Layout, rank: int, mesh: jax.sharding.Mesh | AbstractMesh) -> NamedSharding:
    """The `NamedSharding` of a layout of a tensor of this rank."""
    return NamedSharding(mesh, PartitionSpec(*layout_to_spec(layout, mesh.axis_names, rank)))
