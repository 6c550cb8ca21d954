"""Steps inside loops and branches, whose microbatches are those of each step.

Several steps in one call, passes over minibatches, and networks that are trained in turns are a `scan`, a `while` or a `cond` whose bodies
have the products. Each body is a program with a batch of its own, and is rewritten as such.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.extend.core import ClosedJaxpr, JaxprEqn, jaxpr_as_fun

from autoshard.ir import Graph, Op, Rule
from autoshard.ir.scan import num_carry, num_consts, scan_parts
from autoshard.lower import AsItIs, Path, bind, ops_by_path
from autoshard.microbatch.plan import LEAST_SHARE
from autoshard.microbatch.work import Work
from autoshard.trace import Traced, of_jaxpr, rebuilt, subjaxprs
from autoshard.trace.structure import entering, opened, with_bodies


@dataclass(frozen=True, slots=True, eq=False)
class Step:
    """A body of an op as a program of its own.

    Attributes:
        fixed: the positions of its arguments that come of no example: state that a loop carries, and what is computed of state alone.
    """

    traced: Traced
    fixed: frozenset[int]


Steps = Mapping[int, Sequence[Step | None]]
"""Per op index the steps in its bodies; None for bodies without products."""


def steps_inside(traced: Traced, rules: Sequence[Rule | None], fixed: Set[int] = frozenset()) -> Steps:
    """The steps in bodies of operations that have the program's products; none where other operations have some, or no examples are read.

    Args:
        fixed: the positions of arguments that come of no example, beside those that the program replaces.
    """
    graph = traced.graph
    work = Work.of(graph)
    flops = {op.index: work.of_ops([op], rules, graph) for op in graph.ops}
    ops = [op for op in graph.ops if flops[op.index] > LEAST_SHARE * sum(flops.values())]
    if any(op.primitive not in ("scan", "while", "cond") for op in ops):
        return {}
    of_examples = set(graph.arguments) - {graph.arguments[k] for k in fixed | graph.state}
    for op in graph.ops:
        if not of_examples.isdisjoint(op.operands):
            of_examples.update(op.results)
    steps = {op.index: [_step(graph, rules, work, op, number, of_examples) for number in range(len(op.bodies))] for op in ops}
    bodies = [body for each in steps.values() for body in each if body is not None]
    return {} if any(len(body.fixed) == len(body.traced.graph.arguments) for body in bodies) else steps


def _step(graph: Graph, rules: Sequence[Rule | None], work: Work, op: Op, number: int, of_examples: Set[int]) -> Step | None:
    if not work.of_ops(op.bodies[number].ops, rules, graph) or (op.primitive, number) == ("while", 0):
        return None
    body, consts = opened(subjaxprs(op.equation)[number])
    positions = entering(op.equation)[number]
    sliced = num_consts(op.params) + num_carry(op.params) if op.primitive == "scan" else len(positions)
    paths = dict(zip(graph.arguments, graph.argument_paths, strict=True))

    def name(k: int, at: int | None) -> str:
        return (None if at is None else paths.get(op.operands[at])) or f"operand {k} of {op.primitive} at {op.origin}"

    names = [name(k, at) + ("[i]" if k >= sliced else "") for k, at in enumerate(positions)]
    fixed = frozenset(k for k, at in enumerate(positions) if at is None or op.operands[at] not in of_examples)
    return Step(of_jaxpr("step", ClosedJaxpr(body, consts), names, [f"[{k}]" for k in range(len(body.outvars))]), fixed)


def one_after_the_other(traced: Traced, steps: Steps, most: int) -> Traced | None:
    """The program with the trips of the scans that are steps written out; None where they are others than scans, or have more trips."""
    ops = [op for op in traced.graph.ops if op.index in steps]
    if any(op.primitive != "scan" for op in ops) or sum(op.equation.params["length"] for op in ops) > most:
        return None
    return rebuilt(traced, _WrittenOut(ops_by_path(traced.graph), steps).remade(traced.jaxpr))


class _WrittenOut(AsItIs):
    """Evaluates a program with the trips of some scans of the top level one after the other."""

    def __init__(self, ops: Mapping[Path, Op], steps: Steps):
        super().__init__(ops)
        self._steps = steps

    def control_flow(self, op: Op, eqn: JaxprEqn, operands: list[Any]) -> list[Any]:
        if op.index not in self._steps:
            return super().control_flow(op, eqn, operands)
        consts, carry, slices = scan_parts(eqn.params, operands)
        (body,) = subjaxprs(eqn)
        trips, n, made = range(eqn.params["length"]), len(carry), list[list[Any]]()
        for i in reversed(trips) if eqn.params["reverse"] else trips:
            own = (lax.index_in_dim(jnp.asarray(x), i, 0, keepdims=False) for x in slices)
            results = jaxpr_as_fun(ClosedJaxpr(*opened(body)))(*consts, *carry, *own)
            carry = results[:n]
            made.append(results[n:])
        stacked = zip(*(made[::-1] if eqn.params["reverse"] else made), strict=True)
        return [*carry, *map(jnp.stack, stacked)]


class WithBodies(AsItIs):
    """Evaluates a program with other bodies in place of those of some operations of the top level.

    Attributes:
        bodies: per op index its bodies, None for those that stay.
    """

    def __init__(self, ops: Mapping[Path, Op], bodies: Mapping[int, Sequence[Traced | None]]):
        super().__init__(ops)
        self.bodies = bodies

    def control_flow(self, op: Op, eqn: JaxprEqn, operands: list[Any]) -> list[Any]:
        if op.index not in self.bodies:
            return super().control_flow(op, eqn, operands)
        old = subjaxprs(eqn)
        new = [before if made is None else made.jaxpr for before, made in zip(old, self.bodies[op.index], strict=True)]
        return bind(eqn, operands, **with_bodies(eqn, old, new))
