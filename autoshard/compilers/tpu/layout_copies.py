"""Copies of values in a TPU's memory: in another order of dimensions, or of parts that shards send each other."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Set
from itertools import permutations

import numpy as np

from autoshard.analysis.demanded_precision import is_narrow
from autoshard.compilers.buffer_assignment import read_in
from autoshard.compilers.buffers import Held
from autoshard.compilers.program_facts import ProgramFacts
from autoshard.compilers.tpu.tables import are_added_to_by_rows, are_looked_up_by_rows
from autoshard.compilers.tpu.tiling import LANES, ROWS, by_rows, local_part, padding, tiled, tiles
from autoshard.cost.reshard import Step
from autoshard.ir import Assignment, Layout, Op, local_shape, sent_tensors, shards

PARTS = 4  # of a Fourier transform: real and imaginary, before and after; evidence: arrays of Fourier transforms


def _first_read_in(facts: ProgramFacts, assignment: Assignment, op: Op, value: int) -> Layout:
    """The first layout in which an op reads a value; the value's own if there is none."""
    return next(iter(read_in(facts, assignment, op, value)), assignment.layout(value))


def for_products(facts: ProgramFacts, assignment: Assignment, copied: Set[int]) -> Iterator[Held]:
    """Copies of arguments in the order of dimensions in which products read them.

    - Images are not in a convolution's tiles, nor matrices in a batched product's; their copies are rounded if only products read them.
      There is none where a batch of whole lanes is innermost anyway (``copy`` in the convolutions' own kernels for 128 and 512 images,
      before them for 32, 48 and 96: libtpu 0.0.42).
    - Weights that loops multiply by are copied for all of them where their last two dimensions fill no tile: of four gates between the two
      that are multiplied (``bf16[1280,4,1280]{2,0,1}``, spilled between a recurrent network's loops forward and back, libtpu 0.0.42).

    Args:
        copied: the values that are read in other layouts too.
    """
    fusion, times = facts.fusion, facts.lifetimes
    for value in facts.graph.arguments:
        minor, users = fusion.minor[value], fusion.users[value]
        local = local_part(facts, assignment, value)
        padded = tiles(facts, assignment, value)
        if minor and users and padded > 1 and all(math.prod(local[dim] for dim in dims) % LANES for dims in minor):
            nbytes = _share(facts, assignment, value) * padded / (2 if is_narrow(facts.demands.on_values[value]) else 1)
            yield nbytes, min(times.starts[op] for op in users), max(times.ends[op] for op in users)
    for value, loops in facts.looped_weights.items():
        if value not in copied and local_part(facts, assignment, value)[-2] < ROWS:
            yield _share(facts, assignment, value), times.starts[loops[0]], times.ends[loops[-1]]


def for_lookups(facts: ProgramFacts, assignment: Assignment, copied: Set[int], early: bool) -> Iterator[Held]:
    """Copies of tables of which rows are looked up, and of the rows that are found.

    Tables whose rows fill no tiles are handed in, and computed, column by column, and copied to rows before they are looked up, rounded
    where all rows that are read are: one by one, or arguments as early as can be (five of six at once in a recommender that libtpu
    0.0.42 compiled). Found rows are stored one by one, too, and are copied to an order that pads less unless they are added to a table.

    Args:
        copied: the values that are read in other layouts too.
        early: whether tables are copied as early as can be.
    """
    times, ops = facts.lifetimes, facts.graph.walk()
    first: int | None = None  # the first moment in which a table that is handed in is looked up
    for op, nbytes in _short_rows(facts, assignment):
        (rows,), start = op.results, times.starts[op.index]
        if early and facts.makers[op.operands[0]] is None:
            start = first = start if first is None else first
        yield nbytes / (2 if is_narrow(facts.demands.on_values[rows]) and rows not in copied else 1), start, times.ends[op.index]
        found = local_part(facts, assignment, rows)
        wide, own = tiled(found[-1], math.prod(found[:-1])), tiles(facts, assignment, rows)
        place = times.places.get(facts.fusion.root[rows])
        if place is not None and wide > own:
            kept = all(ops[reader].primitive == "scatter-add" for reader in facts.readers[rows])
            extra = _share(facts, assignment, rows) * (wide - own if kept else wide)
            yield extra, int(times.born[place]), int(times.dies[place]) if kept else times.ends[op.index]


