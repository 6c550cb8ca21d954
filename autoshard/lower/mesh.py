"""Conversion of meshes and layouts to JAX's meshes and shardings."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import accumulate
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractDevice, AbstractMesh, AxisType, NamedSharding, PartitionSpec

from autoshard.errors import ClusterError
from autoshard.ir import Graph, Layout, Mesh, Placement, entry_axes, layout_to_spec
from autoshard.ir.layout import STAGE_AXIS
from autoshard.rules.attention import BACKWARD, FORWARD

HOST = "pinned_host"
"""JAX's name of the memory of hosts that devices read and write."""

_NEED_DEVICES = frozenset({"custom_partitioning", FORWARD, BACKWARD, "inspect_sharding", "io_callback", "pure_callback"})
"""Primitives that JAX 0.10 cannot lower for an abstract mesh; of the first there is nothing left in a manual computation."""


def jax_mesh(mesh: Mesh, devices: Sequence[Any] | None = None) -> jax.sharding.Mesh:
    """The JAX mesh of Auto axes with these names and sizes, its devices in the order of the mesh's placement.

    ``devices`` may be those of an ahead-of-time topology; the first ``mesh.size`` of them are used. Devices of TPU slices are ordered by
    slice and by their coordinates there, others stay in the order given: JAX lists GPUs host by host. JAX places a mesh without a
    placement on one slice; on several it is row-major over them, the first axes across slices, as `create_hybrid_device_mesh` has it.

    >>> dict(jax_mesh(Mesh.of({"data": 1})).shape)
    {'data': 1}

    Raises:
        ClusterError: there are fewer devices than the mesh needs, or unequally many of several slices.
    """
    if devices is not None and not isinstance(devices, Iterable):
        raise ClusterError(f"devices= is a list of devices, got {devices!r}. Write devices=jax.devices()[:{mesh.size}], for instance.")
    found = list(jax.devices() if devices is None else devices)
    if len(found) < mesh.size:
        raise ClusterError(
            f"a mesh needs a device for each of its places: {mesh} has {mesh.size}, got {len(found)}. "
            f"Search on a smaller cluster, pass devices=..., or on a CPU set XLA_FLAGS=--xla_force_host_platform_device_count={mesh.size}."
        )
    found = found[: mesh.size]
    sizes, types = tuple(size for _, size in mesh.shape), (AxisType.Auto,) * len(mesh.shape)
    n_slices = _slices(found, mesh)
    if mesh.placement is None and n_slices == 1:
        return jax.make_mesh(sizes, mesh.all_names, axis_types=types, devices=found)
    found = sorted(found, key=_coordinates)
    if mesh.placement is None:
        return jax.sharding.Mesh(_array(found).reshape(sizes), mesh.all_names, axis_types=types)
    placed = _placed(mesh, mesh.placement, found)
    return jax.sharding.Mesh(placed.transpose(mesh.order).reshape(sizes), mesh.all_names, axis_types=types)


def stage_meshes(meshes: Sequence[Mesh], devices: Sequence[Any] | None = None) -> tuple[jax.sharding.Mesh, ...]:
    """The JAX meshes of a pipeline's stages, which have the devices among them in order: `Cluster.part` after part.

    >>> [dict(mesh.shape) for mesh in stage_meshes([Mesh.of({"data": 1})])]
    [{'data': 1}]

    Raises:
        ClusterError: there are fewer devices than the stages need.
    """
    found = list(jax.devices() if devices is None else devices)
    n = sum(mesh.size for mesh in meshes)
    if len(found) < n:
        raise ClusterError(
            f"the stages of a pipeline have devices of their own: {len(meshes)} stages need {n}, got {len(found)}. "
            f"Search on a smaller cluster, pass devices=..., or on a CPU set XLA_FLAGS=--xla_force_host_platform_device_count={n}."
        )
    if any(mesh.placement is not None for mesh in meshes):
        found = sorted(found[:n], key=_coordinates)
    firsts = accumulate((mesh.size for mesh in meshes), initial=0)
    return tuple(jax_mesh(mesh, found[first : first + mesh.size]) for mesh, first in zip(meshes, firsts, strict=False))


def mesh_of_stages(stages: Sequence[Any], axis: str = STAGE_AXIS) -> jax.sharding.Mesh:
    """The mesh over the devices of all stages, or other equal parts, with a first axis ``"stage"``, or of another name.

    Raises:
        ClusterError: stages have meshes of different axes, which no one mesh covers.
    """
    first = stages[0]
    if any(mesh.axis_names != first.axis_names or mesh.devices.shape != first.devices.shape for mesh in stages):
        shapes = ", ".join(str(dict(mesh.shape)) for mesh in stages)
        raise ClusterError(f"one mesh covers stages of equal meshes, got {shapes}. Use strategy.shardings, or the stages one by one.")
    own = [name for name in first.axis_names if name != axis]  # one of size 1 that stages have themselves
    devices = np.stack([mesh.devices for mesh in stages]).reshape(len(stages), *(first.shape[name] for name in own))
    return jax.sharding.Mesh(devices, (axis, *own), axis_types=(AxisType.Auto,) * devices.ndim)


