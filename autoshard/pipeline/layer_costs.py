"""Costs of a layer and of all else in a step, from solutions of two programs of few layers.

The costs of a step of equal layers on given devices are affine in the number of layers: each layer adds the same seconds and bytes. So
solutions of the step with two small numbers of its own layers (`autoshard.pipeline.plans.Layers`) give those of a stage with any number.

*Memory.* What a microbatch keeps between its forward and its backward pass is held once for each microbatch in flight, all else once. Where
the two passes are programs of their own, on all stages but the last, the second makes its own values beside all that the first handed on
(`autoshard.pipeline.figures`).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields, replace

import numpy as np

from autoshard.analysis.values import usage
from autoshard.compilers.program_facts import ProgramFacts
from autoshard.ir import Body, Op, shards
from autoshard.ir.scan import num_carry, num_consts
from autoshard.judge.evaluate import Judgement
from autoshard.pipeline.figures import made_bytes, spent_seconds
from autoshard.pipeline.loop_tasks import CHEAP
from autoshard.pipeline.micro import loop_of
from autoshard.primitives import primitive
from autoshard.problem import Problem


@dataclass(frozen=True, slots=True)
class Costs:
    """Costs of one device, of a step in microbatches or of a part of it.

    Attributes:
        microbatch_seconds: forward and backward of one microbatch, as predicted.
        computing_seconds: of these what computes, at least.
        objective_seconds: the same without overlap, which searches minimise.
        after_seconds: what runs once a step, as predicted.
        once_seconds: the same without overlap.
        floor_seconds: computing of one microbatch, divided evenly: no sharding takes less.
        state_bytes: arguments, and what the loop over microbatches adds up: weights, optimizer state, gradients.
        kept_bytes: what a microbatch keeps between its forward and its backward pass.
        other_bytes: all other memory at the peak, where one program computes both passes.
        backward_bytes: the most that the backward pass makes for itself at once.
    """

    microbatch_seconds: float
    computing_seconds: float
    objective_seconds: float
    after_seconds: float
    once_seconds: float
    floor_seconds: float
    state_bytes: float
    kept_bytes: float
    other_bytes: float
    backward_bytes: float

    def plus(self, other: Costs, times: float = 1.0) -> Costs:
        """The sum with a multiple of other costs."""
        return Costs(*(getattr(self, f.name) + times * getattr(other, f.name) for f in fields(Costs)))


@dataclass(frozen=True, slots=True)
class LayerCosts:
    """The costs of one layer, and of what is not in layers: embeddings, logits, the loss.

    What a layer adds to the peak is there throughout. What is not in layers is on one stage, but for its `other_bytes` and
    `backward_bytes`: that much memory any stage may need while it works.
    """

    layer: Costs
    ends: Costs

    def of(self, n_layers: float, share: float = 1.0) -> Costs:
        """The costs of some layers and a share of the ends."""
        return Costs(*[0.0] * len(fields(Costs))).plus(self.layer, n_layers).plus(self.ends, share)

    def peak_bytes(self, n_layers: np.ndarray | int, in_flight: int, has_ends: bool) -> np.ndarray | float:
        """The peak of a stage with some layers and microbatches in flight; the one with the ends computes both passes in one program."""
        layer, ends = self.layer, self.ends
        held = n_layers * (layer.state_bytes + in_flight * layer.kept_bytes)
        working = n_layers * layer.other_bytes + ends.other_bytes
        if has_ends:
            return held + working + ends.state_bytes + in_flight * ends.kept_bytes
        return held + np.maximum(working, n_layers * layer.backward_bytes + ends.backward_bytes)


def layer_costs(fewer: Costs, more: Costs, n_fewer: int, n_more: int) -> LayerCosts:
    """The costs of a layer, from those of a program with ``n_fewer`` layers and of one with ``n_more``; none is negative.

    A layer takes as long as it computes at least: one more may hide communication of what is not in layers, and many cannot.
    """
    layer = _not_negative(Costs(*[0.0] * len(fields(Costs))).plus(more.plus(fewer, -1.0), 1 / (n_more - n_fewer)))
    layer = replace(layer, microbatch_seconds=max(layer.microbatch_seconds, layer.computing_seconds))
    return LayerCosts(layer, _not_negative(fewer.plus(layer, -n_fewer)))


def _not_negative(costs: Costs) -> Costs:
    return Costs(*(max(getattr(costs, f.name), 0.0) for f in fields(Costs)))


def costs_of(problem: Problem, judgement: Judgement, n_microbatches: int) -> Costs:
    """The costs of an assignment of a step that loops over microbatches."""
    cost, facts, layout = judgement.cost, problem.facts, judgement.assignment.layout
    loop = _loop(facts, n_microbatches)
    after = once = 0.0
    sums: Iterable[int] = ()
    if loop is not None:
        inside = dict.fromkeys((op.index for op in loop.walk()), "microbatches")
        after, once = spent_seconds(facts, problem.model, judgement, inside).get("", (0.0, 0.0))
        sums = loop.results[: num_carry(loop.params)]

    def nbytes(values: Iterable[int]) -> float:
        own = ((value, facts.graph.values[value]) for value in values)
        return sum(each.nbytes / shards(layout(value), problem.mesh.sizes) for value, each in own if not each.on_host)

    state, (kept, backward) = nbytes((*facts.graph.arguments, *sums)), (0.0, 0.0)
    if loop is not None:
        (turn, values), starts = _turn(facts, loop), facts.lifetimes.starts
        later = {op.index for op in loop.walk() if starts[op.index] > turn}
        kept, backward = nbytes(values), made_bytes(facts, judgement, loop, later)
    return Costs(
        microbatch_seconds=max(cost.makespan_seconds - after, 0.0) / n_microbatches,
        computing_seconds=max(cost.compute_seconds - after, 0.0) / n_microbatches,
        objective_seconds=max(cost.objective_seconds - once, 0.0) / n_microbatches,
        after_seconds=after,
        once_seconds=once,
        floor_seconds=0.0 if loop is None else _floor(problem, loop) / n_microbatches,
        state_bytes=state,
        kept_bytes=kept,
        other_bytes=max(cost.peak_bytes - state - kept, 0.0),
        backward_bytes=backward,
    )


def _floor(problem: Problem, loop: Op) -> float:
    """Seconds of the ops of a loop, each divided evenly over all devices, and nothing communicated."""
    facts, least, total = problem.facts, dict[int, float](), 0.0
    for op in loop.walk():
        if op is loop or all(facts.free[value] for value in op.results):
            continue
        alike = facts.alike[op.index]
        if alike not in least:
            least[alike] = problem.model.least_op_seconds(facts, op)
        total += op.trips * least[alike]
    return total


def kept_values(facts: ProgramFacts, loop: Op | None) -> frozenset[int]:
    """What one microbatch keeps between its forward and its backward pass."""
    return frozenset() if loop is None else _turn(facts, loop)[1]


def _turn(facts: ProgramFacts, loop: Op) -> tuple[int, frozenset[int]]:
    """The moment at which one microbatch has most, unsharded, and the values that it has: those are what its backward pass reads.

    Left out is what it makes cheaply of what all microbatches share, such as casts of weights, and what is only added up: gradients.
    """
    body, shared = loop.bodies[0], {*facts.graph.literals, *facts.graph.constants}
    shared.update(body.inputs[: num_consts(loop.params)])
    made: set[int] = set()
    for op in body.ops:
        if primitive(op.primitive).kind in CHEAP and shared.issuperset(op.operands):
            shared.update(op.results)
        else:
            made.update(op.results)
    made -= _added_up(body)
    times = facts.lifetimes
    own = np.array([value in made and not passed for value, passed in zip(times.values, times.passed, strict=True)])
    of = [facts.graph.values[value] for value in times.values]
    sizes = [each.nbytes if is_own and not each.on_host else 0.0 for each, is_own in zip(of, own, strict=True)]
    turn = int(np.argmax(usage(times.moments, sizes, times.born, times.dies)))
    return turn, frozenset(times.values[k] for k in np.flatnonzero(own & (times.born <= turn) & (turn < times.dies)))


def _added_up(body: Body) -> set[int]:
    """The values of a loop's body of which nothing but its results is made, and that cheaply."""
    found: set[int] = set(body.outputs)
    for op in reversed(body.ops):
        if primitive(op.primitive).kind in CHEAP and found.issuperset(op.results):
            found.update(op.operands)
    for op in reversed(body.ops):
        if not (primitive(op.primitive).kind in CHEAP and found.issuperset(op.results)):
            found.difference_update(op.operands)
    return found


def _loop(facts: ProgramFacts, n_microbatches: int) -> Op | None:
    """The loop over microbatches; None for one microbatch."""
    return loop_of(facts.graph, facts.rules, n_microbatches) if n_microbatches > 1 else None
