"""Facts of a program on a compiler that no assignment changes: work, fusion, kernel orders, memory traffic."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from autoshard.analysis.demanded_precision import Demands, precision_demands
from autoshard.analysis.partial_sums import PartialSums, partial_sums
from autoshard.analysis.values import free_values, readers_of
from autoshard.compilers.all_reduce_combiner import Sums, sums_of
from autoshard.compilers.bf16_demotion import single_rows
from autoshard.compilers.corrections import NO_CORRECTIONS, Corrections
from autoshard.compilers.fused_program import Fusion
from autoshard.compilers.fusion import fuse
from autoshard.compilers.grouped import Grouped, expanded_traffic, is_grouped
from autoshard.compilers.kernel_order import Lifetimes, Orders
from autoshard.compilers.op_patterns import Minor, recomputes, row_updates, sliced_alone
from autoshard.compilers.traffic import Traffic, sent_by_op
from autoshard.cost.compute import op_flops
from autoshard.ir import Graph, Op, Rule
from autoshard.ir.naming import Names
from autoshard.primitives import is_collective, is_loop, is_matrix

if TYPE_CHECKING:
    from autoshard.compilers.base import Compiler


@dataclass(frozen=True, slots=True, eq=False)
class ProgramFacts:
    """Facts of a program that no assignment changes.

    Attributes:
        graph, rules: the program.
        compiler: whose fusions, orders and traffic these are.
        names: what its values are called.
        flops: per op index, the floating point operations of one execution, unsharded.
        free: per value, whether it is made of constants alone (the partitioner recomputes those wherever they are read).
        fusion: which values are stored, and the kernels that make them.
        orders: the lives of their buffers, in each of the orders that the compiler may take.
        recomputes: whether something is computed again between barriers (``jax.checkpoint``).
        traffic: per op index, the bytes that it moves to and from memory.
        readers: per value, the op indices that read it (control flow reads the values that it hands to its bodies).
        unawaited: per body that has any, the reductions that no product or loop waits for, itself or through others; and its products.
        makers: per value, the index of the op that makes it; None where none does.
        wanted: per value, whether an op reads it or the program returns it.
        portable: per value, whether reading it in another layout stores nothing more: it is stored anyway, or computed from smaller values
            wherever it is read.
        settled: per value, whether its layout does not matter: it is free, or a scalar.
        idle: per op index, whether it has a rule and all its results are free, so that it does not run.
        alike: per op index, a number that ops share whose costs are equal under every choice.
        sums: the partial sums that are only added up.
        demands: the precision that is demanded of values.
        single_rows: the values that are exchanged in float32 beside gathered ones that are not sent, with those.
        combined: the sums, in the order in which they are combined.
        table_lookups, lookups: the gathers of arguments' elements, and of those of computed values in memory.
        looped_weights: the arguments of three dimensions or more that products in loops read as they are handed in, each with the loops.
        added_to: the scatters that add to values in memory.
        row_updates: of those, where a scatter shares an array with what it updates, the arguments that it does.
        sliced_alone: the arrays in memory whose slices only loops without products read or stack.
        sending: the ops whose shards may send each other parts of their operands.
        sorts: the sorts.
        grouped: per op index, what the compiler makes of grouped products.
        corrections: of predicted kernels, by what the compiler made of such kernels before.
    """

    graph: Graph
    rules: tuple[Rule | None, ...]
    compiler: Compiler
    names: Names
    flops: tuple[float, ...]
    free: tuple[bool, ...]
    fusion: Fusion
    orders: Orders
    recomputes: bool
    traffic: tuple[Traffic, ...]
    readers: tuple[tuple[int, ...], ...]
    unawaited: tuple[tuple[tuple[Op, ...], tuple[Op, ...]], ...]
    makers: tuple[int | None, ...]
    wanted: tuple[bool, ...]
    portable: tuple[bool, ...]
    settled: tuple[bool, ...]
    idle: tuple[bool, ...]
    alike: tuple[int, ...]
    sums: PartialSums
    demands: Demands
    single_rows: dict[int, frozenset[int]]
    combined: Sums
    table_lookups: tuple[Op, ...]
    lookups: tuple[Op, ...]
    looped_weights: dict[int, tuple[int, ...]]
    added_to: tuple[Op, ...]
    row_updates: dict[int, tuple[int, ...]]
    sliced_alone: frozenset[int]
    sending: tuple[Op, ...]
    sorts: tuple[Op, ...]
    grouped: dict[int, Grouped]
    corrections: Corrections = NO_CORRECTIONS

    @property
    def materialised(self) -> tuple[bool, ...]:
        """Per value, whether it is in memory, stored or as a view of a stored one."""
        return self.fusion.materialised

    @property
    def lifetimes(self) -> Lifetimes:
        """The lives of buffers in the order of kernels whose unsharded peak is lowest."""
        return self.orders.best

    def in_order(self, times: Lifetimes) -> ProgramFacts:
        """The same program with its kernels in another order."""
        return replace(self, orders=replace(self.orders, best=times))

    def corrected(self, corrections: Corrections) -> ProgramFacts:
        """The same program with other corrections."""
        return self if corrections is self.corrections else replace(self, corrections=corrections)


def program_facts(graph: Graph, rules: tuple[Rule | None, ...], compiler: Compiler) -> ProgramFacts:
    """The facts of a program; O(n log n) in its size."""
    values = graph.values
    readers = readers_of(graph)
    returned = frozenset(graph.results)
    free = tuple(free_values(graph))
    demands = precision_demands(graph)
    fusion = fuse(graph, free, demands, compiler.fusion_rules)
    grouped = {op.index: compiler.grouped(op, values) for op in graph.walk() if is_grouped(op)}
    work = (op_flops(op, rules[op.index], values) for op in graph.walk())
    flops = tuple(found * (grouped[index].done if index in grouped else 1.0) for index, found in enumerate(work))
    sums = partial_sums(graph, readers)
    sending = [(op, positions) for op in graph.walk() if (positions := _sent_operands(op, rules[op.index]))]
    sent = sent_by_op(graph, fusion, sending, compiler.wide_bytes)
    moved = list(compiler.traffic(graph, fusion))
    for index, each in grouped.items():
        moved[index] = replace(moved[index], passes=(*moved[index].passes, *expanded_traffic(graph.walk()[index], each, values)))
    traffic = tuple(replace(one, sent=sent[index]) if index in sent else one for index, one in enumerate(moved))
    makers = {value: op.index for op in graph.walk() for value in op.results}
    arguments, gathers = frozenset(graph.arguments), [op for op in graph.walk() if op.primitive == "gather"]
    wanted = tuple(bool(found) or value in returned for value, found in enumerate(readers))
    return ProgramFacts(
        graph=graph,
        rules=rules,
        compiler=compiler,
        names=Names(graph),
        flops=flops,
        free=free,
        fusion=fusion,
        orders=compiler.orders(graph, fusion),
        recomputes=any(map(recomputes, graph.walk())),
        traffic=traffic,
        readers=tuple(map(tuple, readers)),
        unawaited=_unawaited(graph, rules, readers),
        makers=tuple(map(makers.get, range(len(values)))),
        wanted=wanted,
        portable=_portable(graph, free, fusion.materialised),
        settled=tuple(free[value] or not values[value].shape for value in range(len(values))),
        idle=tuple(rules[op.index] is not None and len(op.results) > 0 and all(free[value] for value in op.results) for op in graph.walk()),
        alike=_alike(graph, rules, flops, traffic, fusion.minor, wanted, sums),
        sums=sums,
        demands=demands,
        single_rows=single_rows(graph),
        combined=sums_of(graph, fusion),
        table_lookups=tuple(op for op in gathers if op.operands[0] in arguments),
        lookups=tuple(op for op in gathers if op.operands[0] not in arguments and fusion.materialised[op.operands[0]]),
        looped_weights=_looped_weights(graph, fusion, readers),
        added_to=tuple(op for op in graph.walk() if op.primitive == "scatter-add" and fusion.stored[fusion.root[op.results[0]]]),
        row_updates=row_updates(graph),
        sliced_alone=frozenset(fusion.root[value] for value in sliced_alone(graph) if _same_rows(graph, fusion, value)),
        sending=tuple(op for op, _ in sending),
        sorts=tuple(op for op in graph.walk() if op.primitive == "sort"),
        grouped=grouped,
    )


def _same_rows(graph: Graph, fusion: Fusion, value: int) -> bool:
    """Whether a value is a view of one whose last dimension is the same."""
    return graph.values[fusion.root[value]].shape[-1:] == graph.values[value].shape[-1:]


def _sent_operands(op: Op, rule: Rule | None) -> list[int]:
    """The operands that shards may send each other parts of."""
    return sorted({send.tensor for factor in rule.factors for send in factor.sends if send.tensor < len(op.operands)}) if rule else []


def _looped_weights(graph: Graph, fusion: Fusion, readers: Sequence[Sequence[int]]) -> dict[int, tuple[int, ...]]:
    """See `ProgramFacts.looped_weights`."""
    ops, arguments, found = graph.walk(), frozenset(graph.arguments), {}
    for op in ops:
        for holder in op.holders if is_loop(op.primitive) else ():
            value, inside = fusion.root[holder.value], readers[holder.value]
            if value in arguments and graph.values[value].rank > 2 and any(ops[reader].primitive == "dot_general" for reader in inside):
                found[value] = (*found.get(value, ()), op.index)
    return found


def _unawaited(
    graph: Graph, rules: tuple[Rule | None, ...], readers: Sequence[Sequence[int]]
) -> tuple[tuple[tuple[Op, ...], tuple[Op, ...]], ...]:
    """See `ProgramFacts.unawaited`."""
    ops = graph.walk()
    awaited = [False] * len(ops)
    for op in reversed(ops):
        after = {reader for value in op.results for reader in readers[value]}
        awaited[op.index] = any(awaited[reader] or bool(ops[reader].bodies) or is_matrix(ops[reader].primitive) for reader in after)

    def of(body: tuple[Op, ...]) -> Iterator[tuple[tuple[Op, ...], tuple[Op, ...]]]:
        products = tuple(op for op in body if is_matrix(op.primitive))
        sums = tuple(op for op in body if not (is_matrix(op.primitive) or awaited[op.index]) and _reduces(rules[op.index]))
        if sums:
            yield sums, products
        for op in body:
            for inner in op.bodies:
                yield from of(inner.ops)

    return tuple(of(graph.ops))


def _reduces(rule: Rule | None) -> bool:
    """Whether an op has something to sum over."""
    return rule is not None and any(factor.kind == "reduction" for factor in rule.factors)


def _portable(graph: Graph, free: tuple[bool, ...], materialised: tuple[bool, ...]) -> tuple[bool, ...]:
    """Per value whether it is in memory, or computed from values of at most half its size, directly or through others like itself."""
    made = {value for op in graph.walk() for value in op.results}
    found = [held or value not in made for value, held in enumerate(materialised)]  # a loop's inputs are made outside
    for op in graph.walk():
        if op.bodies:
            continue
        for value in op.results:
            large = (v for v in op.operands if not free[v] and 2 * graph.values[v].size > graph.values[value].size)
            if not found[value] and all(found[v] and not materialised[v] for v in large):
                found[value] = True
    return tuple(found)


def _alike(
    graph: Graph,
    rules: tuple[Rule | None, ...],
    flops: tuple[float, ...],
    traffic: tuple[Traffic, ...],
    minor: tuple[Minor | None, ...],
    wanted: tuple[bool, ...],
    sums: PartialSums,
) -> tuple[int, ...]:
    """Per op a number that ops of equal costs share; rules of equal ops are one object, so identity will do for them."""
    tensors = [(value.shape, value.dtype, inner, read) for value, inner, read in zip(graph.values, minor, wanted, strict=True)]
    numbers: dict[tuple, int] = {}

    def number(op: Op) -> int:
        operands, results = (tuple(tensors[value] for value in group) for group in (op.operands, op.results))
        added = sums.accumulated[op.index], sums.widened[op.index]
        if is_collective(op.primitive):  # what of it is sent depends on what it reads, and for whom
            return numbers.setdefault((op.index,), len(numbers))
        key = op.primitive, id(rules[op.index]), flops[op.index], traffic[op.index], added, operands, results
        return numbers.setdefault(key, len(numbers))

    return tuple(map(number, graph.walk()))
