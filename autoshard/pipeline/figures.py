"""Predicted seconds and bytes of a stage's tasks, from the judgement of its program.

The judge evaluates the stage's whole program: a loop over microbatches, each forward and backward, and what runs once. The seconds of a
microbatch are divided among its forward task, its backward task and the gradients of weights as the operations' own seconds are: computing,
and exposed collectives. So are those of what runs once: the update, and the rest.

*Memory.* The program's peak has one microbatch between its forward and its backward pass, and what is sent and received of all
microbatches. A schedule has as many microbatches there as are in flight, and only theirs of what is received. Where the two passes are
programs of their own, what the first hands on is there until the second ends, beside all that the second makes for itself. Totals are
handed on from task to task, so that they are in the device's own memory throughout, not in a core's.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

import numpy as np

from autoshard.cluster import Cluster
from autoshard.compilers import compiler_of
from autoshard.compilers.kernel_order import usage
from autoshard.compilers.program_facts import ProgramFacts, program_facts
from autoshard.ir import Mesh, Op, shards
from autoshard.ir.scan import num_carry, num_consts
from autoshard.judge.evaluate import Judgement
from autoshard.judge.model import CostModel
from autoshard.pipeline.loop_tasks import CHEAP
from autoshard.pipeline.micro import Micro, loop_of
from autoshard.pipeline.schedule import UPDATE
from autoshard.pipeline.stages import Message, Stage
from autoshard.primitives import primitive
from autoshard.rules import rules_of

FORWARD, BACKWARD, WEIGHTS = "F", "B", "W"


@dataclass(frozen=True, slots=True)
class StageFigures:
    """The predicted costs of a stage under an assignment, of one device.

    Attributes:
        seconds: of one microbatch, per kind of task; of `UPDATE` once a step.
        objective_seconds: the same without overlap.
        after_seconds: what else runs once a step.
        residual_bytes: what a microbatch keeps between its forward and its backward task, what it received included.
        lasting_bytes: what is there throughout: arguments that stay, what is made of them for all microbatches, totals such as gradients.
        working_bytes: the peak with one microbatch, forward and backward in one program.
        backward_bytes: the most that the backward pass makes for itself at once, gradients of activations among it.
        passes_bytes: the same of the forward and the backward pass in one program.
        update_bytes: the same of the update: new state that replaces no donated one among it.
    """

    seconds: Mapping[str, float]
    objective_seconds: Mapping[str, float]
    after_seconds: float
    residual_bytes: float
    lasting_bytes: float
    working_bytes: float
    backward_bytes: float
    passes_bytes: float
    update_bytes: float = 0.0

    def peak_bytes(self, in_flight: int, joins: bool) -> float:
        """The peak where so many microbatches are between their forward and their backward tasks.

        Args:
            joins: whether both tasks are one program (`autoshard.pipeline.tasks.joins_tasks`), which hands on nothing.
        """
        peak = self.working_bytes + max(in_flight - 1, 0) * self.residual_bytes
        return max(peak, self.held_bytes(in_flight, joins) + (self.passes_bytes if joins else self.backward_bytes))

    def own_bytes(self, joins: bool) -> float:
        """What there is beside what lasts and residuals while one of the stage's tasks runs."""
        one = self.working_bytes - self.lasting_bytes - (0.0 if joins else self.residual_bytes)
        return max(one, self.passes_bytes if joins else self.backward_bytes, 0.0)

    def held_bytes(self, in_flight: int, joins: bool) -> float:
        """What is there between the stage's tasks where so many microbatches are in flight, such as while another chunk runs."""
        return self.lasting_bytes + (0.0 if joins else in_flight * self.residual_bytes)


