"""From an assignment to a program that XLA partitions exactly so."""

from autoshard.lower.constrain import constrained
from autoshard.lower.mesh import jax_mesh, to_named_sharding

__all__ = ["constrained", "jax_mesh", "to_named_sharding"]
