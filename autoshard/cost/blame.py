"""Why a collective is there, in words: which tensor moves, and which choice asks for it."""

from __future__ import annotations

from collections.abc import Iterable

from autoshard.cost.profile import Profile
from autoshard.cost.reshard import Step
from autoshard.ir import Assignment, Choice, Layout, Op, factor_names, layout_to_spec
from autoshard.primitives import is_matrix

PARTIAL = {"sum": "partial sums", "prod": "partial products", "max": "partial maxima", "min": "partial minima"}


class Blame:
    """The words for one assignment's collectives."""

    def __init__(self, profile: Profile, assignment: Assignment):
        self._rules = profile.rules
        self._values = profile.graph.values
        self._axes = assignment.mesh.names
        self._names = profile.names

    def tensor(self, value: int) -> str:
        """``state['params']['w'] float32[8,16]``."""
        return self._names.tensor(value)

    def read(self, value: int, before: Layout, after: Layout, reader: str) -> str:
        """``kept as P('data', None), read whole: dot_general splits j=64 over 'model'``; ``reader`` is what comes last."""
        return f"kept {self._layout(value, before)}, read {self._layout(value, after)}: {reader}"

    def splits(self, op: Op, choice: Choice, axes: Iterable[int]) -> str:
        """``dot_general splits contracted k=64 over 'data' and nothing over 'model'``."""
        rule = self._rules[op.index]
        if rule is None:
            return f"{op.primitive} has no rule by which to split it"
        over: dict[int, list[str]] = {}
        for axis in axes:
            over.setdefault(choice[axis][0], []).append(repr(self._axes[axis]))
        letters = factor_names(rule)

        def factor(number: int) -> str:
            if number < 0:
                return "nothing"
            reduced = ("contracted " if is_matrix(op.primitive) else "reduced ") if rule.factors[number].kind == "reduction" else ""
            return f"{reduced}{letters[number]}={rule.factors[number].size}"

        return f"{op.primitive} splits " + " and ".join(f"{factor(number)} over {', '.join(names)}" for number, names in over.items())

    def combined(self, op: Op, choice: Choice, step: Step) -> str:
        """``dot_general splits contracted k=64 over 'data': partial sums, each device keeps its slice of dim 0``."""
        rule = self._rules[op.index]
        assert rule is not None
        operator = next((rule.factors[choice[axis][0]].operator for axis in step.axes if choice[axis][0] >= 0), None) or "sum"
        left = "combined on every device"
        if step.kind == "reduce_scatter":
            dims = sorted({dim for axis, dim in enumerate(step.target) if axis in step.axes and dim >= 0})
            left = f"each device keeps its slice of dim {', '.join(map(str, dims))}"
        return f"{self.splits(op, choice, step.axes)}: {PARTIAL.get(operator, 'partial results')}, {left}"

    def exchanged(self, op: Op, choice: Choice, step: Step) -> str:
        """``cumsum splits i=64 over 'data', and needs what the other shards have``."""
        return f"{self.splits(op, choice, step.axes)}, and needs what the other shards have"

    def _layout(self, value: int, layout: Layout) -> str:
        if all(dim < 0 for dim in layout):
            return "whole"
        return f"as P({', '.join(map(repr, layout_to_spec(layout, self._axes, self._values[value].rank)))})"
