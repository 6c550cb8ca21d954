"""Recomputation: an unchanged train step, rewritten so that its backward pass computes again what was not kept.

`flat` makes one list of the program's equations; `passes` finds its forward and its backward pass, and `loops` the scans of the one that
those of the other differentiate; `block` has the segments of the forward pass; `choice` decides what is kept; `regions` makes the
backward pass of each segment one `jax.checkpoint`; `replacing` undoes the user's own; `program` does it all. `hosting` moves kept values
to the memory of hosts, `offload` keeps optimizer state there.
"""

from autoshard.recompute.offload import LEAST_BYTES, offloaded, optimizer_state
from autoshard.recompute.program import Options, recomputed
from autoshard.recompute.replacing import checkpoints, without_checkpoints
