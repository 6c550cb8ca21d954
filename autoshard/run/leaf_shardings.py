"""Where a strategy puts each array: on the one mesh of all devices, or on the mesh of a pipeline's stage."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec

from autoshard.lower import HOST, jax_mesh, mesh_of_stages, stage_meshes
from autoshard.strategy import BY_ROWS, Record


def strategy_mesh(record: Record, devices: Sequence[Any] | None = None) -> jax.sharding.Mesh:
    """The mesh over all devices; of a pipeline with the stages as its first axis.

    Raises:
        ClusterError: there are too few devices, or a pipeline's stages have meshes of different shapes.
    """
    meshes = step_meshes(record, devices)
    return meshes[0] if record.pipeline is None else mesh_of_stages(meshes[: record.pipeline.n_parts])


def step_meshes(record: Record, devices: Sequence[Any] | None = None) -> tuple[jax.sharding.Mesh, ...]:
    """The mesh of a step, or those of a pipeline's stages; chunks of one part of the devices have the same.

    Raises:
        ClusterError: there are too few devices.
    """
    if (pipeline := record.pipeline) is None:
        return (jax_mesh(record.mesh, devices),)
    meshes = stage_meshes(record.part_meshes, devices)
    return tuple(meshes[pipeline.part(stage)] for stage in range(len(pipeline.stages)))


def leaf_shardings(record: Record, devices: Sequence[Any] | None = None) -> list[NamedSharding]:
    """The sharding of each argument leaf, in order: on the mesh of its stage, or of all stages where each has some rows.

    Raises:
        ClusterError: there are too few devices.
    """
    meshes, places, hosted = step_meshes(record, devices), record.argument_places, {*record.program.offload}
    by_place = dict(enumerate(meshes)) | ({BY_ROWS: mesh_of_stages(list(dict.fromkeys(meshes)))} if BY_ROWS in places else {})
    kinds = [HOST if leaf in hosted else None for leaf in range(len(places))]
    leaves = zip(record.arguments, places, kinds, strict=True)
    return [NamedSharding(by_place[place], PartitionSpec(*tensor.spec), memory_kind=kind) for tensor, place, kind in leaves]
