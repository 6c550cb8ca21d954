"""Grouped products (`jax.lax.ragged_dot` and its gradients) as compilers make them.

- *Dense*: every row is multiplied with the matrix of every group, and what is of other groups is masked.
- *Skipping*: a kernel goes through all blocks of rows of all groups, and skips those in which a group has no rows. Compilers count the
  arithmetic of a dense product.
- *A kernel* that goes through the blocks in which groups have rows.

Which rows are in which group is known when it runs. A block of rows with several groups' is computed for each of them: at most as often as
there are groups, less one, beyond once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from autoshard.ir import Op, Value


@dataclass(frozen=True, slots=True)
class Grouped:
    """The work of one grouped product, as multiples of that of each row in its own group.

    Attributes:
        done: what is computed.
        counted: what the compiled program counts, skipped or not.
        expanded: the operands of which rows are stored once for each group; none where they are masked as they are read.
        transposed: whether the right operand is stored once more, transposed.
        groups: how many there are.
    """

    done: float
    counted: float
    expanded: tuple[int, ...] = ()
    transposed: bool = False
    groups: int = 1


def is_grouped(op: Op) -> bool:
    """Whether an op multiplies rows by their groups; where these are batches, it multiplies these."""
    if op.primitive != "ragged_dot_general":
        return False
    numbers = op.params["ragged_dot_dimension_numbers"]
    (_, _), (batch, _) = numbers.dot_dimension_numbers
    return not set(numbers.lhs_ragged_dimensions) & set(batch)


def dense(op: Op, values: Sequence[Value]) -> Grouped:
    """A product of all groups with all rows, as XLA:GPU and XLA:CPU make it.

    evidence: rows stored for each group
    """
    numbers, groups = op.params["ragged_dot_dimension_numbers"], _groups(op, values)
    (contracted, right), _ = numbers.dot_dimension_numbers
    sums = bool(set(numbers.lhs_ragged_dimensions) & set(contracted))
    is_minor = max(right, default=0) == values[op.operands[1]].rank - 1
    return Grouped(groups, groups, (0, 1) if sums else (0,), not sums and is_minor, groups)


def in_blocks(op: Op, values: Sequence[Value], rows: float, skips: bool) -> Grouped:
    """A kernel's work on blocks of so many rows, each of which is computed for every group that has rows in it.

    Args:
        skips: whether it goes through all blocks of all groups.
    """
    groups, (ragged,) = _groups(op, values), op.params["ragged_dot_dimension_numbers"].lhs_ragged_dimensions
    size = max(values[op.operands[0]].shape[ragged], 1)
    done = (size + (groups - 1) * rows) / size
    return Grouped(min(done, groups), groups, groups=groups) if skips else Grouped(done, done, groups=groups)


def is_plain(op: Op, values: Sequence[Value]) -> bool:
    """Whether rows come first in what has rows, and groups first in what has groups, and there are no batches."""
    numbers = op.params["ragged_dot_dimension_numbers"]
    _, (batch, _) = numbers.dot_dimension_numbers
    first = (*numbers.lhs_ragged_dimensions, *numbers.rhs_group_dimensions)
    return not batch and set(first) <= {0} and values[op.operands[0]].rank == 2


def rows_of(op: Op, values: Sequence[Value]) -> int:
    """How many rows there are."""
    (ragged,) = op.params["ragged_dot_dimension_numbers"].lhs_ragged_dimensions
    return values[op.operands[0]].shape[ragged]


def _groups(op: Op, values: Sequence[Value]) -> int:
    return max(values[op.operands[2]].shape[-1], 1)


def expanded_traffic(op: Op, grouped: Grouped, values: Sequence[Value]) -> tuple[tuple[int, float], ...]:
    """The operands that are stored expanded or transposed, and the bytes of writing and reading them so."""
    moved = [(position, 2 * grouped.groups * values[op.operands[position]].nbytes) for position in grouped.expanded]
    return (*moved, *(((1, 2 * values[op.operands[1]].nbytes),) if grouped.transposed else ()))
