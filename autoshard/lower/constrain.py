"""A program with every sharding written into it, so that the partitioner has nothing left to decide.

The closed jaxpr is evaluated again, equation by equation. An operand that an op reads in another layout than the value
has is constrained at that use, by way of the layouts of the cheapest reshard; a result is constrained as its op leaves
it, and once more where a reduction is scattered. ``jit`` is inlined. Loops, branches, checkpoints and functions with
custom derivatives are bound again around constrained bodies, so that rematerialisation, custom gradients and whatever
else their primitives mean survive.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var
from jax.extend.source_info_util import current_name_stack, user_context

from autoshard.cost.profile import profile
from autoshard.cost.reshard import Step
from autoshard.ir import Assignment, Graph, Layout, Op, Rule, computed_layout, operand_layout, reductions, replicated, result_layout
from autoshard.lower.control_flow import FLOWS, bind, retraced, with_bodies
from autoshard.lower.mesh import to_named_sharding
from autoshard.trace import subjaxprs

Path = tuple[int, ...]
ReshardPath = Callable[[int, Layout, Layout], Sequence[Step]]
"""``(value number, source, target)`` to the steps between the two layouts."""

INLINED = frozenset({"jit", "pjit", "closed_call", "core_call"})
CUSTOM = frozenset({"custom_jvp_call", "custom_vjp_call"})
# These partition themselves: their operands are theirs to place.
SELF_PARTITIONED = frozenset({"shard_map", "custom_partitioning"})


def constrained(
    jaxpr: ClosedJaxpr,
    graph: Graph,
    rules: tuple[Rule | None, ...],
    assignment: Assignment,
    mesh: jax.sharding.Mesh,
    reshard_path: ReshardPath,
) -> Callable[..., list[Any]]:
    """A function from flat arguments to flat results that computes what ``jaxpr`` does, sharded as the assignment says.

    ``graph`` and ``rules`` are those of the same jaxpr. To be called under `jax.jit`.
    """
    plan = _Plan(
        {op.path: op for op in graph.walk()},
        rules,
        assignment,
        mesh,
        reshard_path,
        profile(graph, rules).free,
        {view: holder.value for op in graph.walk() for holder in op.holders for view in holder.views},
    )

    def function(*arguments: Any) -> list[Any]:
        region = _Region(plan)
        entered = [plan.pin(x, plan.layout(value)) for x, value in zip(arguments, graph.arguments, strict=True)]
        results = region.run(jaxpr.jaxpr, jaxpr.consts, entered, ())
        return [region.leave(x, value, plan.layout(value)) for x, value in zip(results, graph.results, strict=True)]

    return function


@dataclass(frozen=True, slots=True, eq=False)
class _Plan:
    """What the whole program is lowered by.

    Attributes:
        ops: per path of an equation, its op.
        free: per value, whether it is made of constants alone; the partitioner recomputes those for each use.
        home: per value that shares a holder's layout, the holder's value.
    """

    ops: Mapping[Path, Op]
    rules: tuple[Rule | None, ...]
    assignment: Assignment
    mesh: jax.sharding.Mesh
    reshard_path: ReshardPath
    free: tuple[bool, ...]
    home: Mapping[int, int]

    def layout(self, value: int) -> Layout:
        while value not in self.assignment.layouts and value in self.home:
            value = self.home[value]
        return self.assignment.layout(value)

    def pin(self, x: Any, layout: Layout) -> Any:
        rank = np.ndim(x)
        return jax.lax.with_sharding_constraint(x, to_named_sharding(layout, rank, self.mesh)) if rank else x

    def source(self, value: int, target: Layout) -> Layout:
        """The layout a reader in another layout than the value's own is served from: the value's, or its shared copy's."""
        own, copy = self.layout(value), self.assignment.copies.get(value)
        if copy is None or target == copy:
            return own
        return own if self.seconds(value, own, target) <= self.seconds(value, copy, target) else copy

    def seconds(self, value: int, source: Layout, target: Layout) -> float:
        return sum(step.seconds for step in self.reshard_path(value, source, target))


