"""Microbatches: an unchanged train step, rewritten into a loop over parts of its batch that accumulates gradients.

`status` carries the split of the batch through operations, by their sharding rules; `plan` places operations before, in and after the loop;
`rewrite` makes the program; `batch` finds which arguments are the batch, and refuses programs whose examples depend on each other.
"""

from autoshard.microbatch.batch import divisors, in_loop, loop_of_batch, microbatched, passes_of
from autoshard.microbatch.several import Pass
