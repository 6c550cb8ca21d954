"""From an assignment to a program that XLA partitions exactly so."""

from autoshard.lower.collectives import ReshardPath
from autoshard.lower.constrain import constrained
from autoshard.lower.manual import derived_from, manual, obstacle
from autoshard.lower.mesh import abstract_mesh, jax_mesh, lowering_mesh, to_named_sharding

__all__ = [
    "ReshardPath",
    "abstract_mesh",
    "constrained",
    "derived_from",
    "jax_mesh",
    "lowering_mesh",
    "manual",
    "obstacle",
    "to_named_sharding",
]
