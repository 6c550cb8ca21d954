"""Corrections of a search's tables by what a compiler made of a plan, operation by operation."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from autoshard.compilers.corrections import NO_CORRECTIONS, Corrections, kernel_key
from autoshard.compilers.program_facts import ProgramFacts
from autoshard.ir import Assignment, Op
from autoshard.judge.evaluate import scheduled
from autoshard.judge.model import CostModel
from autoshard.judge.task_graph import Region
from autoshard.plan.plan import Plan
from autoshard.primitives import is_matrix, is_view
from autoshard.verify import NO_OP, Clock, CompiledKernel
from autoshard.verify import seconds_by_op as compiled_by_op


@dataclass(frozen=True, slots=True)
class Difference:
    """What one operation takes in a step, predicted and compiled.

    Attributes:
        op: the operation; None for kernels that compute none.
        predicted_seconds, compiled_seconds: of the kernels that it leads, with the operations that these compute and no other.
    """

    op: Op | None
    predicted_seconds: float
    compiled_seconds: float

    @property
    def more_seconds(self) -> float:
        """By how much the compiled time exceeds the predicted one."""
        return self.compiled_seconds - self.predicted_seconds


def differences(
    facts: ProgramFacts, model: CostModel, assignment: Assignment, kernels: Iterable[CompiledKernel], clock: Clock
) -> list[Difference]:
    """The compute of each operation that leads a kernel or is predicted to have one, the largest difference first."""
    predicted, ops = seconds_by_op(facts, model, assignment), facts.graph.walk()
    kernels = _led(facts, kernels)
    compiled = compiled_by_op(kernels, clock)
    found = []
    for leader, members in _groups(kernels, predicted).items():
        op = ops[leader] if leader != NO_OP else None
        found.append(Difference(op, sum(predicted.get(each, 0.0) for each in members), compiled.get(leader, 0.0)))
    return sorted(found, key=lambda each: (-abs(each.more_seconds), -1 if each.op is None else each.op.index))


def learned(
    facts: ProgramFacts, model: CostModel, assignment: Assignment, kernels: Iterable[CompiledKernel], clock: Clock
) -> Corrections:
    """Corrections with which the compute of this assignment is the compiled one; of kernels with one key it is the mean."""
    facts = facts.corrected(NO_CORRECTIONS)
    kernels = _led(facts, kernels)
    predicted, ops = seconds_by_op(facts, model, assignment), facts.graph.walk()
    compiled = compiled_by_op(kernels, clock)
    more: dict[int, float] = defaultdict(float)
    for leader, members in _groups(kernels, predicted).items():
        expected, taken = sum(predicted.get(each, 0.0) for each in members), compiled.get(leader, 0.0)
        if taken >= expected:
            more[leader] += taken - expected
        else:
            for each in members:
                more[each] += predicted.get(each, 0.0) * (taken / expected - 1)
    by_key: dict[str, list[float]] = defaultdict(list)
    for index, seconds in more.items():
        if index == NO_OP or ops[index].bodies or facts.idle[index]:
            continue
        by_key[_key(facts, model, assignment, ops[index])].append(seconds / max(ops[index].trips, 1))
    return Corrections({key: sum(each) / len(each) for key, each in by_key.items()})


def as_compiled_before(plan: Plan) -> tuple[str, ...]:
    """A note on the kernels of a plan that are predicted as a compiler made such before; none where there are none."""
    judged = plan._judged if plan._known is not None and plan._known.facts.corrections else None
    if judged is None:
        return ()
    facts, model, assignment, found = judged.facts, judged.model, judged.record.assignment, set[str]()
    for op in facts.graph.walk():
        if not (op.bodies or facts.idle[op.index]):
            found.add(_key(facts, model, assignment, op))
    known = len(found.intersection(facts.corrections.seconds))
    return (f"{known} of {len(found)} kinds of kernels are predicted as the compiler made them before",) if known else ()


def _key(facts: ProgramFacts, model: CostModel, assignment: Assignment, op: Op) -> str:
    """The key of an operation's kernel."""
    choice = assignment.choice(op.index)
    seconds = model.predicted_seconds(facts, op, choice)
    return kernel_key(op, facts.rules[op.index], facts.graph.values, choice, model.mesh.sizes, seconds)


def seconds_by_op(facts: ProgramFacts, model: CostModel, assignment: Assignment) -> dict[int, float]:
    """The predicted compute of a step by operation, copies around its collectives included."""
    found: dict[int, float] = defaultdict(float)

    def add(region: Region) -> None:
        for task, seconds in enumerate(region.tasks.seconds):
            if task in region.loops:
                add(region.loops[task])
            elif task not in region.sent:
                found[region.ops[task]] += seconds * region.runs

    add(scheduled(facts, model, assignment)[1].region)
    return dict(found)


def _led(facts: ProgramFacts, kernels: Iterable[CompiledKernel]) -> list[CompiledKernel]:
    """The kernels, those of products led by them: compilers name a product by the transposition of its result, if there is one."""
    ops, found = facts.graph.walk(), []
    for kernel in kernels:
        leader = kernel.leader
        while kernel.product and leader != NO_OP and is_view(ops[leader].primitive):
            maker = facts.makers[ops[leader].operands[0]]
            leader = NO_OP if maker is None else maker
        is_product = leader != NO_OP and is_matrix(ops[leader].primitive)
        found.append(replace(kernel, leader=leader, ops=(leader, *kernel.ops)) if is_product else kernel)
    return found


def _groups(kernels: Iterable[CompiledKernel], predicted: Mapping[int, float]) -> dict[int, list[int]]:
    """By leader the operations that its kernels compute: its own, and those that lead none and are in no kernel before.

    What is predicted to take time and is in no kernel is a group of its own.
    """
    leaders = {kernel.leader for kernel in kernels}
    found: dict[int, list[int]] = {leader: [leader] for leader in sorted(leaders)}
    seen = set(leaders)
    for kernel in kernels:
        found[kernel.leader] += [op for op in kernel.ops if op not in seen]
        seen.update(kernel.ops)
    return found | {op: [op] for op, seconds in predicted.items() if op not in seen and seconds > 0}