def by_rows(parts: Sequence[NamedSharding], dim: int = 0) -> NamedSharding:
    """The sharding of an array over all stages, each of which has an equal part along a dimension, all with the first one's spec.

    Raises:
        ClusterError: as for `mesh_of_stages`.
    """
    mesh = mesh_of_stages([part.mesh for part in parts])
    return NamedSharding(mesh, rows_spec(parts[0].spec, dim), memory_kind=parts[0].memory_kind)


def rows_spec(spec: PartitionSpec | Sequence[Any], dim: int = 0, axis: str = STAGE_AXIS) -> PartitionSpec:
    """The spec of an array over a first axis, such as that of stages, given that of the equal part along a dimension that each one has.

    >>> rows_spec(PartitionSpec("data", None)), rows_spec(PartitionSpec(), 1)
    (PartitionSpec(('stage', 'data'), None), PartitionSpec(None, 'stage'))
    """
    named = [entry_axes(entry) for entry in spec]
    own = [tuple(name for name in axes if name != axis) for axes in named] + [()] * (dim + 1 - len(named))
    own[dim] = (axis, *own[dim])
    return PartitionSpec(*(None if not axes else axes[0] if len(axes) == 1 else axes for axes in own))


def _slices(devices: Sequence[Any], mesh: Mesh) -> int:
    """The number of TPU slices that the devices are of.

    Raises:
        ClusterError: there are unequally many of them.
    """
    counts = Counter(_coordinates(device)[:1] for device in devices)
    if len(set(counts.values())) > 1:
        parts = ", ".join(f"{n} of slice {index[0]}" for index, n in sorted(counts.items()) if index)
        raise ClusterError(
            f"a mesh has equally many devices of each slice, and {mesh} gets {parts}. Pass devices=, as many of every slice, or search for "
            f"a cluster of equal slices such as '{len(counts)}*v5e:4x4'."
        )
    return len(counts)


def _coordinates(device: Any) -> tuple[int, ...]:
    """The coordinates of a device in its slice, outermost dimension first; empty if it has none."""
    coords = getattr(device, "coords", None)
    return () if coords is None else (getattr(device, "slice_index", None) or 0, *coords, getattr(device, "core_on_chip", 0))


def _placed(mesh: Mesh, placement: Placement, devices: Sequence[Any]) -> np.ndarray:
    """The devices, given row-major over the cluster, as an array of the shape ``mesh.sizes``."""
    laid = _array(devices).reshape(placement.topology).transpose(placement.dims).reshape([mesh.sizes[axis] for axis in placement.axes])
    return laid.transpose(np.argsort(placement.axes))


def device_numbers(mesh: Mesh) -> np.ndarray:
    """The devices of a mesh, of the shape of its axes, by their numbers row-major over the cluster, as `jax_mesh` places them.

    >>> device_numbers(Mesh.of({"data": 2, "model": 2})).tolist()
    [[0, 1], [2, 3]]
    """
    sizes = tuple(size for _, size in mesh.shape)
    if mesh.placement is None:
        return np.arange(mesh.size).reshape(sizes)
    return _placed(mesh, mesh.placement, range(mesh.size)).transpose(mesh.order).reshape(sizes).astype(int)


def _array(devices: Sequence[Any]) -> np.ndarray:
    found = np.empty(len(devices), object)
    found[:] = devices
    return found


def abstract_mesh(mesh: Mesh, device: AbstractDevice | None = None) -> AbstractMesh:
    """The JAX mesh without devices, for lowering; Pallas kernels are lowered for a kind of device, which it may have."""
    sizes = tuple(size for _, size in mesh.shape)
    return AbstractMesh(sizes, mesh.all_names, axis_types=(AxisType.Auto,) * len(sizes), abstract_device=device)


def lowering_mesh(
    mesh: Mesh, graph: Graph, device: AbstractDevice | None = None, manual: bool = False
) -> jax.sharding.Mesh | AbstractMesh:
    """The JAX mesh for a program that is lowered and not run: without devices, unless an operation needs them, as callbacks do.

    Args:
        device: one of its devices.
        manual: whether it is one manual computation, in which nothing partitions itself.

    Raises:
        ClusterError: an operation needs them, and there are fewer devices than the mesh needs.
    """
    need = _NEED_DEVICES - {"custom_partitioning"} if manual else _NEED_DEVICES
    return jax_mesh(mesh) if any(op.primitive in need for op in graph.walk()) else abstract_mesh(mesh, device)


def to_named_sharding(layout: Layout, rank: int, names: Sequence[str], mesh: jax.sharding.Mesh | AbstractMesh) -> NamedSharding:
    """The `NamedSharding` of a layout, over axes of these names, of a tensor of this rank."""
    return NamedSharding(mesh, to_partition_spec(layout, rank, names))


def to_partition_spec(layout: Layout, rank: int, names: Sequence[str]) -> PartitionSpec:
    """The `PartitionSpec` of a layout, over axes of these names, of a tensor of this rank."""
    return PartitionSpec(*layout_to_spec(layout, names, rank))
