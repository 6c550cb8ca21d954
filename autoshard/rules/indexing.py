"""Rules of primitives that read or write at computed positions."""

from __future__ import annotations

from typing import Any

from autoshard.ir import Factor, Rule, Value
from autoshard.primitives import of_kind, primitive
from autoshard.rules.registry import Dim, assemble, free, free_but, reduced, resized, rule, whole


@rule("dynamic_slice")
def dynamic_slice(x: Value, /, *indices: Value, results: tuple[Value, ...], slice_sizes: tuple[int, ...], **_) -> Rule:
    """Dimensions taken whole pass through, the others stay whole."""
    dims = free_but(x.shape, [d for d, n in enumerate(slice_sizes) if n != x.shape[d]])
    return assemble([dims, *(whole(index.shape) for index in indices)], [resized(dims, slice_sizes)])


@rule("dynamic_update_slice")
def dynamic_update_slice(x: Value, update: Value, /, *indices: Value, results: tuple[Value, ...], **_) -> Rule:
    """Dimensions that the update covers pass through: ``([i, j], [i, k], [], [])->([i, j])``.

    So does, in operand and result, a dimension in which the update has one element: the shard with that position applies it.
    """
    dims = free_but(x.shape, [d for d, n in enumerate(update.shape) if n not in (1, x.shape[d])])
    return assemble([dims, resized(dims, update.shape), *(whole(index.shape) for index in indices)], [dims])


@rule("gather")
def gather(x: Value, indices: Value, /, *, results: tuple[Value, ...], dimension_numbers: Any, slice_sizes: tuple[int, ...], **_) -> Rule:
    """Dimensions taken whole, index batches and paired batches pass through: ``([k, j], [i, l])->([i, j]) reduction={k}``.

    A dimension that is indexed one element at a time is a reduction: every shard looks up its own rows, gives zero for the
    others, and the results are summed (as XLA partitions it).
    """
    numbers = dimension_numbers
    lookup = _index_dims(indices)
    operand: list[Dim] = []
    offsets: list[Dim] = []
    for d, (n, taken) in enumerate(zip(x.shape, slice_sizes, strict=True)):
        result = Factor(n)
        if d in numbers.operand_batching_dims:
            operand.append(lookup[numbers.start_indices_batching_dims[numbers.operand_batching_dims.index(d)]])
            continue
        if taken == n:
            operand.append(result)
        elif taken == 1 and d in numbers.start_index_map:
            operand.append(reduced(n, "or" if x.dtype == "bool" else "sum", x.dtype))
            result = Factor(1)
        else:
            operand.append(Factor(n, "need_replication"))
            result = Factor(taken, "need_replication")
        if d not in numbers.collapsed_slice_dims:
            offsets.append(result)
    return assemble([operand, lookup], [_interleave(numbers.offset_dims, offsets, lookup[:-1])])


def _scatter(operator: str):
    def scatter(x: Value, indices: Value, updates: Value, /, *, results: tuple[Value, ...], dimension_numbers: Any, **_) -> Rule:
        """Windows written whole and paired batches pass through: ``([i, j], [k, l], [k, j])->([i, j]) reduction={k}``.

        Index batches are reductions where updates are combined, with the operand counted once; they stay whole where one
        update overwrites another. A dimension written one element at a time passes through operand and result: every
        shard applies the updates inside it.
        """
        numbers = dimension_numbers
        batched = dict(zip(numbers.operand_batching_dims, numbers.scatter_indices_batching_dims, strict=True))
        lookup = _index_dims(indices)
        for d in range(indices.rank - 1):
            if d not in batched.values():
                n = indices.shape[d]
                lookup[d] = reduced(n, operator, x.dtype) if operator else Factor(n, "need_replication")
        operand: list[Dim] = []
        windows: list[Dim] = []
        sizes = iter([updates.shape[d] for d in numbers.update_window_dims])
        for d, n in enumerate(x.shape):
            if d in batched:
                operand.append(lookup[batched[d]])
                continue
            written = 1 if d in numbers.inserted_window_dims else next(sizes)
            by_element = d in numbers.inserted_window_dims and d in numbers.scatter_dims_to_operand_dims  # XLA gathers windows of one
            operand.append(Factor(n, "pass_through" if written == n or by_element else "need_replication"))
            if d not in numbers.inserted_window_dims:
                windows.append(operand[-1] if written == n else Factor(written, "need_replication"))
        return assemble([operand, lookup, _interleave(numbers.update_window_dims, windows, lookup[:-1])], [operand])

    return scatter


for _name in of_kind("scatter"):
    rule(_name)(_scatter(primitive(_name).operator))


def _index_dims(indices: Value) -> list[Factor]:
    """The factors of an index array; its last dimension, the coordinates, stays whole."""
    return [*free(indices.shape[:-1]), *whole(indices.shape[-1:])]


def _interleave(positions: tuple[int, ...], chosen: list[Dim], others: list[Factor]) -> list[Dim]:
    """The dimensions of a tensor with ``chosen`` at the given positions and the others, in order, between them."""
    rest = iter(others)
    placed = dict(zip(positions, chosen, strict=True))
    return [placed[d] if d in placed else next(rest) for d in range(len(chosen) + len(others))]
