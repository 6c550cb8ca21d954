"""The judge: what an assignment costs, walked op by op in program order, without any search table.

*Objective.* The sum of all compute and all collectives of a step, one after the other: additive, which is what searchers
minimise and bound. *Makespan.* The end of a schedule with one compute stream in program order and one communication stream: a
collective starts when its input is there, and only its reader waits for it; where the cluster cannot overlap, the two
are one stream. A value is resharded once for each distinct layout it is read in.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from autoshard.cost.blame import Blame
from autoshard.cost.compute import is_matrix
from autoshard.cost.memory import Peak, peak_memory
from autoshard.cost.model import CostModel
from autoshard.cost.profile import Profile
from autoshard.cost.record import Cost
from autoshard.cost.reshard import Step
from autoshard.ir import Assignment, Collective, Layout, Op, operand_layout, served_from, shards, shift_layout

Cause = Callable[[Step], str]
"""Why a step is there, in words."""


@dataclass(frozen=True, slots=True, eq=False)
class Judgement:
    """A cost, with the memory peak's values and every reshard by the op that first needs it."""

    cost: Cost
    peak: Peak


def evaluate(profile: Profile, model: CostModel, assignment: Assignment) -> Judgement:
    """The cost of an assignment; linear in the program's size."""
    return _Judge(profile, model, assignment).judgement()


