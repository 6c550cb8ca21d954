"""The reasons for collectives, as data: which value moves, and for which choice."""

from __future__ import annotations

from collections.abc import Iterable

from autoshard.compilers.program_facts import ProgramFacts
from autoshard.cost.reshard import Step
from autoshard.ir import (
    Assignment,
    Choice,
    Layout,
    MovedValue,
    Op,
    Origin,
    Reason,
    Rule,
    ServedOp,
    Spec,
    Split,
    factor_name,
    layout_to_spec,
)
from autoshard.primitives import is_matrix


class Blame:
    """The reasons of one assignment's collectives; `autoshard.ir.words` puts them in words."""

    def __init__(self, facts: ProgramFacts, assignment: Assignment):
        self._rules = facts.rules
        self._values = facts.graph.values
        self._axes = assignment.mesh.names
        self._names = facts.names
        self._specs: dict[tuple[Layout, int], Spec] = {}

    def moved(self, value: int) -> MovedValue:
        """The value as people know it."""
        return self._names.moved(value)

    def served(self, source: Op | str) -> ServedOp:
        """The op, or the result of that path, as people know it."""
        if isinstance(source, str):
            return ServedOp(name=source)
        origin = source.origin
        return ServedOp(source.primitive, source.index, Origin(origin.file, origin.line, origin.function))

    def read(self, value: int, before: Layout, after: Layout, reader: Reason) -> Reason:
        """A value is kept in one layout and read in another one, for the reader's reason."""
        return Reason(reader.kind, self._spec(value, before), self._spec(value, after), reader.splits, argument=reader.argument)

    def splits(self, op: Op, choice: Choice, step: Step) -> Reason:
        """An op reads its operands as its splits over the step's axes want them."""
        rule = self._rules[op.index]
        return Reason("unruled") if rule is None else Reason("read", splits=_splits(rule, op, choice, step.axes))

    def combined(self, op: Op, choice: Choice, step: Step) -> Reason:
        """An op splits a dimension that it reduces: each device has partial results, and keeps all of them combined or a slice."""
        rule = self._rules[op.index]
        assert rule is not None
        operator = next((rule.factors[choice[axis][0]].operator for axis in step.axes if choice[axis][0] >= 0), None) or "sum"
        scatters = step.kind == "reduce_scatter"
        dims = sorted({dim for axis, dim in enumerate(step.target) if axis in step.axes and dim >= 0}) if scatters else ()
        return Reason("combined", splits=_splits(rule, op, choice, step.axes), operator=operator, dims=tuple(dims))

    def exchanged(self, op: Op, choice: Choice, step: Step) -> Reason:
        """An op splits a dimension along which its shards need elements of other shards."""
        if op.mapped:
            return Reason("written")
        rule = self._rules[op.index]
        assert rule is not None
        return Reason("exchanged", splits=_splits(rule, op, choice, step.axes))

    def _spec(self, value: int, layout: Layout) -> Spec:
        """The spec of a layout; empty where the value is whole."""
        key = layout, self._values[value].rank
        if key not in self._specs:
            self._specs[key] = layout_to_spec(layout, self._axes, key[1]) if any(dim >= 0 for dim in layout) else ()
        return self._specs[key]


def _splits(rule: Rule, op: Op, choice: Choice, axes: Iterable[int]) -> tuple[Split | None, ...]:
    """The dimension that an op splits over each of some axes."""
    return tuple([None if (number := choice[axis][0]) < 0 else _split(rule, op, number) for axis in axes])


def _split(rule: Rule, op: Op, number: int) -> Split:
    factor = rule.factors[number]
    role = "" if factor.kind != "reduction" else "contracted" if is_matrix(op.primitive) else "reduced"
    return Split(factor_name(number), factor.size, role)
