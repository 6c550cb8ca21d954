"""Steps whose later part reads what comes of all examples in an earlier one, as loops over microbatches one after the other.

A generator is trained against the discriminator that the same step has just updated; advantages are divided by their deviation over the
batch; sharpness-aware minimisation takes a gradient where the first one leads. Such a step is cut at the values, combined over all
examples, that a loop waits for: a first program computes these, a second one the rest with them given. Each is a loop over microbatches by
itself, or is cut again. What both need, such as a forward pass, both compute, as far as that is no more than a forward pass in all.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr, JaxprEqn

from autoshard.analysis.values import makers_of
from autoshard.ir import Graph, Op
from autoshard.lower import AsItIs, Path, ops_by_path
from autoshard.microbatch.plan import Loop, plan_loop
from autoshard.microbatch.provenance import Provenance
from autoshard.microbatch.rewrite import in_microbatches
from autoshard.microbatch.rules import batch_rules
from autoshard.microbatch.work import Work
from autoshard.trace import Traced, of_jaxpr, types_of

MOST_LOOPS = 8
SLOW_CUT = 3
MOST_WORK = 1.5  # times the products of the step: a forward pass twice is four thirds, and three halves of a single layer's
SMALL_SHARE = 0.25  # of the batch's bytes: an array of the examples that is kept for later parts, not computed again
MOST_AROUND = 0.25  # of the step's products, such as the scores of all pairs of examples, may be computed at once, which a note says

Function = Callable[..., list[Any]]


Operand = int | tuple[int, int]
"""An argument of the step by its position; or a result of an earlier pass, by the number of the pass and its position there."""


@dataclass(frozen=True, slots=True, eq=False)
class Pass:
    """A part of a step that is one loop over microbatches, and what comes before and after it.

    Attributes:
        traced: its program; its results are what later passes read of it, or those of the step.
        operands: per argument of the program what it is.
        batch: per position of an argument that is split, its dimension.
        loop: the plan of its loop.
        gathers: as in `plan_loop`.
    """

    traced: Traced
    operands: tuple[Operand, ...]
    batch: Mapping[int, int]
    loop: Loop
    gathers: bool


def in_several_loops(traced: Traced, loop: Loop) -> tuple[Function, int, float] | None:
    """The program in several loops over microbatches, how many, and the share of products that read all examples at once.

    None where `several_passes` has none.
    """
    if (found := several_passes(traced, loop)) is None:
        return None
    passes, at_once = found

    def function(*arguments: Any) -> list[Any]:
        made: list[list[Any]] = []
        for each in passes:
            own = [arguments[k] if isinstance(k, int) else made[k[0]][k[1]] for k in each.operands]
            graph = each.traced.graph
            made.append(in_microbatches(each.traced.jaxpr, graph, batch_rules(graph), each.loop)(*own))
        return made[-1]

    return function, len(passes), at_once


def several_passes(traced: Traced, loop: Loop) -> tuple[tuple[Pass, ...], float] | None:
    """The program in passes one after the other, and the share of products that read all examples at once.

    None where that is not possible, or too much would be computed twice or at once.

    Args:
        loop: the plan of a single one, in which products wait for what comes of all examples.
    """
    if any(getattr(op.equation, "effects", ()) for op in traced.graph.walk()):
        return None  # they would happen twice
    work = Work.of(traced.graph)
    total = work.of_ops(traced.graph.ops, batch_rules(traced.graph), traced.graph)
    batch = {traced.graph.arguments.index(value): dim for value, dim in loop.batch.items()}
    for gathers in (True, False):
        cutter = _Cutter(loop.n, work, total, gathers)
        is_cut = cutter.cut(traced, range(len(traced.graph.arguments)), batch, MOST_LOOPS, math.inf)
        if is_cut and cutter.around <= MOST_AROUND * total and cutter.done <= MOST_WORK * total:
            return tuple(cutter.passes), cutter.around / total
    return None


class _Cutter:
    """Cuts a program into loops over ``n`` microbatches.

    Attributes:
        work, total: the measure of work, and the step's.
        gathers: as in `plan_loop`.
        passes: what was cut so far.
        done, around: the work of them all, and of what waits for all examples: not of an optimizer.
    """

    def __init__(self, n: int, work: Work, total: float, gathers: bool):
        self.n, self.work, self.total, self.gathers = n, work, total, gathers
        self.passes: list[Pass] = []
        self.done, self.around = 0.0, 0.0

    def cut(self, traced: Traced, operands: Sequence[Operand], batch: Mapping[int, int], most: int, before: float) -> bool:
        """Cuts a program, in about so many passes at most; whether they are enough. The last one has its results.

        Args:
            operands: per argument of the program what it is.
            batch: per position of an argument that is split, its dimension.
            before: work that waited for all examples before the last cut; one that hardly changes them counts as several, so that a step
                with normalisations over the batch in each of many layers is given up soon.
        """
        graph, rules = traced.graph, batch_rules(traced.graph)
        loop = plan_loop(graph, rules, {graph.arguments[place]: dim for place, dim in batch.items()}, self.n, self.gathers, self.work)
        waiting = sum(flops for _, flops in loop.coupled)
        if (loop.obstacle(self.total) is None and not loop.is_cut) or not loop.awaited:
            self.passes.append(Pass(traced, tuple(operands), batch, loop, self.gathers))
            self.done += self.work.of_ops(graph.ops, rules, graph)
            self.around += waiting
            return True
        most -= 1 if before - waiting > self.total / MOST_LOOPS else SLOW_CUT
        if most < 1:
            return False
        handed, n = _handed_on(graph, loop), len(graph.arguments)
        early = _early(traced.jaxpr, graph, handed)
        if not self.cut(early, operands, batch, most, math.inf):
            return False
        made = [(len(self.passes) - 1, k) for k in range(len(handed))]
        sliced = {n + place: loop.status(value).dim for place, value in enumerate(handed) if _is_sliced(loop, value)}
        late = _late(traced.jaxpr, graph, handed, early.jaxpr.out_avals)
        return self.cut(late, [*operands, *made], {**batch, **sliced}, most, waiting)


def _handed_on(graph: Graph, loop: Loop) -> tuple[int, ...]:
    """The values that the first part of a program hands on: those that are awaited, and what it makes for others on the way.

    These are values of all examples together; of those of single examples only small ones.
    """
    makers = makers_of(graph.ops)
    first: dict[int, Op] = {}
    waiting = list(loop.awaited)
    while waiting:
        maker = makers.get(waiting.pop())
        if maker is not None and maker.index not in first:
            first[maker.index] = maker
            waiting.extend(maker.operands)
    read = {value for op in graph.ops if op.index not in first for value in op.operands} | set(graph.results)
    made = [value for index in sorted(first) for value in first[index].results if value in read]
    known = Provenance(graph)
    small = SMALL_SHARE * sum(graph.values[value].nbytes for value in loop.batch)

    def is_handed(value: int) -> bool:
        if known.is_count(value):
            return False  # groups of rows have the sizes that they have in a microbatch
        combined = loop.phases[makers[value].index] == "after" or loop.status(value).kind == "partial"
        return combined or (_is_sliced(loop, value) and graph.values[value].nbytes <= small)

    return tuple(dict.fromkeys((*loop.awaited, *filter(is_handed, made))))


def _is_sliced(loop: Loop, value: int) -> bool:
    """Whether a value is split along a dimension of examples."""
    status = loop.status(value)
    return status.kind == "slice" and status.inner == 1


class _Substituting(AsItIs):
    """Evaluates a program, some of whose values are given.

    Attributes:
        made: per value of the top level the array.
    """

    def __init__(self, ops: Mapping[Path, Op], given: Mapping[int, Any]):
        super().__init__(ops)
        self._given = given
        self.made: dict[int, Any] = {}

    def op(self, op: Op, eqn: JaxprEqn, operands: list[Any]) -> list[Any]:
        return self._kept(op, super().op(op, eqn, operands))

    def control_flow(self, op: Op, eqn: JaxprEqn, operands: list[Any]) -> list[Any]:
        return self._kept(op, super().control_flow(op, eqn, operands))

    def _kept(self, op: Op, results: Sequence[Any]) -> list[Any]:
        self.made.update((value, self._given.get(value, x)) for value, x in zip(op.results, results, strict=True))
        return [self.made[value] for value in op.results]


def _early(jaxpr: ClosedJaxpr, graph: Graph, values: Sequence[int]) -> Traced:
    """The program that computes some values, of the same arguments."""

    def function(*arguments: Any) -> list[Any]:
        interpreter = _Substituting(ops_by_path(graph), {})
        interpreter.run(jaxpr.jaxpr, jaxpr.consts, arguments)
        return [interpreter.made[value] for value in values]

    return _traced(function, jaxpr, [])


def _late(jaxpr: ClosedJaxpr, graph: Graph, values: Sequence[int], types: Sequence[Any]) -> Traced:
    """The program whose last arguments are some values of it; what only these needed is not computed."""
    n = len(jaxpr.in_avals)

    def function(*arguments: Any) -> list[Any]:
        given = dict(zip(values, arguments[n:], strict=True))
        return _Substituting(ops_by_path(graph), given).run(jaxpr.jaxpr, jaxpr.consts, arguments[:n])

    return _traced(function, jaxpr, [jax.ShapeDtypeStruct(each.shape, each.dtype) for each in types])


def _traced(function: Function, jaxpr: ClosedJaxpr, more: Sequence[jax.ShapeDtypeStruct]) -> Traced:
    made = jax.make_jaxpr(function)(*types_of(jaxpr.jaxpr.invars), *more)
    return of_jaxpr("part", made, [f"[{k}]" for k in range(len(made.in_avals))], [f"[{k}]" for k in range(len(made.out_avals))])
