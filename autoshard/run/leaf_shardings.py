"""Where a strategy puts each array: on the one mesh of all devices, or on the mesh of a pipeline's stage."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec

from autoshard.lower import HOST, jax_mesh, mesh_of_stages, stage_meshes
from autoshard.strategy import BY_ROWS, Record, TensorRecord


def strategy_mesh(record: Record, devices: Sequence[Any] | None = None) -> jax.sharding.Mesh:
    """The mesh over all devices; of a pipeline with the stages as its first axis.

    Raises:
        ClusterError: there are too few devices, or a pipeline's stages have meshes of different shapes.
    """
    if record.pipeline is None:
        return jax_mesh(record.mesh, devices)
    return mesh_of_stages(pipeline_meshes(record, devices)[: record.pipeline.n_parts])


def pipeline_meshes(record: Record, devices: Sequence[Any] | None = None) -> tuple[jax.sharding.Mesh, ...]:
    """The mesh of each stage of a pipeline; chunks of one part of the devices have the same.

    Raises:
        ClusterError: there are too few devices.
    """
    pipeline = record.pipeline
    assert pipeline is not None
    meshes = stage_meshes([stage.record.mesh for stage in pipeline.stages[: pipeline.n_parts]], devices)
    return tuple(meshes[pipeline.part(stage)] for stage in range(len(pipeline.stages)))


def leaf_shardings(record: Record, devices: Sequence[Any] | None = None) -> list[NamedSharding]:
    """The sharding of each argument leaf, in order.

    Raises:
        ClusterError: there are too few devices.
    """
    kinds = {leaf: HOST for leaf in record.program.offload}
    if record.pipeline is None:
        mesh = jax_mesh(record.mesh, devices)
        return [NamedSharding(mesh, PartitionSpec(*tensor.spec), memory_kind=kinds.get(k)) for k, tensor in enumerate(record.arguments)]
    found = stage_shardings(record.arguments, record.pipeline.argument_stages, pipeline_meshes(record, devices))
    return [each if k not in kinds else NamedSharding(each.mesh, each.spec, memory_kind=HOST) for k, each in enumerate(found)]


def stage_shardings(tensors: Sequence[TensorRecord], places: Sequence[int], meshes: Sequence[jax.sharding.Mesh]) -> list[NamedSharding]:
    """The shardings of leaves of a pipeline, each on the mesh of its stage, or of all stages where each has some rows."""
    by_place = dict(enumerate(meshes)) | ({BY_ROWS: mesh_of_stages(list(dict.fromkeys(meshes)))} if BY_ROWS in places else {})
    return [NamedSharding(by_place[place], PartitionSpec(*tensor.spec)) for tensor, place in zip(tensors, places, strict=True)]