def _short_rows(facts: ProgramFacts, assignment: Assignment) -> Iterator[tuple[Op, float]]:
    """The lookups of rows that fill no tiles but are stored one by one, with the bytes of a device's part of the table."""
    for op in (*facts.table_lookups, *facts.lookups):
        table = op.operands[0]
        value, own = facts.graph.values[table], assignment.layout(table)
        target = _first_read_in(facts, assignment, op, table)
        local = local_shape(value.shape, target, assignment.mesh.sizes)
        moved = facts.makers[table] is None and target != own
        whole = value.rank > 0 and op.params["slice_sizes"][-1] == value.shape[-1]
        if whole and not moved and are_looked_up_by_rows(local, value.itemsize):
            yield op, math.prod(local) * value.itemsize * by_rows(local, value.itemsize)


def for_scatters(facts: ProgramFacts, assignment: Assignment, partials: Mapping[int, Step]) -> Iterator[Held]:
    """Copies of tables that rows are added to, and of those rows.

    The table is stored row by row meanwhile where such tables are, and moved then; added rows are copied to that order before, unless they
    were looked up. So with gradients of tables: ``f32[400000,64]{1,0:T(8,128)}`` of 204.8 MB, and a copy ``{0,1:T(8,128)}`` of 102.4
    (libtpu 0.0.42).

    Args:
        partials: per op index how its result is combined with other devices'.
    """
    # evidence: tables that rows are added to
    values, times, ops, mesh = facts.graph.values, facts.lifetimes, facts.graph.walk(), assignment.mesh.sizes
    for op, nbytes in _added_by_rows(facts, assignment, partials):
        yield nbytes, times.starts[op.index], times.ends[op.index]
        added = op.operands[2]
        maker = facts.makers[added]
        part = local_shape(values[added].shape, _first_read_in(facts, assignment, op, added), mesh)
        wide = tiled(part[-1], math.prod(part[:-1])) if part else 1.0
        if wide > padding(part) and (maker is None or ops[maker].primitive != "gather"):
            yield math.prod(part) * values[added].itemsize * wide, times.starts[op.index], times.ends[op.index]


def _added_by_rows(facts: ProgramFacts, assignment: Assignment, partials: Mapping[int, Step]) -> Iterator[tuple[Op, float]]:
    """The scatters that add rows to a table which is stored row by row meanwhile, with its bytes on a device then."""
    values, mesh, memory = facts.graph.values, assignment.mesh.sizes, facts.compiler.device.memory_bytes
    for op in facts.added_to:
        (total,), added = op.results, op.operands[2]
        layout = partials[op.index].source if op.index in partials else assignment.layout(total)
        local = local_shape(values[total].shape, layout, mesh) or (1.0,)
        inserted = op.params["dimension_numbers"].inserted_window_dims
        part = local_shape(values[added].shape, _first_read_in(facts, assignment, op, added), mesh)
        rows = math.inf if op.index in facts.row_updates and op.index not in partials else math.prod(part[:-1])
        whole = values[added].shape[-1:] == values[total].shape[-1:] and len(local) - 1 not in inserted
        if whole and are_added_to_by_rows(local, values[total].itemsize, rows, memory):
            yield op, math.prod(local) * values[total].itemsize * tiled(local[-1], math.prod(local[:-1]))


def for_updates(facts: ProgramFacts, assignment: Assignment, partials: Mapping[int, Step]) -> Iterator[Held]:
    """Copies, row by row, of the arguments that a table's gradient updates, from the first such gradient to the end.

    The update is computed row by row, and moved back at the end, where the scatter's zeros are also read by it, since equal constants are
    one array, or where the scatter adds to one of the update's own values instead: with Adagrad, which compares with 0, with a mask, a
    projection to positive values or momentum, but not with plain gradient descent, Adam, Lion or RMSProp (libtpu 0.0.42).

    Args:
        partials: per op index how its result is combined with other devices'; those are moved before.
    """
    # evidence: updates row by row
    times = facts.lifetimes
    updated = [(op, nbytes) for op, nbytes in _added_by_rows(facts, assignment, partials) if op.index not in partials]
    looked_up = {op.operands[0]: times.ends[op.index] for op, _ in _short_rows(facts, assignment)}
    first = min((times.starts[op.index] for op, _ in updated), default=0)
    for op, nbytes in updated:
        for value in facts.row_updates.get(op.index, ()):
            if assignment.layout(value) == assignment.layout(op.results[0]):
                yield nbytes, looked_up.get(value, first), times.moments


