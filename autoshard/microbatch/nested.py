"""Steps inside loops and branches, whose microbatches are those of each step.

Several steps in one call, passes over minibatches, and networks that are trained in turns are a `scan`, a `while` or a `cond` whose bodies
have the products. Each body is a program with state and a batch of its own, and is rewritten as such.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from jax.extend.core import ClosedJaxpr, JaxprEqn

from autoshard.ir import Graph, Op, Rule
from autoshard.ir.scan import num_carry, num_consts
from autoshard.lower import bind
from autoshard.microbatch.plan import LEAST_SHARE, product_flops
from autoshard.microbatch.rewrite import AsItIs
from autoshard.trace import Traced, of_jaxpr, subjaxprs
from autoshard.trace.structure import entering, opened, with_bodies

Steps = Mapping[int, Sequence[Traced | None]]
"""Per op index, its bodies as programs; None for those without products."""


def steps_inside(traced: Traced, rules: Sequence[Rule | None]) -> Steps:
    """The steps in bodies of operations that have the program's products; none where other operations have some of them."""
    graph = traced.graph
    flops = {op.index: product_flops([op], rules, graph) for op in graph.ops}
    total = sum(flops.values())
    ops = [op for op in graph.ops if flops[op.index] > LEAST_SHARE * total]
    if any(op.primitive not in ("scan", "while", "cond") for op in ops):
        return {}
    return {op.index: [_program(graph, rules, op, number) for number in range(len(op.bodies))] for op in ops}


def _program(graph: Graph, rules: Sequence[Rule | None], op: Op, number: int) -> Traced | None:
    """A body of an op as a program of its own, whose state is what the op carries, or what the whole program replaces."""
    if not product_flops(op.bodies[number].ops, rules, graph) or (op.primitive, number) == ("while", 0):
        return None
    body, consts = opened(subjaxprs(op.equation)[number])
    positions = entering(op.equation)[number]
    sliced = num_consts(op.params) + num_carry(op.params) if op.primitive == "scan" else len(positions)
    paths = dict(zip(graph.arguments, graph.argument_paths, strict=True))

    def name(k: int, at: int | None) -> str:
        return (None if at is None else paths.get(op.operands[at])) or f"operand {k} of {op.primitive} at {op.origin}"

    names = [name(k, at) + ("[i]" if k >= sliced else "") for k, at in enumerate(positions)]
    carried = [k for k, at in enumerate(positions) if at is None]
    state = list(enumerate(carried))
    if op.primitive == "cond":
        places = {value: result for result, value in enumerate(op.results)}
        replaced = [(graph.arguments[argument], places.get(graph.results[result])) for result, argument in graph.aliases]
        state = [(result, op.operands.index(value) - 1) for value, result in replaced if result is not None and value in op.operands[1:]]
    return of_jaxpr("step", ClosedJaxpr(body, consts), names, [f"[{k}]" for k in range(len(body.outvars))], state)


class WithBodies(AsItIs):
    """Evaluates a program with other bodies in place of those of some operations of the top level.

    Attributes:
        bodies: per op index its bodies, None for those that stay.
    """

    def __init__(self, ops: Mapping[tuple[int, ...], Op], bodies: Steps):
        super().__init__(ops, differentiable=False)
        self.bodies = bodies

    def region(self) -> AsItIs:
        return AsItIs(self.ops, differentiable=False)

    def control_flow(self, op: Op, eqn: JaxprEqn, operands: list[Any]) -> list[Any]:
        if op.index not in self.bodies:
            return super().control_flow(op, eqn, operands)
        old = subjaxprs(eqn)
        new = [before if made is None else made.jaxpr for before, made in zip(old, self.bodies[op.index], strict=True)]
        return bind(eqn, operands, **with_bodies(eqn, old, new))
