"""From an assignment to a program that XLA partitions exactly so."""

from autoshard.lower.constrain import constrained
from autoshard.lower.mesh import abstract_mesh, jax_mesh, lowering_mesh, to_named_sharding

__all__ = ["abstract_mesh", "constrained", "jax_mesh", "lowering_mesh", "to_named_sharding"]
