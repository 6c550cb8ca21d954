"""Lowering to sharding constraints, such that XLA's partitioner has one choice everywhere.

An operand that an op reads in another layout than the value's is constrained at that use, through the layouts of the
cheapest reshard; a result is constrained as its op computes it, and once more where a reduction is scattered; so are
inputs and outputs of loops, branches and checkpoints.

A constraint that cannot change anything is left out: a result *follows* where its layout is that of its operands propagated
through the op, and all readers need that layout. Between the remaining constraints such values form regions in which all ops
agree, so that propagation has one solution. A value with a reader in another layout is always constrained: otherwise the
reader's constraint would compete with the operands'. So is a result with a scalar operand that is broadcast: XLA:TPU merges
equal broadcasts before it propagates, so that shardings would spread from one region to another. Arrays that are broadcast to
two shardings are two arrays for the same reason.

Constraints have a cost: XLA simplifies before it partitions, and not across a constraint. So a partial product that only a
transpose reads is computed in transposed order, and the transpose is constrained instead; and constants that loops read
are not constrained.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import numpy as np
from jax.extend.core import ClosedJaxpr, JaxprEqn
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec

from autoshard.cost.reshard import ReshardPath
from autoshard.ir import (
    Assignment,
    Choice,
    Dims,
    Graph,
    Layout,
    Op,
    Rule,
    computed_layout,
    exchanges,
    given_choice,
    operand_layout,
    reductions,
    replicated,
    result_layout,
    result_layouts,
)
from autoshard.ir.scan import num_consts
from autoshard.lower.constraint_plan import Constrain, ConstraintPlan, carried, constraint_plan
from autoshard.lower.interpret import Interpreter, Path, apply, bind, product
from autoshard.lower.mesh import to_partition_spec
from autoshard.lower.shards import Sharded
from autoshard.lower.xla_workarounds import in_range, with_workarounds
from autoshard.primitives import is_self_partitioned
from autoshard.rules import propagates, runs_per_shard
from autoshard.trace.mapped import ENTERING, LEAVING
from autoshard.trace.structure import types_of


def constrain_sharding(x: Any, sharding: NamedSharding, _: int) -> Any:
    """The array with a `with_sharding_constraint`."""
    return jax.lax.with_sharding_constraint(x, sharding)


def constrained(
    jaxpr: ClosedJaxpr,
    graph: Graph,
    rules: tuple[Rule | None, ...],
    assignment: Assignment,
    mesh: jax.sharding.Mesh | AbstractMesh,
    reshard_path: ReshardPath,
    constrain: Constrain = constrain_sharding,
    differentiable: bool = True,
) -> Callable[..., list[Any]]:
    """The function of ``jaxpr``, from flat arguments to flat results, with constraints for the assignment.

    ``graph`` and ``rules`` are those of the same jaxpr; ``constrain`` is called for every constraint, always in the same order.
    A ``differentiable`` function keeps custom derivatives inside. To be called under `jax.jit`.
    """
    leaving = result_layouts(graph, assignment)
    plan = constraint_plan(graph, rules, assignment, mesh, reshard_path, constrain, differentiable)

    def function(*arguments: Any) -> list[Any]:
        region = _Region(plan)
        entered = [plan.constrained(x, value, plan.layout(value)) for x, value in zip(arguments, graph.arguments, strict=True)]
        results = region.run(jaxpr.jaxpr, jaxpr.consts, entered)
        return [region.passed(x, value, layout) for x, value, layout in zip(results, graph.results, leaving, strict=True)]

    return function


class _Region(Interpreter):
    """The lowering of one region.

    Attributes:
        unconstrained: values whose own array has no constraint, because its sharding follows from the operands'.
        copies: per value and layout, the array that all readers in this region share.
        recipes: per free value its op, equation and operands.
        expansions: per recomputed value and layout, its array in that layout.
        waiting: per late value its product's equation and operands.
        broadcasts: per value, layout and shape that it is broadcast to, one array for each sharding of the new dimensions.
    """

    is_final = True

    def __init__(self, plan: ConstraintPlan, unconstrained: set[int] | None = None):
        super().__init__(plan.ops, plan.differentiable)
        self.plan = plan
        self.unconstrained = set(plan.constants) if unconstrained is None else unconstrained
        self.copies: dict[tuple[int, Layout], Any] = {}
        self.recipes: dict[int, tuple[Op, JaxprEqn, list[Any]]] = {}
        self.expansions: dict[tuple[int, Layout], Any] = {}
        self.waiting: dict[int, tuple[JaxprEqn, list[Any]]] = {}
        self.broadcasts: dict[tuple[int, Layout, tuple[int, ...]], dict[Layout, Any]] = {}

    def region(self) -> _Region:
        return _Region(self.plan)

    def derived(self) -> _Region:
        return _Region(self.plan, self.unconstrained)

    def read(self, x: Any, value: int, target: Layout) -> Any:
        """The value in the target layout: its own array, or the region's copy."""
        plan = self.plan
        if not np.ndim(x):
            return x
        if plan.own(value, target):
            # Shardy applies the last of successive constraints to later readers of the array, too: they read the first one's result.
            return self._own_array(x, value) if value in plan.constants or (value, target) in self.copies else x
        if (value, target) not in self.copies:
            if plan.free[value]:
                self.copies[value, target] = plan.constrained(self._constant(x, value, target), value, target)
            else:
                self.copies[value, target] = self._copy(x, value, target)
        return self.copies[value, target]

    def _constant(self, x: Any, value: int, target: Layout) -> Any:
        """A free value for readers in one layout.

        In ``i[:, None] >= i[None, :]`` one side needs ``i`` sharded and the other whole. The partitioner recomputes constants for each of
        their readers, except for readers that are constants themselves: values shared by these are recomputed here, once in each layout.
        """
        if value not in self.plan.recomputed or value not in self.recipes:
            return x
        wanted: dict[tuple[int, Layout], list[tuple[int, Layout]]] = {}
        waiting = [(value, target)]
        while waiting:
            made = waiting.pop()
            if made[0] in self.recipes and made not in wanted and made not in self.expansions:
                wanted[made] = self._sources(*made)
                waiting += wanted[made]
        for made in sorted(wanted, key=lambda made: self.recipes[made[0]][0].index):
            op, eqn, operands = self.recipes[made[0]]
            read = [self.expansions.get(source, array) for source, array in zip(wanted[made], operands, strict=True)]
            self.expansions[made] = self._applied(eqn, read)[op.results.index(made[0])]
        return self.expansions[value, target]

    def _sources(self, value: int, target: Layout) -> list[tuple[int, Layout]]:
        """The operands of a free value's op, with the layouts in which they are needed."""
        op, rule = self.recipes[value][0], self.plan.rules[self.recipes[value][0].index]
        result = op.results.index(value)
        whole = replicated(self.plan.assignment.mesh)
        return [
            (operand, carried(rule.results[result], rule.operands[k], target) if rule else whole) for k, operand in enumerate(op.operands)
        ]

    def _copy(self, x: Any, value: int, target: Layout) -> Any:
        plan = self.plan
        source = plan.source(value, target)
        x = self._own_array(x, value) if plan.own(value, source) else self.read(x, value, source)
        return plan.reshard(x, value, source, target)

    def _own_array(self, x: Any, value: int) -> Any:
        """The value's own array, constrained to its layout."""
        if value not in self.unconstrained:
            return x
        own = self.plan.layout(value)
        if (value, own) not in self.copies:
            self.copies[value, own] = self.plan.constrained(x, value, own)
        return self.copies[value, own]

    def passed(self, x: Any, value: int, target: Layout) -> Any:
        """The value for another region: as `read` returns it, and always constrained."""
        return self._own_array(x, value) if self.plan.own(value, target) else self.read(x, value, target)

    def control_flow(self, op: Op, eqn: JaxprEqn, operands: list[Any]) -> list[Any]:
        layouts = self.plan.flows(op).operands
        constrained = {flow.value for holder in op.holders if holder.value not in self.plan.loop_constants for flow in holder.sources}
        entering = [
            self.passed(x, value, layout) if value in constrained or not self.plan.free[value] else x
            for x, value, layout in zip(operands, op.operands, layouts, strict=True)
        ]
        return self._constrained_results(op, self.rebound(op, eqn, entering))

    def enter(self, op: Op, number: int, arguments: Sequence[Any]) -> list[Any]:
        plan = self.plan
        inputs, layouts = op.bodies[number].inputs, plan.flows(op).inputs[number]
        self.unconstrained |= plan.loop_constants.intersection(inputs)
        triples = zip(arguments, inputs, layouts, strict=True)
        entered = [x if value in plan.loop_constants else plan.constrained(x, value, layout) for x, value, layout in triples]
        # JAX carries a loop's constants from trip to trip, and Shardy applies the last of successive constraints to the carry, too.
        for k, value in enumerate(inputs[: _n_passed_on(op, number)]):
            if value in plan.resharded and np.ndim(entered[k]):
                entered[k] = plan.constrained(jax.lax.optimization_barrier(entered[k]), value, layouts[k])
        return entered

    def leave(self, op: Op, number: int, results: Sequence[Any]) -> list[Any]:
        layouts = self.plan.flows(op).outputs[number]
        return [self.passed(x, value, layout) for x, value, layout in zip(results, op.bodies[number].outputs, layouts, strict=True)]

    def op(self, op: Op, eqn: JaxprEqn, operands: list[Any]) -> list[Any]:
        plan = self.plan
        rule = plan.rules[op.index]
        if rule is None:
            return self._replicated(op, eqn, operands)
        choice = plan.assignment.choice(op.index)
        targets = [operand_layout(rule, choice, position) for position in range(len(operands))]
        if op.results and all(plan.free[value] for value in op.results):
            self.recipes.update((value, (op, eqn, operands)) for value in op.results)
            return self._applied(eqn, operands)
        follows = self._follows(op, rule, choice)
        read = [
            self._constant(x, value, target) if follows and plan.free[value] else self.read(x, value, target)
            for x, value, target in zip(operands, op.operands, targets, strict=True)
        ]
        if len(op.results) == 1 and all(factor.kind == "pass_through" for factor in rule.factors):
            shape = getattr(eqn.outvars[0].aval, "shape", ())
            read = [self._broadcast(x, value, rule, choice, k, shape) for k, (x, value) in enumerate(zip(read, op.operands, strict=True))]
        changed = with_workarounds(op.primitive, rule, choice, self._in_range(eqn, read))
        pairs = zip(changed, read, op.operands, targets, strict=True)
        operands = [new if new is old else plan.constrained(new, value, target) for new, old, value, target in pairs]
        results = self._bound(op, eqn, rule, choice, operands, targets)
        if op.primitive == "dot_general" and op.results[0] in plan.late:
            self.waiting[op.results[0]] = eqn, operands
        elif op.primitive == "transpose" and op.operands[0] in self.waiting:
            waiting, (_, swapped) = self.waiting[op.operands[0]], plan.late[op.operands[0]]
            if op.results[0] in plan.late:
                self.waiting[op.results[0]] = waiting
            else:
                results = [product(*waiting, swapped)]
        if follows or not plan.late.keys().isdisjoint(op.results):
            self.unconstrained.update(op.results)
            return results
        return [self._stored(x, op, rule, choice, k) for k, x in enumerate(results)]

    def _in_range(self, eqn: JaxprEqn, operands: Sequence[Any]) -> Sequence[Any]:
        return in_range(eqn.primitive.name, eqn.params, operands, self.plan.assignment.mesh.size)

    def _applied(self, eqn: JaxprEqn, operands: Sequence[Any]) -> list[Any]:
        return apply(eqn, self._in_range(eqn, operands))

    def _broadcast(self, x: Any, value: int, rule: Rule, choice: Choice, operand: int, shape: tuple[int, ...]) -> Any:
        """An operand that is broadcast: a separate array for each sharding of the result's new dimensions.

        XLA merges equal broadcasts, and then gathers the one that is sharded for one reader and whole for another.
        """
        more = _factors(rule.results[0]) - _factors(rule.operands[operand])
        if not more or not np.ndim(x) or self.plan.free[value]:
            return x
        target, made = operand_layout(rule, choice, operand), computed_layout(rule, choice, 0)
        arrays = self.broadcasts.setdefault((value, target, shape), {})
        way = tuple(dim if factor in more else -1 for dim, (factor, _) in zip(made, choice, strict=True))
        if way not in arrays:
            arrays[way] = self.plan.constrained(next(reversed(arrays.values())), value, target) if arrays else x
        return arrays[way]

    def _bound(self, op: Op, eqn: JaxprEqn, rule: Rule, choice: Choice, read: list[Any], targets: Sequence[Layout]) -> list[Any]:
        """The op's results; computed in a `jax.shard_map` where the partitioner would gather although the rule need not."""
        mesh, axes = self.plan.mesh, self.plan.assignment.mesh
        if not needs_shard_map(op, rule, choice, axes.sizes):
            return apply(eqn, read)

        def specs(arrays: Iterable[Any], layouts: Iterable[Layout]) -> tuple[PartitionSpec, ...]:
            return tuple(to_partition_spec(layout, np.ndim(x), axes.names) for x, layout in zip(arrays, layouts, strict=True))

        leaving = specs((v.aval for v in eqn.outvars), (computed_layout(rule, choice, k) for k in range(len(eqn.outvars))))
        entering = specs(read, targets)

        whole = tuple(tuple(np.shape(x)) for x in read), tuple(each.shape for each in types_of(eqn.outvars))

        def one_device(*shards: Any) -> list[Any]:
            def bound(*operands: Any, **replaced: Any) -> list[Any]:
                return bind(eqn, operands, **replaced)

            return Sharded(op.primitive, op.params, bound, rule, choice, axes, *whole).run(shards)

        # One primitive may have sharded and replicated operands, which shard_map's type check refuses.
        return jax.shard_map(one_device, mesh=mesh, in_specs=entering, out_specs=[*leaving], check_vma=False)(*read)

    def _stored(self, x: Any, op: Op, rule: Rule, choice: Choice, result: int) -> Any:
        """A result in its value's layout; a scattered reduction has two constraints, on the whole result and on its slice."""
        value = op.results[result]
        combined = computed = result_layout(rule, choice, result)
        if reductions(rule, choice):
            computed = computed_layout(rule, choice, result)
        elif op.primitive == "transpose" and op.operands[0] in self.plan.late:
            computed = carried(rule.operands[0], rule.results[0], self.plan.late[op.operands[0]][0])
        if computed != combined:
            x = self.plan.constrained(x, value, computed)
        return self.plan.reshard(self.plan.constrained(x, value, combined), value, combined, self.plan.layout(value))

    def mapped(self, eqn: JaxprEqn, operands: list[Any], path: Path) -> list[Any]:
        """The results of a user's shard_map, which reads its operands as it says."""
        read = []
        for k, x in enumerate(operands):
            op = self.plan.ops.get((*path, ENTERING, k))
            rule = None if op is None else self.plan.rules[op.index]
            given = None if op is None or rule is None else operand_layout(rule, given_choice(rule, self.plan.assignment.mesh.sizes), 0)
            read.append(x if op is None or given is None else self.read(x, op.operands[0], given))
        leaving = (self.plan.ops.get((*path, LEAVING, k)) for k in range(len(eqn.outvars)))
        results = zip(apply(eqn, read), leaving, strict=True)
        return [x if op is None else self.plan.constrained(x, op.results[0], self.plan.layout(op.results[0])) for x, op in results]

    def _replicated(self, op: Op, eqn: JaxprEqn, operands: list[Any]) -> list[Any]:
        """The results of an op without a rule: it reads whole arrays, unless it partitions itself."""
        if not is_self_partitioned(op.primitive):
            whole = replicated(self.plan.assignment.mesh)
            operands = [self.read(x, value, whole) for x, value in zip(operands, op.operands, strict=True)]
        return self._constrained_results(op, apply(eqn, operands))

    def _constrained_results(self, op: Op, results: Sequence[Any]) -> list[Any]:
        return [self.plan.constrained(x, value, self.plan.layout(value)) for x, value in zip(results, op.results, strict=True)]

    def _follows(self, op: Op, rule: Rule, choice: Choice) -> bool:
        """Whether the result needs no constraint: its layout follows from the operands', and every reader needs that layout."""
        if op.primitive == "transpose" and op.operands[0] in self.plan.late:
            return False
        sharded = {factor for factor, _ in choice if factor >= 0}
        if not op.results or not propagates(op.primitive, rule, sharded) or reductions(rule, choice) or _per_shard(op):
            return False
        layouts = [computed_layout(rule, choice, k) for k in range(len(op.results))]
        if any(
            value in self.plan.resharded or layout != self.plan.layout(value) for value, layout in zip(op.results, layouts, strict=True)
        ):
            return False
        arrays = [dims for dims, operand in zip(rule.operands, op.operands, strict=True) if not self.plan.free[operand]]
        if not all(arrays):  # XLA merges equal broadcasts of a scalar
            return False
        known = {factor for dims in arrays for factor in _factors(dims)}
        return bool(arrays) and all(
            factor in known for layout in layouts for (factor, _), dim in zip(choice, layout, strict=True) if dim >= 0
        )


def _n_passed_on(op: Op, number: int) -> int:
    """How many inputs of a loop's body, the first ones, are constants that the same block carries on to the next trip."""
    if op.primitive == "while" and number == 1:
        return op.params["body_nconsts"]
    in_block = op.primitive == "scan" and "ft_in" in op.params  # from jax 0.11; before, the block calls a scan's body as a function
    return num_consts(op.params) if in_block else 0


def _factors(dims: Dims) -> set[int]:
    return {factor for dim in dims for factor in dim}


def needs_shard_map(op: Op, rule: Rule, choice: Choice, sizes: tuple[int, ...]) -> bool:
    """Whether an op is lowered inside `jax.shard_map`, since no constraint makes the partitioner follow its rule."""
    return bool(exchanges(rule, choice, sizes)) or (_per_shard(op) and any(factor >= 0 for factor, _ in choice))


def _per_shard(op: Op) -> bool:
    return runs_per_shard(op.primitive, op.params)
