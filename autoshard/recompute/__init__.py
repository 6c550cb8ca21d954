"""Recomputation: an unchanged train step, rewritten so that its backward pass computes again what was not kept.

`flat` makes one list of the program's equations; `block` finds the forward and the backward pass and the segments of the former; `choice`
decides what is kept; `loops` handles a scan and the scan that differentiates it; `regions` makes the backward pass of each segment one
`jax.checkpoint`; `replacing` undoes the user's own; `program` does it all. `hosting` moves kept values to the memory of hosts,
`offload` keeps optimizer state there.
"""

from autoshard.recompute.offload import LEAST_BYTES, offloaded, optimizer_state
from autoshard.recompute.program import Options, rematerialised
from autoshard.recompute.replacing import checkpoints, without_checkpoints

__all__ = ["LEAST_BYTES", "Options", "checkpoints", "offloaded", "optimizer_state", "rematerialised", "without_checkpoints"]