def stage_figures(stage: Stage, loop_level: int, facts: ProgramFacts, model: CostModel, judgement: Judgement) -> StageFigures:
    """The costs of a stage whose program was judged.

    Args:
        loop_level: of its loop (`autoshard.pipeline.stages.Staged`).
        facts: of the stage's program.
        model: of the mesh of the stage's devices.
    """
    n = stage.traced.microbatches
    loop = loop_of(stage.traced.graph, facts.rules, n)
    kinds = task_kinds(stage, loop)
    updates = update_ops(stage, loop, loop_level)
    spent = spent_seconds(facts, model, judgement, kinds | dict.fromkeys(updates, UPDATE))
    seconds, objective_seconds = _of_tasks(spent, judgement.cost.makespan_seconds, n)
    sizes, layout = model.mesh.sizes, judgement.assignment.layout
    values = stage.traced.graph.values

    def nbytes(value: int) -> float:
        return 0.0 if values[value].on_host else values[value].nbytes / shards(layout(value), sizes)

    received = _message_bytes(stage.receives, stage.traced.graph.arguments[len(stage.arguments) :], nbytes, n)
    sent = _message_bytes(stage.sends, stage.traced.graph.results[len(stage.results) :], nbytes, n)
    kept = _kept_bytes(stage, facts, model, judgement, loop, kinds)
    own = stage.traced.graph.arguments[: len(stage.arguments)]
    made = {value for op in stage.traced.graph.ops for value in op.results}.intersection(loop.operands[: num_consts(loop.params)])
    one = received["F"] + received["B"] + sent["F"] + sent["B"]
    return StageFigures(
        seconds=seconds,
        objective_seconds=objective_seconds,
        after_seconds=spent.get("", (0.0, 0.0))[0],
        residual_bytes=kept + received["F"],
        lasting_bytes=sum(map(nbytes, [*own, *made, *loop.results[: num_carry(loop.params)]])),
        working_bytes=max(judgement.cost.peak_bytes - (n - 1) * one, 0.0),
        backward_bytes=made_bytes(facts, judgement, loop, {op for op, kind in kinds.items() if kind != FORWARD}),
        passes_bytes=made_bytes(facts, judgement, loop, kinds),
        update_bytes=made_bytes(facts, judgement, loop, updates),
    )


def _of_tasks(spent: Mapping[str, tuple[float, float]], makespan: float, n: int) -> tuple[dict[str, float], dict[str, float]]:
    """The seconds of each kind of task, with overlap and without: those of a microbatch, and of the update, of a step's makespan."""
    inside = {kind: both for kind, both in spent.items() if kind not in ("", UPDATE)}
    exposed = sum(both[0] for both in inside.values())
    left = max(makespan - sum(spent[kind][0] for kind in ("", UPDATE) if kind in spent), 0.0)
    scale, update = left / n / exposed if exposed else 0.0, spent.get(UPDATE, (0.0, 0.0))
    seconds = {kind: both[0] * scale for kind, both in inside.items()} | {UPDATE: update[0]}
    return seconds, {kind: both[1] / n for kind, both in inside.items()} | {UPDATE: update[1]}


def stage_kinds(stage: Stage) -> dict[int, str]:
    """`task_kinds` of a stage's program."""
    graph = stage.traced.graph
    return task_kinds(stage, loop_of(graph, rules_of(graph), stage.traced.microbatches))


def task_kinds(stage: Stage, loop: Op) -> dict[int, str]:
    """Per op index inside the loop, bodies included, the kind of task that runs it, as `autoshard.pipeline.tasks` divides the program.

    The forward task runs what a result of the forward pass is computed of, the backward task what else is needed for what is sent back, and
    all the rest is for the gradients of weights.
    """
    body, kinds = loop.bodies[0], dict[int, str]()
    n_sent = sum(message.kind == "loop" for message in stage.sends)
    forward = {value for value, first in zip(body.outputs, stage.forward, strict=True) if first}
    sent = set(body.outputs[len(body.outputs) - n_sent :])
    for op in reversed(body.ops):
        if not forward.isdisjoint(op.results):
            kind = FORWARD
            forward.update(op.operands)
        elif not sent.isdisjoint(op.results):
            kind = BACKWARD
            sent.update(op.operands)
        else:
            kind = WEIGHTS
        kinds.update((inner.index, kind) for inner in op.walk())
    return kinds


def update_ops(stage: Stage, loop: Op, loop_level: int) -> set[int]:
    """The indices of the ops after the loop, bodies included, that read nothing which other stages send after theirs: those of the task
    ``U``, as `autoshard.pipeline.tasks` has them in the first program after the loop.
    """
    graph = stage.traced.graph
    received = zip(graph.arguments[len(stage.arguments) :], stage.receives, strict=True)
    levels = {value: message.level for value, message in received} | dict.fromkeys(loop.results, loop_level)
    for op in graph.ops:
        if op is not loop:
            levels |= dict.fromkeys(op.results, max((levels.get(value, 0) for value in op.operands), default=0))
    sent = graph.results[len(stage.results) :]
    early, before = {*loop.operands, *(value for value in sent if levels.get(value, 0) < loop_level)}, {loop.index}
    for op in reversed(graph.ops):
        if not early.isdisjoint(op.results):
            before.add(op.index)
            early.update(op.operands if op is not loop else ())
    own = (op for op in graph.ops if op.index not in before and max((levels.get(v, 0) for v in op.results), default=0) <= loop_level)
    return {inner.index for op in own for inner in op.walk()}


