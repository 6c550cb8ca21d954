"""Facts of a program on a compiler that no assignment changes: work, fusion, kernel orders, memory traffic."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from autoshard.analysis.demanded_precision import precision_demands
from autoshard.analysis.partial_sums import PartialSums, partial_sums
from autoshard.analysis.stacks import stacks_between_loops
from autoshard.analysis.values import free_values, readers_of
from autoshard.compilers.all_reduce_combiner import sums_of
from autoshard.compilers.base import Compiler, ProgramFacts
from autoshard.compilers.bf16_demotion import single_rows
from autoshard.compilers.fused_program import Fusion
from autoshard.compilers.fusion import fuse
from autoshard.compilers.grouped import expanded_traffic, is_grouped
from autoshard.compilers.op_patterns import Minor, recomputes, row_updates, sliced_alone, stacked
from autoshard.compilers.traffic import Traffic, sent_by_op
from autoshard.cost.compute import op_flops
from autoshard.ir import Graph, Op, Rule
from autoshard.ir.naming import Names
from autoshard.primitives import is_collective, is_loop, is_matrix


def program_facts(graph: Graph, rules: tuple[Rule | None, ...], compiler: Compiler) -> ProgramFacts:
    """The facts of a program; O(n log n) in its size."""
    values = graph.values
    readers = readers_of(graph)
    awaited = _awaited(graph, readers)
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
        unawaited=_unawaited(graph, rules, awaited),
        gradients=frozenset(op.index for op in graph.walk() if is_matrix(op.primitive) and not awaited[op.index]),
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
        stacked=stacked(graph),
        stacks_between_loops=frozenset(stacks_between_loops(graph)),
        sending=tuple(op for op, _ in sending),
        rings=tuple(op for op in graph.walk() if _goes_round(rules[op.index])),
        sorts=tuple(op for op in graph.walk() if op.primitive == "sort"),
        transforms=tuple(op for op in graph.walk() if op.primitive == "fft"),
        grouped=grouped,
    )


def _same_rows(graph: Graph, fusion: Fusion, value: int) -> bool:
    """Whether a value is a view of one whose last dimension is the same."""
    return graph.values[fusion.root[value]].shape[-1:] == graph.values[value].shape[-1:]


def _sent_operands(op: Op, rule: Rule | None) -> list[int]:
    """The operands that shards may send each other parts of."""
    return sorted({send.tensor for factor in rule.factors for send in factor.sends if send.tensor < len(op.operands)}) if rule else []


def _goes_round(rule: Rule | None) -> bool:
    """Whether shards send arrays round."""
    return rule is not None and any(send.kind == "ring" for factor in rule.factors for send in factor.sends)


def _looped_weights(graph: Graph, fusion: Fusion, readers: Sequence[Sequence[int]]) -> dict[int, tuple[int, ...]]:
    """See `ProgramFacts.looped_weights`."""
    ops, arguments, found = graph.walk(), frozenset(graph.arguments), {}
    for op in ops:
        for holder in op.holders if is_loop(op.primitive) else ():
            value, inside = fusion.root[holder.value], readers[holder.value]
            if value in arguments and graph.values[value].rank > 2 and any(ops[reader].primitive == "dot_general" for reader in inside):
                found[value] = (*found.get(value, ()), op.index)
    return found


def _awaited(graph: Graph, readers: Sequence[Sequence[int]]) -> list[bool]:
    """Per op, whether a product or a loop waits for it, itself or through others."""
    ops = graph.walk()
    awaited = [False] * len(ops)
    for op in reversed(ops):
        after = {reader for value in op.results for reader in readers[value]}
        awaited[op.index] = any(awaited[reader] or bool(ops[reader].bodies) or is_matrix(ops[reader].primitive) for reader in after)
    return awaited


def _unawaited(
    graph: Graph, rules: tuple[Rule | None, ...], awaited: Sequence[bool]
) -> tuple[tuple[tuple[Op, ...], tuple[Op, ...]], ...]:
    """See `ProgramFacts.unawaited`."""

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
