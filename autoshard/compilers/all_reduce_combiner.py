"""The partial sums that XLA combines by one all_reduce: an op that needs one of them waits for all.

Its combiner (``CombineInstructionsByKey``, openxla/xla, xla/service/collective_combiner_utils.h) goes through a program result by result,
what the first one needs first, and takes all_reduces of one data type and one group of devices as long as none needs what another one
brings. So the scalar loss of a mixture of experts is sent with the shares of its experts that the backward pass reads (``all-reduce.34 =
(f32[8], f32[8], f32[], f32[8], f32[8])`` of a train step with sharded state), but with the gradients of its routers where those are
all_reduced too, since they need the shares (``(f32[8], f32[8])`` and ``(bf16[8,1024], bf16[8,1024], f32[], f32[8], f32[8])`` of libtpu
0.0.42). So are those of which compilers do not form a reduce_scatter: ``bf16[8,768]`` and ``bf16[4,1024]`` over eight
devices, less than a tile each.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import permutations

from autoshard.compilers.fused_program import Fusion
from autoshard.compilers.op_patterns import is_call
from autoshard.cost.reshard import Step
from autoshard.ir import Graph, Value, local_shape
from autoshard.primitives import is_matrix, is_reduction

# XLA:TPU sends gradients in groups of at most so much. evidence: combined all_reduces
COMBINED_BYTES = 120 * 2**20


@dataclass(frozen=True, slots=True)
class Sums:
    """The sums outside loops, products and reductions, in the order in which they are combined where they are partial.

    Attributes:
        first: per op index the position of the first result that needs it; how many there are where none does.
        place: per op that is a sum its place in the order.
        needs: per op the places of those that it needs, as bits.
    """

    first: tuple[int, ...]
    place: Mapping[int, int]
    needs: Mapping[int, int]


def sums_of(graph: Graph, fusion: Fusion) -> Sums:
    """The sums of a fused program."""
    first, ops = _first_results(graph), graph.walk()
    found = [op.index for op in ops if op.trips == 1 and (is_matrix(op.primitive) or is_reduction(op.primitive))]
    place = {op: k for k, op in enumerate(sorted(found, key=lambda op: (first[op], op)))}
    needs: dict[int, int] = {}
    before: dict[int, int] = {}  # per value
    for op in ops:
        needed = 0
        for value in op.operands:
            needed |= before.get(value, 0)
        for holder in op.holders:
            inner = 0
            for flow in holder.sources:
                inner |= before.get(flow.value, 0)
            needed |= inner
            before.update(dict.fromkeys((holder.value, *holder.views), inner))
        needs[op.index] = needed
        if op.index in place:
            needed |= 1 << place[op.index]
        if needed and not is_call(op):
            before.update(dict.fromkeys(op.results, needed))
    _make_together(graph, fusion, place, needs)
    return Sums(first, place, needs)


def _make_together(graph: Graph, fusion: Fusion, place: Mapping[int, int], needs: dict[int, int]) -> None:
    """Adds the sums that reductions need since one kernel computes them along with others of as many elements that read the same value.

    So the shares of a mixture's experts are summed with their softmax's gradient, ``(f32[4], f32[16384])`` in libtpu 0.0.42. Reductions of
    values in memory are computed by the kernel that stores those.
    """
    ops, values = graph.walk(), graph.values
    reduced = {op: ops[op].operands[0] for op in place if not is_matrix(ops[op].primitive)}
    readers: dict[tuple[int, int], list[int]] = {}
    for kernel in fusion.kernels:
        made = reduced.get(kernel.op, kernel.makes[0] if kernel.makes else -1)
        for value in kernel.reads if not kernel.inner else ():
            readers.setdefault((value, values[made].size), []).append(kernel.op)
    own = dict(needs)
    for (value, _), alike in readers.items():
        for op in alike:
            for other in alike if op in reduced and fusion.root[reduced[op]] != value else ():
                follows = own[op] >> place[other] & 1 if other in place else other < op
                if not follows and not own[other] >> place[op] & 1:
                    needs[op] |= own[other]


def _first_results(graph: Graph) -> tuple[int, ...]:
    none = len(graph.results)
    needed = {value: position for position, value in reversed(list(enumerate(graph.results)))}
    found = [none] * len(graph.walk())
    for op in reversed(graph.walk()):
        found[op.index] = own = min((needed.get(value, none) for value in op.results), default=none)
        for holder in op.holders:
            inner = min(needed.get(value, none) for value in (holder.value, *holder.views)) if is_call(op) else own
            for flow in holder.sources:
                needed[flow.value] = min(needed.get(flow.value, none), inner)
        for value in op.operands if not op.bodies else ():
            needed[value] = min(needed.get(value, none), own)
    return tuple(found)


def sent_together(graph: Graph, sums: Sums, partials: Mapping[int, Step], mesh: tuple[int, ...]) -> list[tuple[int, ...]]:
    """The sums that are sent by one all_reduce each, by their ops in the order in which they are combined.

    Args:
        partials: per op index how its result is combined.
        mesh: the sizes of the mesh's axes.
    """
    ops, values = graph.walk(), graph.values
    of_kind: dict[tuple[tuple[int, ...], str], list[int]] = {}
    for op in sorted(partials.keys() & sums.place.keys(), key=sums.place.__getitem__):
        value, step = values[ops[op].results[0]], partials[op]
        if step.kind == "all_reduce" or (step.kind == "reduce_scatter" and not is_formed(value, step, mesh)):
            of_kind.setdefault((step.axes, value.dtype), []).append(op)
    return [group for alike in of_kind.values() for group in _grouped(sums, partials, alike)]


def _grouped(sums: Sums, partials: Mapping[int, Step], alike: Sequence[int]) -> Iterator[tuple[int, ...]]:
    group: list[int] = []
    members, waits, nbytes = 0, 0, 0.0
    for op in alike:
        if nbytes + partials[op].nbytes > COMBINED_BYTES or waits >> sums.place[op] & 1:
            continue
        if sums.needs[op] & members:
            yield tuple(group)
            group, members, waits, nbytes = [], 0, 0, 0.0
        group.append(op)
        members |= 1 << sums.place[op]
        waits |= sums.needs[op]
        nbytes += partials[op].nbytes
    yield tuple(group)


def is_formed(value: Value, step: Step, mesh: tuple[int, ...]) -> bool:
    """Whether XLA:TPU forms a reduce_scatter: along one dimension, and in whole tiles of 128 lanes and 8 rows.

    Otherwise it makes an all_reduce and slices of it, mostly: 812 of 824 ``all-reduce-scatter`` in 390 programs have such parts,
    whichever dimensions are innermost; ``f32[5120,1280]`` was all_reduced where 4 x 2 devices wanted 1280 x 640 each.
    """
    # evidence: whole tiles are scattered
    local = local_shape(value.shape, step.target, mesh)
    along = {step.target[axis] for axis in step.axes}
    return len(along) == 1 and any(lanes % 128 == 0 and rows % 8 == 0 for lanes, rows in permutations(local, 2))
