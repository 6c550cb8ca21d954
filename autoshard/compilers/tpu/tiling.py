"""How arrays are stored in a TPU's memory: in tiles of 128 lanes and 8 rows along two of their dimensions, which XLA:TPU chooses."""

from __future__ import annotations

import math
from functools import cache
from itertools import permutations

from autoshard.analysis.stacks import merged
from autoshard.compilers.op_patterns import Minor
from autoshard.compilers.program_facts import ProgramFacts
from autoshard.ir import Assignment, Layout, local_shape

LANES = 128  # of a tile; evidence: tiles of 128 lanes
ROWS = 8  # of a tile; evidence: tiles of 8 rows
# Tables whose rows take more than twice their size in tiles are laid out row by row unless that takes so much more than they have.
# evidence: tables of short rows
MOST_WASTED_BYTES = 128 * 2**20
# Arrays whose slices only loops without products read or stack have their last dimension innermost, unless that takes more than so many
# times their size: ``f32[512,256,32]{2,1,0:T(8,128)}``, but ``f32[512,256,16]{1,2,0:T(8,128)}``. evidence: slices of loops without products
MOST_IN_ORDER = 4.0


def local_part(facts: ProgramFacts, assignment: Assignment, value: int) -> tuple[float, ...]:
    """The shape of a device's part of a value."""
    return local_shape(facts.graph.values[value].shape, assignment.layout(value), assignment.mesh.sizes)


def tiles(facts: ProgramFacts, assignment: Assignment, value: int, passed: bool = False) -> float:
    """How many times its size a device's part of a value takes in tiles; arguments and results of the program pad least."""
    local = local_part(facts, assignment, value)
    if value in facts.stacks_between_loops and (stored := merged(local, LANES)) != local:
        return padding(stored)
    if value in facts.sliced_alone and not passed and (found := tiled(*reversed(local[-2:]))) <= MOST_IN_ORDER:
        return found
    return padding(local) if passed else _in_slices(facts, value, local)


def tiles_of_copy(facts: ProgramFacts, assignment: Assignment, value: int, layout: Layout) -> float:
    """How many times its size a copy in another layout takes in tiles, where it is gathered of a stack: it keeps the stack's order.

    What an all_to_all makes of a stack has the steps in the lanes: ``bf16[384,32,6,8]{0,3,2,1:T(8,128)(2,1)}`` (libtpu 0.0.52).
    """
    # evidence: gathered stacks
    is_gathered = all(dim in (-1, own) for dim, own in zip(layout, assignment.layout(value), strict=True))
    if value not in facts.stacked or not is_gathered:
        return 1.0
    return _in_slices(facts, value, local_shape(facts.graph.values[value].shape, layout, assignment.mesh.sizes))


def _in_slices(facts: ProgramFacts, value: int, local: tuple[float, ...]) -> float:
    """How many times its size a part of a value takes in tiles: of one slice each where a loop with products stacks it."""
    outer, inner = 0, value
    while inner in facts.stacked:
        outer, inner = outer + 1, facts.stacked[inner]
    return padding(local[outer:], facts.fusion.minor[inner])


@cache
def padding(local: tuple[float, ...], minor: Minor | None = None) -> float:
    """How many times its size a device's array takes in tiles of 128 lanes and 8 rows; once if it has less than two dimensions.

    The two innermost dimensions are those that pad least, among those that products want there if any do. Of few rows a tile has 1, 2 or 4
    (layouts ``{3,0,2,1:T(8,128)}`` and ``{0,3,2,1:T(4,128)}`` in XLA:TPU's HLO).
    """
    sizes = local if minor is None else [math.prod(local[dim] for dim in dims) for dims in minor]
    return min((tiled(lanes, rows) for lanes, rows in permutations(sizes, 2)), default=1.0)


def by_rows(local: tuple[float, ...], itemsize: float) -> float:
    """How many times its size an array takes of which rows, along its last dimension, are looked up or added to.

    Its rows are stored one by one, unless they are so short that too much would be wasted; then it is stored as others are.
    """
    *rows, width = local
    found = tiled(width, math.prod(rows))
    wasted = (found - 1) * math.prod(local) * itemsize
    return padding(local) if found > 2 and wasted > MOST_WASTED_BYTES else found


def tiled(lanes: float, rows: float) -> float:
    """How many times its size an array takes whose last dimension and the one before have these sizes."""
    if not lanes * rows:
        return 1.0
    return math.ceil(lanes / LANES) * LANES / lanes * _whole_rows(rows) / rows


def _whole_rows(size: float) -> float:
    tile = next((few for few in (1, 2, 4) if size <= few), ROWS)
    return math.ceil(size / tile) * tile
