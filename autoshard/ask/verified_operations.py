"""A compiled program beside its prediction, operation by operation: the compute of each, and what each keeps in memory at the peak."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from autoshard.explanation import Judged
from autoshard.ir import Op
from autoshard.plan.corrections import differences
from autoshard.render import Table, format_bytes, format_seconds
from autoshard.verify import NO_OP, Clock, bytes_by_op, compiled_kernels

SHOWN = 8  # rows of a table
LEAST = 0.01  # of the larger sum: smaller differences are not shown


@dataclass(frozen=True, slots=True)
class OperationDifference:
    """One operation, predicted and compiled.

    Attributes:
        kind: ``"compute"``, seconds of a step; or ``"memory"``, bytes that are alive at the fullest moment, each side's own.
        name, line: the primitive, or the path of an argument; and the source line. Empty for what belongs to no operation.
        predicted, compiled: of one device.
    """

    kind: str
    name: str
    line: str
    predicted: float
    compiled: float


def by_operation(judged: Judged, hlo_text: str, alive: Sequence[tuple[str, float]], clock: Clock | None) -> tuple[OperationDifference, ...]:
    """The operations in which a compiled program differs from its prediction, per kind the largest difference first.

    Args:
        judged: the program with its assignment.
        hlo_text: the compiled program of one device.
        alive: the instructions whose values are alive at its peak, with their bytes; () where that is not known.
        clock: of the device; None where the text has no cycles.
    """
    return (*_compute(judged, hlo_text, clock), *(_memory(judged, hlo_text, alive) if alive else ()))


def _compute(judged: Judged, hlo_text: str, clock: Clock | None) -> tuple[OperationDifference, ...]:
    if clock is None:
        return ()
    kernels = compiled_kernels(hlo_text)
    found = differences(judged.facts, judged.model, judged.record.assignment, kernels, clock)
    return _largest(OperationDifference("compute", *_named(each.op), each.predicted_seconds, each.compiled_seconds) for each in found)


def _memory(judged: Judged, hlo_text: str, alive: Sequence[tuple[str, float]]) -> tuple[OperationDifference, ...]:
    graph, peak = judged.facts.graph, judged.judgement.peak
    paths = dict(zip(graph.arguments, graph.argument_paths, strict=True))
    ops, makers = graph.walk(), judged.facts.makers
    predicted, compiled = (defaultdict[tuple[str, str], float](float) for _ in range(2))

    def made(value: int) -> tuple[str, str]:
        maker = makers[value]
        return (paths[value], "") if value in paths else _named(None if maker is None else ops[maker])

    for value, nbytes in (*zip(peak.alive, peak.held, strict=True), *peak.copies):
        predicted[made(value)] += nbytes
    for op, nbytes in peak.partials:
        predicted[_named(ops[op])] += nbytes
    by_op, by_argument = bytes_by_op(hlo_text, alive)
    for op, nbytes in by_op.items():
        compiled[_named(None if op == NO_OP else ops[op])] += nbytes
    for position, nbytes in by_argument.items():
        compiled[(graph.argument_paths[position] if position < len(graph.arguments) else "", "")] += nbytes
    return _largest(OperationDifference("memory", *place, predicted[place], compiled[place]) for place in {**predicted, **compiled})


def _named(op: Op | None) -> tuple[str, str]:
    return ("", "") if op is None else (op.primitive, str(op.origin))


def _largest(found: Iterable[OperationDifference]) -> tuple[OperationDifference, ...]:
    """Those whose difference counts, the largest first."""
    found = [*found]
    least = LEAST * max(sum(each.predicted for each in found), sum(each.compiled for each in found))
    large = (each for each in found if abs(each.compiled - each.predicted) > least)
    return tuple(sorted(large, key=lambda each: -abs(each.compiled - each.predicted)))


def operation_tables(found: Sequence[OperationDifference]) -> list[Table]:
    """The largest differences by operation, a table for each kind that has any."""
    titles: dict[str, tuple[str, Callable[[float], str]]] = {
        "compute": ("compute by operation", format_seconds),
        "memory": ("memory at the peak, by what makes it", format_bytes),
    }
    tables = []
    for kind, (title, written) in titles.items():
        some = [each for each in found if each.kind == kind][:SHOWN]
        rows = tuple(
            (each.name or "others", each.line, written(each.predicted), written(each.compiled), _signed(each, written)) for each in some
        )
        tables += [Table((title, "", ">predicted", ">compiled", ">difference"), rows)] if rows else []
    return tables


def _signed(each: OperationDifference, written: Callable[[float], str]) -> str:
    more = each.compiled - each.predicted
    return f"{'+' if more > 0 else '-'}{written(abs(more))}"
