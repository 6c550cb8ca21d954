"""What lies in a TPU's memory besides its values: the same in another order of dimensions, or for what shards send of it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Set
from itertools import permutations

from autoshard.compilers.buffer_assignment import read_in
from autoshard.compilers.program_facts import Profile
from autoshard.compilers.tpu.tiling import LANES, ROWS, by_rows, local_part, padding, tiled, tiles
from autoshard.cost.reshard import Step
from autoshard.ir import Assignment, Layout, Op, local_shape, sent_tensors, shards
from autoshard.primitives import is_matrix

Held = tuple[float, int, int]
"""Bytes of a device, the moment in which they are first held, and the first in which they are not."""


def _first_read_in(profile: Profile, assignment: Assignment, op: Op, value: int) -> Layout:
    """The first of those; where the value lies if there is none."""
    return next(iter(read_in(profile, assignment, op, value)), assignment.layout(value))


def for_products(profile: Profile, assignment: Assignment, copied: Set[int]) -> Iterator[Held]:
    """Arguments that products want in another order than they are handed in.

    - Images are not in a convolution's tiles, nor matrices in a batched product's, and rounded if only products read them. They are read as
      they lie where a batch of whole lanes is innermost anyway (``copy`` in the convolutions' own kernels for 128 and 512 images, before
      them for 32, 48 and 96: libtpu 0.0.42).
    - Weights that loops multiply by are copied for all of them where their last two dimensions fill no tile: of four gates between the two
      that are multiplied (``bf16[1280,4,1280]{2,0,1}``, spilled between a recurrent network's loops forward and back, libtpu 0.0.42).

    Args:
        copied: the values that are read in other layouts too.
    """
    fusion, times, ops = profile.fusion, profile.lifetimes, profile.graph.walk()
    for value in profile.graph.arguments:
        minor, users = fusion.minor[value], fusion.users[value]
        local = local_part(profile, assignment, value)
        padded = tiles(profile, assignment, value)
        if minor and users and padded > 1 and all(math.prod(local[dim] for dim in dims) % LANES for dims in minor):
            narrow = fusion.rounds[value] and all(is_matrix(ops[op].primitive) for op in users)
            nbytes = _share(profile, assignment, value) * padded / (2 if narrow else 1)
            yield nbytes, min(times.starts[op] for op in users), max(times.ends[op] for op in users)
    for value, loops in profile.looped_weights.items():
        if value not in copied and local_part(profile, assignment, value)[-2] < ROWS:
            yield _share(profile, assignment, value), times.starts[loops[0]], times.ends[loops[-1]]


def for_lookups(profile: Profile, assignment: Assignment, copied: Set[int], early: bool) -> Iterator[Held]:
    """What is looked up row by row, and what is found.

    Tables whose rows fill no tiles are handed in, and computed, column by column, and copied to rows before they are looked up, rounded
    where all that is read is: one by one, or those that are handed in as early as can be (five of six at once in a recommender that libtpu
    0.0.42 compiled). What is found lies row by row too, and is copied to what pads less unless it is added to others so.

    Args:
        copied: the values that are read in other layouts too.
        early: whether tables are copied as early as can be.
    """
    times, ops = profile.lifetimes, profile.graph.walk()
    first: int | None = None  # the first moment in which a table that is handed in is looked up
    for op, nbytes in _short_rows(profile, assignment):
        (rows,), start = op.results, times.starts[op.index]
        if early and profile.makers[op.operands[0]] is None:
            start = first = start if first is None else first
        yield nbytes / (2 if profile.rounded[rows] and rows not in copied else 1), start, times.ends[op.index]
        found = local_part(profile, assignment, rows)
        wide, own = tiled(found[-1], math.prod(found[:-1])), tiles(profile, assignment, rows)
        place = times.places.get(profile.fusion.root[rows])
        if place is not None and wide > own:
            kept = all(ops[reader].primitive == "scatter-add" for reader in profile.readers[rows])
            extra = _share(profile, assignment, rows) * (wide - own if kept else wide)
            yield extra, int(times.born[place]), int(times.dies[place]) if kept else times.ends[op.index]


def _short_rows(profile: Profile, assignment: Assignment) -> Iterator[tuple[Op, float]]:
    """The lookups of rows that fill no tiles and that lie one by one for it, with the bytes of a device's parts of the tables then."""
    for op in (*profile.table_lookups, *profile.lookups):
        table = op.operands[0]
        value, own = profile.graph.values[table], assignment.layout(table)
        target = _first_read_in(profile, assignment, op, table)
        local = local_shape(value.shape, target, assignment.mesh.sizes)
        moved = profile.makers[table] is None and target != own
        whole = value.rank > 0 and op.params["slice_sizes"][-1] == value.shape[-1]
        if whole and not moved and math.prod(local[:-1]) >= LANES and (padded := by_rows(local, value.itemsize)) > padding(local):
            yield op, math.prod(local) * value.itemsize * padded


def for_scatters(profile: Profile, assignment: Assignment, partials: Mapping[int, Step]) -> Iterator[Held]:
    """What rows are added to, and those rows.

    It lies row by row meanwhile where such tables do, and is moved then; what is added is copied so before, unless it was looked up. So of
    gradients of tables: ``f32[400000,64]{1,0:T(8,128)}`` of 204.8 MB, and a copy ``{0,1:T(8,128)}`` of 102.4 (libtpu 0.0.42).

    Args:
        partials: per op index how its result is combined with other devices'.
    """
    # evidence: tables that rows are added to
    values, times, ops, mesh = profile.graph.values, profile.lifetimes, profile.graph.walk(), assignment.mesh.sizes
    for op in profile.added_to:
        (total,), added = op.results, op.operands[2]
        layout = partials[op.index].source if op.index in partials else assignment.layout(total)
        local = local_shape(values[total].shape, layout, mesh) or (1.0,)
        padded = by_rows(local, values[total].itemsize)
        inserted = op.params["dimension_numbers"].inserted_window_dims
        whole = values[added].shape[-1:] == values[total].shape[-1:] and len(local) - 1 not in inserted
        if not whole or math.prod(local[:-1]) < LANES or padded == padding(local):
            continue
        yield math.prod(local) * values[total].itemsize * padded, times.starts[op.index], times.ends[op.index]
        maker = profile.makers[added]
        part = local_shape(values[added].shape, _first_read_in(profile, assignment, op, added), mesh)
        wide = tiled(part[-1], math.prod(part[:-1])) if part else 1.0
        if wide > padding(part) and (maker is None or ops[maker].primitive != "gather"):
            yield math.prod(part) * values[added].itemsize * wide, times.starts[op.index], times.ends[op.index]


def for_sending(profile: Profile, assignment: Assignment) -> Iterator[Held]:
    """What is computed as it is read, where shards send parts of it: it lies there until the last reads it.

    So of activations that convolutions with sharded pixels read, and their gradients again (a U-Net compiled by libtpu 0.0.42).
    """
    fusion, times, mesh = profile.fusion, profile.lifetimes, assignment.mesh.sizes
    spans: dict[int, tuple[int, int]] = {}
    for op in profile.sending:
        rule, choice = profile.rules[op.index], assignment.choice(op.index)
        assert rule is not None
        for tensor in sent_tensors(rule, choice, mesh):
            if tensor < len(op.operands) and not fusion.stored[value := fusion.root[op.operands[tensor]]]:
                first, last = spans.get(value, (times.starts[op.index], 0))
                spans[value] = min(first, times.starts[op.index]), max(last, times.ends[op.index])
    for value, (first, last) in spans.items():
        yield _share(profile, assignment, value) * tiles(profile, assignment, value), first, last


def sliced_last(profile: Profile, assignment: Assignment) -> Iterator[tuple[int, int, float]]:
    """The buffers of what is looked up in a slice of it, each with the moment until which it waits for its other readers to have begun.

    And the bytes of the slice, which lies as the whole does: ``f32[16,160,10000]{0,2,1:T(8,128)}`` of 128 takes as much as that.
    Nothing waits for what a loss looks up, and so XLA makes that slice when the sums of exponentials are there: ``f32[160,256,12000]`` of
    logits, and as many exponentials of which slices are wanted too, lie side by side (recurrent networks whose batch is not the first
    dimension; libtpu 0.0.42). Near the limit of memory it makes the slice first.
    """
    times, mesh = profile.lifetimes, assignment.mesh.sizes
    for op in profile.lookups:
        value = op.operands[0]
        own, place = assignment.layout(value), times.places.get(profile.fusion.root[value])
        target = _first_read_in(profile, assignment, op, value)
        sliced = own != target and all(dim in (-1, wanted) for dim, wanted in zip(own, target, strict=True))
        tensor = profile.graph.values[value]
        if sliced and place is not None and tensor.rank > 1 and len(profile.readers[value]) > 1:
            whole, part = (local_shape(tensor.shape, layout, mesh) for layout in (own, target))
            lanes, rows = min(permutations(reversed(range(tensor.rank)), 2), key=lambda pair: tiled(whole[pair[0]], whole[pair[1]]))
            nbytes = math.prod(part) * tensor.itemsize * tiled(part[lanes], part[rows])
            yield place, max(times.starts[reader] for reader in profile.readers[value]) + 2, nbytes


def _share(profile: Profile, assignment: Assignment, value: int) -> float:
    """The bytes of a device's part of a value."""
    return profile.graph.values[value].nbytes / shards(assignment.layout(value), assignment.mesh.sizes)
