"""Lowering of a program under an assignment, to one `shard_map` or to sharding constraints."""

from autoshard.cost.reshard import ReshardPath
from autoshard.lower.constrain import constrained
from autoshard.lower.interpret import (
    AsItIs,
    Interpreter,
    Path,
    apply,
    bind,
    bind_part,
    bind_unplaced,
    manual_context,
    ops_by_path,
    retraced,
    unread,
)
from autoshard.lower.manual import derived_from, manual_program, obstacle
from autoshard.lower.mesh import (
    HOST,
    STAGE_AXIS,
    abstract_mesh,
    by_rows,
    device_numbers,
    jax_mesh,
    lowering_mesh,
    mesh_of_stages,
    rows_spec,
    stage_meshes,
    to_named_sharding,
    to_partition_spec,
)
from autoshard.lower.plan import holder_values, stored_layout
from autoshard.lower.shards import Sharded