class _Judge:
    def __init__(self, profile: Profile, model: CostModel, assignment: Assignment):
        self.profile = profile
        self.graph = profile.graph
        self.model = model
        self.assignment = assignment
        self.sizes = model.mesh.sizes
        self.names = model.mesh.names
        self.overlap = model.cluster.overlap
        self.compute = self.communication = self.flops = 0.0
        self.compute_free = self.link_free = 0.0
        self.ready: dict[int, float] = {}
        self.made: dict[tuple[int, Layout], float] = {}
        self.extra: dict[int, list[tuple[int, Layout, float]]] = {}
        self.collectives: list[Collective] = []
        self.blame = Blame(profile, assignment)

    def judgement(self) -> Judgement:
        self._run(self.graph.ops)
        end = len(self.graph.walk())
        for result, argument in self.graph.aliases:
            value = self.graph.results[result]
            if self.profile.free[value]:
                continue
            target = self.assignment.layout(self.graph.arguments[argument])
            kept = f"the new {self.graph.argument_paths[argument]} lies where the old one does"
            self._read(value, target, end, 1, self.graph.result_paths[result], lambda _, kept=kept: kept)
        finish = max(self.compute_free, self.link_free, *self.made.values(), *self.ready.values(), 0.0)
        peak = peak_memory(self.profile, self._local_bytes, self.extra)
        cost = Cost(
            objective_seconds=self.compute + self.communication,
            makespan_seconds=finish,
            compute_seconds=self.compute,
            communication_seconds=self.communication,
            exposed_communication_seconds=max(finish - self.compute, 0.0),
            peak_bytes=peak.nbytes,
            flops=self.flops,
            collectives=tuple(self.collectives),
        )
        return Judgement(cost, peak)

    def _local_bytes(self, value: int) -> float:
        return self.graph.values[value].nbytes / shards(self.assignment.layout(value), self.sizes)

    def _run(self, ops: Iterable[Op]) -> None:
        for op in ops:
            if op.bodies:
                self._control_flow(op)
            else:
                self._op(op)

    def _control_flow(self, op: Op) -> None:
        """Sources are read in their holders' layouts: once before the bodies, or once a trip inside them."""
        made_inside = {value for body in op.bodies for value in body.outputs}
        for inside in (False, True):
            if inside:
                for body in op.bodies:
                    for value in body.inputs:
                        self.ready[value] = self.compute_free
                    self._run(body.ops)
            for holder in op.holders:
                layout = self.assignment.layout(holder.value)
                for flow in holder.sources:
                    if self.profile.free[flow.value] or self.graph.values[flow.value].rank == 0:
                        continue
                    if inside != (flow.inside or flow.value in made_inside):
                        continue
                    target = shift_layout(layout, flow.shift)
                    assert target is not None, "a stacked result keeps its leading dimension whole"
                    kept = f"the body of {op.primitive} has it so"
                    trips = op.flow_trips(flow)
                    done = self._read(flow.value, target, op.index, trips, f"{op.primitive} {op.origin}", lambda _, kept=kept: kept)
                    self.compute_free = max(self.compute_free, done)
        for result in op.results:
            self.ready[result] = max(self.compute_free, self.ready.get(result, 0.0))

    def _op(self, op: Op) -> None:
        rule = self.profile.rules[op.index]
        choice = self.assignment.choice(op.index)
        if rule is not None and all(self.profile.free[value] for value in op.results) and op.results:
            return
        start = self.compute_free
        source = f"{op.primitive} {op.origin}"
        for position, value in enumerate(op.operands):
            if self.profile.free[value] or self.graph.values[value].rank == 0:
                start = max(start, self.ready.get(value, 0.0))
                continue
            target = (-1,) * len(self.sizes) if rule is None else operand_layout(rule, choice, position)
            done = self._read(value, target, op.index, op.trips, source, lambda step: self.blame.splits(op, choice, step.axes))
            start = max(start, done)
        exchange = self.model.exchange_path(self.profile, op, choice)
        start = self._communicate(exchange, start, op.trips, source, op.operands[:1], lambda step: self.blame.exchanged(op, choice, step))
        seconds = op.trips * self.model.op_seconds(self.profile, op, choice)
        if is_matrix(op.primitive):
            self.flops += op.trips * self.model.op_flops(self.profile, op, choice)
        self.compute += seconds
        self.compute_free = start + seconds if seconds else self.compute_free
        done = start + seconds
        for k, value in enumerate(op.results):
            combination = self.model.reduction_path(self.profile, op, choice, k)
            self.ready[value] = self._communicate(
                combination, done, op.trips, source, (value,), lambda step: self.blame.combined(op, choice, step)
            )

    def _read(self, value: int, target: Layout, op: int, trips: int, source: str, reason: Cause) -> float:
        """When the value is there in the target layout, resharding it if nobody has yet."""
        values = self.graph.values
        done = self.ready.get(value, 0.0)
        own, copy = self.assignment.layout(value), self.assignment.copies.get(value)
        served = served_from(own, copy, target, lambda a, b: sum(step.seconds for step in self.model.reshard_path(values[value], a, b)))
        hops = dict.fromkeys((own, served, target))
        for previous, layout in pairwise(hops):
            if (value, layout) not in self.made:
                path = self.model.reshard_path(values[value], previous, layout)
                self.made[value, layout] = self._communicate(
                    path,
                    done,
                    trips,
                    source,
                    (value,),
                    lambda step, ends=(previous, layout): self.blame.read(value, *ends, reason(step)),
                )
                if any(step.kind != "slice" for step in path):
                    self.extra.setdefault(op, []).append((value, layout, values[value].nbytes / shards(layout, self.sizes)))
            done = self.made[value, layout]
        return done

    def _communicate(self, path: Iterable[Step], ready: float, trips: int, source: str, moved: Sequence[int], cause: Cause) -> float:
        for step in path:
            if step.kind == "slice" or not step.nbytes:
                continue
            seconds = step.seconds * trips
            self.communication += seconds
            axes = tuple(self.names[axis] for axis in step.axes)
            tensor = ", ".join(map(self.blame.tensor, moved))
            self.collectives.append(Collective(step.kind, axes, step.nbytes, trips, source, tensor, step.seconds, cause(step)))
            if self.overlap:
                ready = max(ready, self.link_free) + seconds
                self.link_free = ready
            else:
                ready = max(ready, self.compute_free) + seconds
                self.compute_free = ready
        return ready