@dataclass(slots=True, eq=False)
class _Region:
    """One body while it is evaluated.

    Attributes:
        loose: values whose own array carries no constraint; it follows from their operands.
        made: per value and layout the copy that all its readers in this region share.
    """

    plan: _Plan
    loose: set[int] = field(default_factory=set)
    made: dict[tuple[int, Layout], Any] = field(default_factory=dict)

    def run(self, jaxpr: Jaxpr, consts: Sequence[Any], arguments: Sequence[Any], path: Path) -> list[Any]:
        """The results of a jaxpr whose equations' paths begin with ``path``."""
        arrays: dict[Var, Any] = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*consts, *arguments), strict=True))

        def read(atom: Var | Literal) -> Any:
            return atom.val if isinstance(atom, Literal) else arrays[atom]

        for position, eqn in enumerate(jaxpr.eqns):
            # The manager restores what was in force where the equation was traced; source lines and names stay the user's.
            names = current_name_stack() + eqn.source_info.name_stack
            with user_context(eqn.source_info.traceback, name_stack=names), eqn.ctx.manager:
                results = self._equation(eqn, [read(atom) for atom in eqn.invars], (*path, position))
            arrays.update(zip(eqn.outvars, results, strict=True))
        return [read(atom) for atom in jaxpr.outvars]

    def read(self, x: Any, value: int, target: Layout) -> Any:
        """The value in the target layout: its own array, or the region's one copy."""
        plan = self.plan
        if not np.ndim(x) or (target == plan.layout(value) and not plan.free[value]):
            return x
        if (value, target) not in self.made:
            self.made[value, target] = plan.pin(x, target) if plan.free[value] else self._reshard(x, value, target)
        return self.made[value, target]

    def _reshard(self, x: Any, value: int, target: Layout) -> Any:
        plan = self.plan
        source = plan.source(value, target)
        own = plan.layout(value)
        x = self._pinned(x, value) if source == own else self.read(x, value, source)
        for step in plan.reshard_path(value, source, target):
            x = plan.pin(x, step.target)
        return x

    def _pinned(self, x: Any, value: int) -> Any:
        """The value's own array with its layout written on it."""
        own = self.plan.layout(value)
        if value not in self.loose:
            return x
        if (value, own) not in self.made:
            self.made[value, own] = self.plan.pin(x, own)
        return self.made[value, own]

    def leave(self, x: Any, value: int, target: Layout) -> Any:
        """The value as it leaves the region: constrained in any case."""
        return self._pinned(x, value) if target == self.plan.layout(value) and not self.plan.free[value] else self.read(x, value, target)

    def _equation(self, eqn: JaxprEqn, operands: list[Any], path: Path) -> list[Any]:
        name = eqn.primitive.name
        if name in INLINED:
            (body,) = subjaxprs(eqn)
            return self.run(_open(body), _consts(body), operands, (*path, 0))
        if name in CUSTOM:
            return self._custom(eqn, operands, path)
        op = self.plan.ops.get(path)
        if op is None:
            return operands if name == "sharding_constraint" else bind(eqn, operands)
        if op.bodies and name in FLOWS:
            return self._control_flow(op, eqn, operands)
        return self._op(op, eqn, operands)

    def _custom(self, eqn: JaxprEqn, operands: list[Any], path: Path) -> list[Any]:
        """The call bound again with its primal body constrained, and its derivative rule as it was."""
        (body,) = subjaxprs(eqn)
        inner = _Region(self.plan, self.loose)
        new, _ = retraced(body, lambda *arguments: inner.run(_open(body), _consts(body), arguments, (*path, 0)))
        return bind(eqn, operands, **with_bodies(eqn, [body], [new]))

    def _control_flow(self, op: Op, eqn: JaxprEqn, operands: list[Any]) -> list[Any]:
        """The op bound again around constrained bodies, its operands in the layouts of what holds them there."""
        plan = self.plan
        flows = FLOWS[eqn.primitive.name](op, eqn.params, plan.layout)
        entering = [self.leave(x, value, layout) for x, value, layout in zip(operands, op.operands, flows.operands, strict=True)]
        bodies, new, constants = subjaxprs(eqn), [], []
        for number, body in enumerate(bodies):
            jaxpr, leading = retraced(body, self._body(op, number, body, flows.inputs[number], flows.outputs[number]))
            new.append(jaxpr)
            constants += leading
        results = bind(eqn, [*constants, *entering], **with_bodies(eqn, bodies, new))
        return [plan.pin(x, plan.layout(value)) for x, value in zip(results, op.results, strict=True)]

    def _body(self, op: Op, number: int, old: ClosedJaxpr | Jaxpr, inputs: Sequence[Layout], outputs: Sequence[Layout]) -> Callable[..., Any]:
        plan = self.plan

        def body(*arguments: Any) -> list[Any]:
            region = _Region(plan)
            entered = [plan.pin(x, layout) for x, layout in zip(arguments, inputs, strict=True)]
            results = region.run(_open(old), _consts(old), entered, (*op.path, number))
            return [region.leave(x, value, layout) for x, value, layout in zip(results, op.bodies[number].outputs, outputs, strict=True)]

        return body

    def _op(self, op: Op, eqn: JaxprEqn, operands: list[Any]) -> list[Any]:
        plan = self.plan
        rule = plan.rules[op.index]
        if rule is None:
            return self._replicated_op(op, eqn, operands)
        choice = plan.assignment.choice(op.index)
        targets = tuple(operand_layout(rule, choice, j) for j in range(len(operands)))
        if self._follows(op, rule, targets):
            self.loose.update(op.results)
            return _apply(eqn, operands)
        if op.results and all(plan.free[value] for value in op.results):
            return _apply(eqn, operands)
        read = [self.read(x, value, target) for x, value, target in zip(operands, op.operands, targets, strict=True)]
        results = _apply(eqn, read)
        reduced = bool(reductions(rule, choice))
        return [
            self._settled(x, value, computed_layout(rule, choice, k) if reduced else None, result_layout(rule, choice, k))
            for k, (x, value) in enumerate(zip(results, op.results, strict=True))
        ]

    def _settled(self, x: Any, value: int, computed: Layout | None, combined: Layout) -> Any:
        """A result in its value's layout; first, where partial results are combined, in the layout the op computes them in.

        A scatter is a second constraint, the slice of what the first one reduces.
        """
        plan = self.plan
        if computed is not None and computed != combined:
            x = plan.pin(x, computed)
        x = plan.pin(x, combined)
        if combined != plan.layout(value):
            for step in plan.reshard_path(value, combined, plan.layout(value)):
                x = plan.pin(x, step.target)
        return x

    def _replicated_op(self, op: Op, eqn: JaxprEqn, operands: list[Any]) -> list[Any]:
        plan = self.plan
        if not eqn.effects and eqn.primitive.name not in SELF_PARTITIONED:
            whole = replicated(plan.assignment.mesh)
            operands = [self.read(x, value, whole) for x, value in zip(operands, op.operands, strict=True)]
        return [plan.pin(x, plan.layout(value)) for x, value in zip(_apply(eqn, operands), op.results, strict=True)]

    def _follows(self, op: Op, rule: Rule, targets: Sequence[Layout]) -> bool:
        """Whether the result's layout follows without a constraint: elementwise, with every operand and the result in one layout."""
        plan = self.plan
        if len(op.results) != 1 or any(factor.kind != "pass_through" for factor in rule.factors):
            return False
        layout = plan.layout(op.results[0])
        arrays = [j for j, value in enumerate(op.operands) if rule.operands[j] and not plan.free[value]]
        return bool(arrays) and all(
            rule.operands[j] == rule.results[0] and targets[j] == layout == plan.layout(op.operands[j]) for j in arrays
        )


def _apply(eqn: JaxprEqn, operands: list[Any]) -> list[Any]:
    """The equation's results; a constraint of the user's own is part of the assignment by now."""
    return operands if eqn.primitive.name == "sharding_constraint" else bind(eqn, operands)


def _open(body: ClosedJaxpr | Jaxpr) -> Jaxpr:
    return body if isinstance(body, Jaxpr) else body.jaxpr


def _consts(body: ClosedJaxpr | Jaxpr) -> Sequence[Any]:
    return () if isinstance(body, Jaxpr) else body.consts