def for_transforms(facts: ProgramFacts, assignment: Assignment) -> Iterator[Held]:
    """What Fourier transforms have in memory beside operands and results: real arrays of the whole length.

    They are products with matrices of sines and cosines, in float32, of all frequencies also where half of them are kept; where half of
    them are read, the mirrored ones are one more array.
    """
    times, sizes = facts.lifetimes, assignment.mesh.sizes
    for op in facts.transforms:
        layout = _first_read_in(facts, assignment, op, op.operands[0])
        tensors = [facts.graph.values[value] for value in (*op.operands, *op.results)]
        parts = [local_shape(tensor.shape, layout, sizes) for tensor in tensors]
        whole = max(parts, key=math.prod)
        one = math.prod(whole) * np.dtype("float32").itemsize
        kept = round(math.prod(parts[1]) * tensors[1].itemsize / max(one, 1))  # of the last pair, or of half of its frequencies
        mirrored = parts[0][-1] < parts[1][-1]
        yield from (PARTS + mirrored - kept) * [(one * padding(whole), times.starts[op.index], times.ends[op.index])]


def for_sending(facts: ProgramFacts, assignment: Assignment) -> Iterator[Held]:
    """Operands that are computed as they are read, but stored until their last reader where shards send parts of them.

    So with activations that convolutions with sharded pixels read, and their gradients again (a U-Net compiled by libtpu 0.0.42).
    """
    fusion, times, mesh = facts.fusion, facts.lifetimes, assignment.mesh.sizes
    spans: dict[int, tuple[int, int]] = {}
    for op in facts.sending:
        rule, choice = facts.rules[op.index], assignment.choice(op.index)
        assert rule is not None
        for tensor in sent_tensors(rule, choice, mesh):
            if tensor < len(op.operands) and not fusion.stored[value := fusion.root[op.operands[tensor]]]:
                first, last = spans.get(value, (times.starts[op.index], 0))
                spans[value] = min(first, times.starts[op.index]), max(last, times.ends[op.index])
    for value, (first, last) in spans.items():
        yield _share(facts, assignment, value) * tiles(facts, assignment, value), first, last


def sliced_last(facts: ProgramFacts, assignment: Assignment) -> Iterator[tuple[int, int, float]]:
    """The buffers of values of which elements of a slice are looked up, each with the moment in which its other readers have begun.

    And the bytes of the slice, stored in the order of the whole: ``f32[16,160,10000]{0,2,1:T(8,128)}`` of 128 takes as much as that.
    Nothing waits for the elements that a loss looks up, and so XLA makes that slice when the sums of exponentials are there:
    ``f32[160,256,12000]`` of logits, and as many exponentials of which slices are read too, are live at once (recurrent networks whose
    batch is not the first dimension; libtpu 0.0.42). Near the limit of memory it makes the slice first.
    """
    times, mesh = facts.lifetimes, assignment.mesh.sizes
    for op in facts.lookups:
        value = op.operands[0]
        own, place = assignment.layout(value), times.places.get(facts.fusion.root[value])
        target = _first_read_in(facts, assignment, op, value)
        sliced = own != target and all(dim in (-1, wanted) for dim, wanted in zip(own, target, strict=True))
        tensor = facts.graph.values[value]
        if sliced and place is not None and tensor.rank > 1 and len(facts.readers[value]) > 1:
            whole, part = (local_shape(tensor.shape, layout, mesh) for layout in (own, target))
            lanes, rows = min(permutations(reversed(range(tensor.rank)), 2), key=lambda pair: tiled(whole[pair[0]], whole[pair[1]]))
            nbytes = math.prod(part) * tensor.itemsize * tiled(part[lanes], part[rows])
            yield place, max(times.starts[reader] for reader in facts.readers[value]) + 2, nbytes


def _share(facts: ProgramFacts, assignment: Assignment, value: int) -> float:
    """The bytes of a device's part of a value."""
    return facts.graph.values[value].nbytes / shards(assignment.layout(value), assignment.mesh.sizes)
