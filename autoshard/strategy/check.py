"""Check that a strategy fits a program: equal fingerprints, and layouts and choices that are legal for its ops."""

from __future__ import annotations

from collections.abc import Sequence

from autoshard.errors import StrategyError
from autoshard.ir import Graph, Rule, legal
from autoshard.strategy.record import Record, TensorRecord

SEARCH_AGAIN = "Search again for this program, or give the strategy that was saved for it."


def check_program(record: Record, graph: Graph, rules: Sequence[Rule | None]) -> None:
    """Returns if the record's assignment fits the graph.

    Args:
        record: the strategy.
        graph: the program that it is to be applied to.
        rules: per op index its rule, or None.

    Raises:
        StrategyError: the strategy is for another program, or its layouts or choices do not fit.
    """
    if record.program.fingerprint != graph.fingerprint:
        raise StrategyError(f"a strategy fits the program it was found for: {_difference(record, graph)}. {SEARCH_AGAIN}")
    there, here = (record.program.n_ops, record.program.n_values), (len(graph.walk()), len(graph.values))
    if there != here:
        raise _unfit(record, f"it has {there[0]} ops and {there[1]} values, and the program has {here[0]} and {here[1]}")
    for kind, layouts in (("layout", record.layouts), ("copy", record.copies), ("prefetch", record.ahead)):
        for value, layout in layouts.items():
            if max(layout, default=-1) >= graph.values[value].rank:
                raise _unfit(
                    record, f"the {kind} {list(layout)} of value {value} shards more dimensions than the value's {graph.values[value].rank}"
                )
    for index in record.windows:
        if (op := graph.walk()[index]).primitive != "dot_general":
            raise _unfit(record, f"op {index}, {op.primitive} at {op.origin}, is no matrix product and has a window")
    for index, choice in record.choices.items():
        rule = rules[index]
        if all(factor < 0 for factor, _ in choice):
            continue
        if rule is None or max(factor for factor, _ in choice) >= len(rule.factors) or not legal(rule, choice, record.mesh.sizes):
            op = graph.walk()[index]
            raise _unfit(
                record, f"choice {list(choice)} of op {index}, {op.primitive} at {op.origin}, is illegal on the mesh {record.mesh}"
            )


def _unfit(record: Record, what: str) -> StrategyError:
    return StrategyError(f"strategy {record.name!r} does not fit the program that its fingerprint names: {what}. {SEARCH_AGAIN}")


def _difference(record: Record, graph: Graph) -> str:
    """The first difference between the strategy's program and the graph, in words."""
    found_for = f"{record.name!r} was found for"
    if len(record.arguments) != len(graph.arguments):
        return f"{found_for} a program with {len(record.arguments)} arrays as arguments, and this program has {len(graph.arguments)}"
    for tensor, path, value in zip(record.arguments, graph.argument_paths, graph.arguments, strict=True):
        here = TensorRecord(path, graph.values[value].shape, graph.values[value].dtype, tensor.spec)
        if here != tensor:
            return f"{found_for} {_described(tensor)}, and this program has {_described(here)}"
    return (
        f"{found_for} {record.program.name!r} with {record.program.n_ops} ops, "
        f"and {graph.name!r} has the same arguments but does something else in {len(graph.walk())} ops"
    )


def _described(tensor: TensorRecord) -> str:
    return f"{tensor.path} {tensor.dtype}[{','.join(map(str, tensor.shape))}]"
