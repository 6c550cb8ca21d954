"""Peak memory of one device: what is alive in program order.

A value is alive from the op that makes it to its last reader; arguments that are not donated stay to the end. The body of
a loop adds its own peak to what is alive around it. Copies live from their first to their last reader.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from autoshard.cost.profile import Profile
from autoshard.ir import Layout, Op


@dataclass(frozen=True, slots=True)
class Peak:
    """The largest number of bytes alive at once on a device, and the values that are alive then."""

    nbytes: float
    alive: tuple[int, ...]


def peak_memory(
    profile: Profile,
    local_bytes: Callable[[int], float],
    extra: Mapping[int, Iterable[tuple[int, Layout, float]]],
) -> Peak:
    """The peak of a program.

    Args:
        local_bytes: bytes a device holds of a value, by its number.
        extra: per op index, the resharded copies it is the first to read: ``(value, layout, bytes)``.
    """
    return _Liveness(profile, local_bytes, extra).peak


class _Liveness:
    def __init__(
        self,
        profile: Profile,
        local_bytes: Callable[[int], float],
        extra: Mapping[int, Iterable[tuple[int, Layout, float]]],
    ):
        self.profile = profile
        self.local_bytes = local_bytes
        self.extra = extra
        graph = profile.graph
        self.last = self._last_reads()
        donated = {graph.arguments[position] for position in graph.donated}
        self.total = 0.0
        self.moment = self.moment_of_peak = 0
        self.alive: dict[int, float] = {}
        self.born: dict[int, int] = {}
        self.died: dict[int, int] = {}
        self.copies: dict[int, dict[Layout, float]] = {}
        kept = set()
        for value in (*graph.arguments, *graph.constants):
            self._add(value)
            if value not in donated:
                kept.add(profile.root[value])
        self.kept = kept
        self.highest = self.total
        self._run(graph.ops)
        alive = (root for root, born in self.born.items() if born <= self.moment_of_peak < self.died.get(root, self.moment + 1))
        self.peak = Peak(self.highest, tuple(alive))

    def _last_reads(self) -> list[int]:
        """Per root value the last op that needs it; results are needed to the end."""
        profile, graph = self.profile, self.profile.graph
        last = [-1] * len(graph.values)
        for op in graph.walk():
            end = _end(op)
            for value in (*op.operands, *(flow.value for holder in op.holders for flow in holder.sources if not flow.inside)):
                last[profile.root[value]] = max(last[profile.root[value]], end if op.bodies else op.index)
            for body in op.bodies:
                for value in body.outputs:
                    last[profile.root[value]] = max(last[profile.root[value]], end)
        for value in graph.results:
            last[profile.root[value]] = len(graph.walk())
        return last

    def _add(self, value: int) -> None:
        root = self.profile.root[value]
        if root not in self.alive and self.profile.materialised[root]:
            self.alive[root] = self.local_bytes(root)
            self.born[root] = self.moment
            self.total += self.alive[root]

    def _run(self, ops: Iterable[Op]) -> None:
        for op in ops:
            self.moment += 1
            made = list(op.results)
            for body in op.bodies:
                made.extend(body.inputs)
            for value in made:
                self._add(value)
            for value, layout, nbytes in self.extra.get(op.index, ()):
                if layout not in self.copies.setdefault(value, {}):
                    self.copies[value][layout] = nbytes
                    self.total += nbytes
            if self.total > self.highest:
                self.highest, self.moment_of_peak = self.total, self.moment
            for body in op.bodies:
                self._run(body.ops)
            self._drop(op)

    def _drop(self, op: Op) -> None:
        end = _end(op)
        touched = [*op.operands, *op.results]
        for body in op.bodies:
            touched.extend((*body.inputs, *body.outputs))
        for value in touched:
            root = self.profile.root[value]
            if root in self.alive and root not in self.kept and self.last[root] <= end:
                self.total -= self.alive.pop(root)
                self.died[root] = self.moment
        for value in touched:
            if value in self.copies and self.last[self.profile.root[value]] <= end:
                self.total -= sum(self.copies.pop(value).values())


def _end(op: Op) -> int:
    """The index of the last op inside an op, bodies included."""
    while op.bodies:
        inner = [body.ops[-1] for body in op.bodies if body.ops]
        if not inner:
            break
        op = max(inner, key=lambda o: o.index)
    return op.index
