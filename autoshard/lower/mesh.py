"""From the records' meshes and layouts to JAX's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec

from autoshard.errors import ClusterError
from autoshard.ir import Graph, Layout, Mesh, layout_to_spec

_NEED_DEVICES = frozenset({"custom_partitioning", "inspect_sharding", "io_callback", "pure_callback"})
"""What JAX 0.10 lowers for devices alone."""


def jax_mesh(mesh: Mesh, devices: Sequence[Any] | None = None) -> jax.sharding.Mesh:
    """The JAX mesh of Auto axes with these names and sizes, its devices placed by JAX to suit the machine's links.

    ``devices`` may be those of an ahead-of-time topology; the first ``mesh.size`` of them are used.

    >>> dict(jax_mesh(Mesh.of({"data": 1})).shape)
    {'data': 1}

    Raises:
        ClusterError: there are fewer devices than the mesh has places.
    """
    found = list(jax.devices() if devices is None else devices)
    if len(found) < mesh.size:
        raise ClusterError(
            f"a mesh needs a device for each of its places: {mesh} has {mesh.size}, and there are {len(found)} devices. "
            f"Search on a smaller cluster, pass devices=..., or on a CPU set XLA_FLAGS=--xla_force_host_platform_device_count={mesh.size}."
        )
    return jax.make_mesh(mesh.sizes, mesh.names, axis_types=(AxisType.Auto,) * len(mesh.axes), devices=found[: mesh.size])


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