def _kept_bytes(stage: Stage, facts: ProgramFacts, model: CostModel, judgement: Judgement, loop: Op, kinds: Mapping[int, str]) -> float:
    """Bytes of what the forward task of a microbatch makes and later ones read, but for what each task makes of constants itself.

    A value that every later reader slices is kept in slices.
    """
    layout, sizes = judgement.assignment.layout, model.mesh.sizes
    graph, body = facts.graph, loop.bodies[0]
    free, parts = {*graph.literals, *graph.constants, *body.inputs[: num_consts(loop.params)]}, dict[int, int]()
    made = {value for op in body.ops if kinds[op.index] == FORWARD for value in op.results}
    for op in body.ops:
        if primitive(op.primitive).kind in CHEAP and free.issuperset(op.operands):
            free.update(op.results)
        if kinds[op.index] == FORWARD:
            continue
        own = [layout(value) for value in op.operands]
        read = own if op.bodies else model.op_cost(facts, op, judgement.assignment.choice(op.index)).operands
        for value, before, after in zip(op.operands, own, read, strict=True):
            if value in made and value not in free:
                n = max(shards(before, sizes), shards(after, sizes))
                parts[value] = min(n, parts.get(value, n))
    values = stage.traced.graph.values
    return sum(values[value].nbytes / n for value, n in parts.items() if not values[value].on_host)


def made_bytes(facts: ProgramFacts, judgement: Judgement, loop: Op, ops: Collection[int]) -> float:
    """The most bytes at once of what some ops make, copies in other layouts and partial sums included, but for totals.

    Args:
        loop: over microbatches.
        ops: the indices of the ops.
    """
    found, *_ = facts.compiler.buffers(facts, judgement.assignment, judgement.copies, judgement.partials)
    totals = set(loop.bodies[0].outputs[: num_carry(loop.params)])
    made = {value for op in facts.graph.walk() if op.index in ops for value in op.results} - totals
    own = [value in made for value in found.times.values]
    own += [copy.first in ops for copy in judgement.copies.values()]
    own += [op in ops for op in found.partials]
    n = len(own)
    return float(usage(found.times.moments, np.where(own, found.held[:n], 0.0), found.born[:n], found.dies[:n]).max())


def least_seconds(micro: Micro, devices: Cluster) -> tuple[float, ...]:
    """Per operation of a microbatch the seconds that it takes at least on some devices, without communication."""
    facts = program_facts(micro.graph, micro.rules, compiler_of(devices))
    model = CostModel(devices, Mesh((("device", devices.n_devices),)))
    found = []
    for op in micro.body.ops:
        inner = (each for each in op.walk() if not (each.bodies or facts.idle[each.index]))
        found.append(sum(each.trips * model.least_op_seconds(facts, each) for each in inner) / micro.n)
    return tuple(found)


def spent_seconds(facts: ProgramFacts, model: CostModel, judgement: Judgement, kinds: Mapping[int, str]) -> dict[str, tuple[float, float]]:
    """Seconds of a step by kind of task, of all microbatches: with exposed collectives, and with all of them.

    Args:
        kinds: per op index the kind; ops without one are of kind "".
    """
    found: dict[str, tuple[float, float]] = {}

    def add(kind: str, exposed: float, whole: float) -> None:
        before = found.get(kind, (0.0, 0.0))
        found[kind] = before[0] + exposed, before[1] + whole

    for op in facts.graph.walk():
        if not op.bodies and not facts.idle[op.index]:
            seconds = model.op_cost(facts, op, judgement.assignment.choice(op.index)).seconds * op.trips
            add(kinds.get(op.index, ""), seconds, seconds)
    for sent in judgement.cost.collectives:
        index = -1 if sent.op is None else sent.op.index
        add(kinds.get(index, ""), sent.exposed_seconds * sent.count, sent.seconds * sent.count)
    return found


def _message_bytes(messages: tuple[Message, ...], values: tuple[int, ...], nbytes: Callable[[int], float], n: int) -> dict[str, float]:
    """Bytes of one microbatch that the loop's messages have on a device, forward and backward."""
    found = {FORWARD: 0.0, BACKWARD: 0.0}
    for message, value in zip(messages, values, strict=True):
        if message.kind == "loop":
            found[BACKWARD if message.backward else FORWARD] += nbytes(value) / n
    return found
