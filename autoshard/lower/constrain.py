"""A program with every sharding written into it, so that the partitioner has nothing left to decide.

An operand that an op reads in another layout than the value has is constrained at that use, by way of the layouts of
the cheapest reshard; a result is constrained as its op leaves it, and once more where a reduction is scattered; so is
whatever enters or leaves a loop, a branch or a checkpoint.

A constraint that cannot change anything is left out: a result *follows* where its layout is that of its operands carried
through the op, and everybody reads it so. Between the constraints that remain, such values form regions in which each op
agrees with all its neighbours, so that propagation has one answer. A value that somebody reads in another layout is never
left loose: the reader's constraint would compete with the operands. Nor is a result of which an operand is a scalar that is stretched:
XLA:TPU makes one of equal broadcasts before it propagates, and what one region reads would spread into the other. Rows that are stretched
in two ways are two arrays.

Constraints cost: XLA simplifies before it partitions, and cannot see past one. So a product that is combined and that only a transpose
reads is made turned around, and the transpose is constrained; and what loops read that is made of constants is not.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import numpy as np
from jax.extend.core import ClosedJaxpr, JaxprEqn
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec

from autoshard.analysis.values import free_values
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
    operand_layout,
    reductions,
    replicated,
    result_layout,
    result_layouts,
)
from autoshard.lower.interpret import Interpreter, apply, bind, ops_by_path, product
from autoshard.lower.mesh import to_named_sharding
from autoshard.lower.plan import Plan, homes
from autoshard.lower.shards import Sharded
from autoshard.lower.xla_workarounds import with_workarounds
from autoshard.primitives import is_self_partitioned
from autoshard.rules import propagates, runs_per_shard
from autoshard.trace.structure import types_of

Constrain = Callable[[Any, NamedSharding, int], Any]
"""``(array, sharding, value number)`` to the array with the sharding written on it."""


def constrain_sharding(x: Any, sharding: NamedSharding, _: int) -> Any:
    """The array with the sharding written on it."""
    return jax.lax.with_sharding_constraint(x, sharding)


# Where the type stays, these are lowered to nothing: the result is the operand's own array.
HANDED_ON = frozenset({"name", "copy", "convert_element_type", "device_put", "reshard", "sharding_constraint"})


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
    """A function from flat arguments to flat results that computes what ``jaxpr`` does, sharded as the assignment says.

    ``graph`` and ``rules`` are those of the same jaxpr; ``constrain`` is called for every constraint, in the same order each time.
    Where the function is ``differentiable``, custom derivatives inside stay in force. To be called under `jax.jit`.
    """
    free = tuple(free_values(graph))
    ops, constants = ops_by_path(graph), frozenset(graph.constants)
    tangled = _tangled(graph, free)
    plan = _Plan(ops, rules, assignment, reshard_path, homes(graph), free, mesh, constrain, tangled, constants, differentiable)
    leaving = result_layouts(graph, assignment)
    plan = replace(plan, contested=_contested(graph, plan, leaving))
    plan = replace(plan, late=_late(graph, plan), given=_given(graph, plan))

    def function(*arguments: Any) -> list[Any]:
        region = _Region(plan)
        entered = [plan.pin(x, value, plan.layout(value)) for x, value in zip(arguments, graph.arguments, strict=True)]
        results = region.run(jaxpr.jaxpr, jaxpr.consts, entered)
        return [region.handed(x, value, layout) for x, value, layout in zip(results, graph.results, leaving, strict=True)]

    return function


@dataclass(frozen=True, slots=True, eq=False)
class _Plan(Plan):
    """What the whole program is lowered by.

    Attributes:
        tangled: the free values that other free ones read twice, all that is made of them, and all that is made for those.
        constants: values that the function captured.
        differentiable: whether custom derivatives stay in force.
        contested: values that somebody reads in another layout than their own.
        late: products summed over sharded dimensions, and transposes of them, that a transpose alone reads: the layout in which each is
            computed, and whether that transpose leaves the product with its operands in each other's places.
        given: what loops read that is made of constants, in one layout: it is left to the partitioner, and XLA fuses it into its readers.
    """

    mesh: jax.sharding.Mesh | AbstractMesh
    constrain: Constrain
    tangled: frozenset[int]
    constants: frozenset[int]
    differentiable: bool
    contested: frozenset[int] = frozenset()
    late: Mapping[int, tuple[Layout, bool]] = field(default_factory=dict)
    given: frozenset[int] = frozenset()

    def own(self, value: int, layout: Layout) -> bool:
        """Whether the value's own array has this layout; what is made of constants has none."""
        return not self.free[value] and layout == self.layout(value)

    def pin(self, x: Any, value: int, layout: Layout) -> Any:
        rank = np.ndim(x)
        return self.constrain(x, to_named_sharding(layout, rank, self.mesh), value) if rank else x

    def reshard(self, x: Any, value: int, source: Layout, target: Layout) -> Any:
        for step in self.reshard_path(value, source, target):
            x = self.pin(x, value, step.target)
        return x


class _Region(Interpreter):
    """One region while it is constrained.

    Attributes:
        loose: values whose own array carries no constraint, because it follows from their operands.
        made: per value and layout the copy that all its readers in this region share.
        recipes: per free value its op, equation and operands.
        fresh: per tangled value and layout what was made for it alone.
        waiting: per late value its product's equation and operands.
        stretched: per value and layout, and what it is stretched to, per way in which the dimensions are sharded that it has not the
            array for that.
    """

    def __init__(self, plan: _Plan, loose: set[int] | None = None):
        super().__init__(plan.ops, plan.differentiable)
        self.plan = plan
        self.loose = set(plan.constants) if loose is None else loose
        self.made: dict[tuple[int, Layout], Any] = {}
        self.recipes: dict[int, tuple[Op, JaxprEqn, list[Any]]] = {}
        self.fresh: dict[tuple[int, Layout], Any] = {}
        self.waiting: dict[int, tuple[JaxprEqn, list[Any]]] = {}
        self.stretched: dict[tuple[int, Layout, tuple[int, ...]], dict[Layout, Any]] = {}

    def region(self) -> _Region:
        return _Region(self.plan)

    def derived(self) -> _Region:
        return _Region(self.plan, self.loose)

    def read(self, x: Any, value: int, target: Layout) -> Any:
        """The value in the target layout: its own array, or the region's one copy."""
        plan = self.plan
        if not np.ndim(x):
            return x
        if plan.own(value, target):
            # Shardy has the last of constraints in a row hold for later readers of what the first one reads: they read the first.
            return self._pinned(x, value) if value in plan.constants or (value, target) in self.made else x
        if (value, target) not in self.made:
            free = plan.free[value]
            self.made[value, target] = plan.pin(self._constant(x, value, target), value, target) if free else self._copy(x, value, target)
        return self.made[value, target]

    def _constant(self, x: Any, value: int, target: Layout) -> Any:
        """A free value for readers in one layout.

        Of ``i[:, None] >= i[None, :]`` one side wants ``i`` sharded and the other whole. The partitioner computes constants again for each
        of their readers, but for those that are constants themselves: what these share is computed again here, once in each layout.
        """
        if value not in self.plan.tangled or value not in self.recipes:
            return x
        wanted: dict[tuple[int, Layout], list[tuple[int, Layout]]] = {}
        waiting = [(value, target)]
        while waiting:
            made = waiting.pop()
            if made[0] in self.recipes and made not in wanted and made not in self.fresh:
                wanted[made] = self._sources(*made)
                waiting += wanted[made]
        for made in sorted(wanted, key=lambda made: self.recipes[made[0]][0].index):
            op, eqn, operands = self.recipes[made[0]]
            read = [self.fresh.get(source, array) for source, array in zip(wanted[made], operands, strict=True)]
            self.fresh[made] = apply(eqn, read)[op.results.index(made[0])]
        return self.fresh[value, target]

    def _sources(self, value: int, target: Layout) -> list[tuple[int, Layout]]:
        """What a free value is made of, each with the layout that it is wanted in."""
        op, rule = self.recipes[value][0], self.plan.rules[self.recipes[value][0].index]
        result = op.results.index(value)
        whole = replicated(self.plan.assignment.mesh)
        return [
            (operand, _carried(rule.results[result], rule.operands[k], target) if rule else whole) for k, operand in enumerate(op.operands)
        ]

    def _copy(self, x: Any, value: int, target: Layout) -> Any:
        plan = self.plan
        source = plan.source(value, target)
        x = self._pinned(x, value) if plan.own(value, source) else self.read(x, value, source)
        return plan.reshard(x, value, source, target)

    def _pinned(self, x: Any, value: int) -> Any:
        """The value's own array with its layout written on it."""
        if value not in self.loose:
            return x
        own = self.plan.layout(value)
        if (value, own) not in self.made:
            self.made[value, own] = self.plan.pin(x, value, own)
        return self.made[value, own]

    def handed(self, x: Any, value: int, target: Layout) -> Any:
        """The value as it goes into another region: like `read`, and constrained in any case."""
        return self._pinned(x, value) if self.plan.own(value, target) else self.read(x, value, target)

    def control_flow(self, op: Op, eqn: JaxprEqn, operands: list[Any]) -> list[Any]:
        layouts = self.plan.flows(op).operands
        held = {flow.value for holder in op.holders if holder.value not in self.plan.given for flow in holder.sources}
        entering = [
            self.handed(x, value, layout) if value in held or not self.plan.free[value] else x
            for x, value, layout in zip(operands, op.operands, layouts, strict=True)
        ]
        return self._pinned_results(op, self.rebound(op, eqn, entering))

    def enter(self, op: Op, number: int, arguments: Sequence[Any]) -> list[Any]:
        plan = self.plan
        inputs, layouts = op.bodies[number].inputs, plan.flows(op).inputs[number]
        self.loose |= plan.given.intersection(inputs)
        settled = zip(arguments, inputs, layouts, strict=True)
        entered = [x if value in plan.given else plan.pin(x, value, layout) for x, value, layout in settled]
        # JAX hands a while loop's constants on from trip to trip, and Shardy has the last of constraints in a row hold for that too.
        n_handed_on = op.params["body_nconsts"] if op.primitive == "while" and number == 1 else 0
        for k, value in enumerate(inputs[:n_handed_on]):
            if value in plan.contested and np.ndim(entered[k]):
                entered[k] = plan.pin(jax.lax.optimization_barrier(entered[k]), value, layouts[k])
        return entered

    def leave(self, op: Op, number: int, results: Sequence[Any]) -> list[Any]:
        layouts = self.plan.flows(op).outputs[number]
        return [self.handed(x, value, layout) for x, value, layout in zip(results, op.bodies[number].outputs, layouts, strict=True)]

    def op(self, op: Op, eqn: JaxprEqn, operands: list[Any]) -> list[Any]:
        plan = self.plan
        rule = plan.rules[op.index]
        if rule is None:
            return self._replicated(op, eqn, operands)
        choice = plan.assignment.choice(op.index)
        targets = [operand_layout(rule, choice, position) for position in range(len(operands))]
        if op.results and all(plan.free[value] for value in op.results):
            self.recipes.update((value, (op, eqn, operands)) for value in op.results)
            return apply(eqn, operands)
        follows = self._follows(op, rule, choice)
        read = [
            self._constant(x, value, target) if follows and plan.free[value] else self.read(x, value, target)
            for x, value, target in zip(operands, op.operands, targets, strict=True)
        ]
        if len(op.results) == 1 and all(factor.kind == "pass_through" for factor in rule.factors):
            shape = getattr(eqn.outvars[0].aval, "shape", ())
            read = [self._stretched(x, value, rule, choice, k, shape) for k, (x, value) in enumerate(zip(read, op.operands, strict=True))]
        changed = with_workarounds(op.primitive, rule, choice, read)
        settled = zip(changed, read, op.operands, targets, strict=True)
        guards = [new if new is old else plan.pin(new, value, target) for new, old, value, target in settled]
        results = self._bound(op, eqn, rule, choice, guards, targets)
        if op.primitive == "dot_general" and op.results[0] in plan.late:
            self.waiting[op.results[0]] = eqn, guards
        elif op.primitive == "transpose" and op.operands[0] in self.waiting:
            waiting, (_, swapped) = self.waiting[op.operands[0]], plan.late[op.operands[0]]
            if op.results[0] in plan.late:
                self.waiting[op.results[0]] = waiting
            else:
                results = [product(*waiting, swapped)]
        if follows or not plan.late.keys().isdisjoint(op.results):
            self.loose.update(op.results)
            return results
        return [self._settled(x, op, rule, choice, k) for k, x in enumerate(results)]

    def _stretched(self, x: Any, value: int, rule: Rule, choice: Choice, operand: int, shape: tuple[int, ...]) -> Any:
        """An operand of a result that has more dimensions: an array of its own for each way in which those are sharded.

        XLA makes one of equal broadcasts, and gathers what it shards for one reader if another wants it whole.
        """
        more = _factors(rule.results[0]) - _factors(rule.operands[operand])
        if not more or not np.ndim(x) or self.plan.free[value]:
            return x
        target, made = operand_layout(rule, choice, operand), computed_layout(rule, choice, 0)
        arrays = self.stretched.setdefault((value, target, shape), {})
        way = tuple(dim if factor in more else -1 for dim, (factor, _) in zip(made, choice, strict=True))
        if way not in arrays:
            arrays[way] = self.plan.pin(next(reversed(arrays.values())), value, target) if arrays else x
        return arrays[way]

    def _bound(self, op: Op, eqn: JaxprEqn, rule: Rule, choice: Choice, read: list[Any], targets: Sequence[Layout]) -> list[Any]:
        """The op's results; where its rule allows what the partitioner would gather for, of each device's shards and what they exchange."""
        mesh, axes = self.plan.mesh, self.plan.assignment.mesh
        if not needs_shard_map(op, rule, choice, axes.sizes):
            return apply(eqn, read)

        def specs(arrays: Iterable[Any], layouts: Iterable[Layout]) -> tuple[PartitionSpec, ...]:
            return tuple(to_named_sharding(layout, np.ndim(x), mesh).spec for x, layout in zip(arrays, layouts, strict=True))

        leaving = specs((v.aval for v in eqn.outvars), (computed_layout(rule, choice, k) for k in range(len(eqn.outvars))))
        entering = specs(read, targets)

        whole = tuple(tuple(np.shape(x)) for x in read), tuple(each.shape for each in types_of(eqn.outvars))

        def one_device(*shards: Any) -> list[Any]:
            def bound(*operands: Any, **replaced: Any) -> list[Any]:
                return bind(eqn, operands, **replaced)

            return Sharded(op.primitive, op.params, bound, rule, choice, axes, *whole).run(shards)

        # Sharded and replicated operands meet in one primitive, which shard_map's own type check refuses.
        return jax.shard_map(one_device, mesh=mesh, in_specs=entering, out_specs=[*leaving], check_vma=False)(*read)

    def _settled(self, x: Any, op: Op, rule: Rule, choice: Choice, result: int) -> Any:
        """A result in its value's layout. A scattered reduction takes two constraints: the whole of it, then its slice."""
        value = op.results[result]
        combined = computed = result_layout(rule, choice, result)
        if reductions(rule, choice):
            computed = computed_layout(rule, choice, result)
        elif op.primitive == "transpose" and op.operands[0] in self.plan.late:
            computed = _carried(rule.operands[0], rule.results[0], self.plan.late[op.operands[0]][0])
        if computed != combined:
            x = self.plan.pin(x, value, computed)
        return self.plan.reshard(self.plan.pin(x, value, combined), value, combined, self.plan.layout(value))

    def _replicated(self, op: Op, eqn: JaxprEqn, operands: list[Any]) -> list[Any]:
        """The results of an op that nothing is known of: it reads whole arrays, unless it partitions itself."""
        if not is_self_partitioned(op.primitive):
            whole = replicated(self.plan.assignment.mesh)
            operands = [self.read(x, value, whole) for x, value in zip(operands, op.operands, strict=True)]
        return self._pinned_results(op, apply(eqn, operands))

    def _pinned_results(self, op: Op, results: Sequence[Any]) -> list[Any]:
        return [self.plan.pin(x, value, self.plan.layout(value)) for x, value in zip(results, op.results, strict=True)]

    def _follows(self, op: Op, rule: Rule, choice: Choice) -> bool:
        """Whether the result's layout needs no constraint: it follows from the operands', and every reader wants it so."""
        if op.primitive == "transpose" and op.operands[0] in self.plan.late:
            return False
        sharded = {factor for factor, _ in choice if factor >= 0}
        if not op.results or not propagates(op.primitive, rule, sharded) or reductions(rule, choice) or _per_shard(op):
            return False
        layouts = [computed_layout(rule, choice, k) for k in range(len(op.results))]
        if any(
            value in self.plan.contested or layout != self.plan.layout(value) for value, layout in zip(op.results, layouts, strict=True)
        ):
            return False
        arrays = [dims for dims, operand in zip(rule.operands, op.operands, strict=True) if not self.plan.free[operand]]
        if not all(arrays):  # a scalar's broadcast is shared by all who stretch it
            return False
        known = {factor for dims in arrays for factor in _factors(dims)}
        return bool(arrays) and all(
            factor in known for layout in layouts for (factor, _), dim in zip(choice, layout, strict=True) if dim >= 0
        )


def _contested(graph: Graph, plan: _Plan, leaving: Iterable[Layout]) -> frozenset[int]:
    """The values that are read in another layout than their own: by an op, by what leaves a body, or by the program's result.

    So are those that are such a value under another name: what is constrained is the array, for all who read it.
    """

    def reads() -> Iterator[tuple[int, Layout]]:
        yield from zip(graph.results, leaving, strict=True)
        for op in graph.walk():
            if op.bodies:
                flows = plan.flows(op)
                yield from zip(op.operands, flows.operands, strict=True)
                for body, outputs in zip(op.bodies, flows.outputs, strict=True):
                    yield from zip(body.outputs, outputs, strict=True)
            elif (rule := plan.rules[op.index]) is not None:
                choice = plan.assignment.choice(op.index)
                yield from ((value, operand_layout(rule, choice, k)) for k, value in enumerate(op.operands))
            else:
                yield from ((value, replicated(plan.assignment.mesh)) for value in op.operands)

    contested = {value for value, target in reads() if target != plan.layout(value)}
    for op in reversed(graph.walk()):
        if op.primitive in HANDED_ON and op.results[0] in contested and graph.values[op.operands[0]] == graph.values[op.results[0]]:
            contested.add(op.operands[0])
    return frozenset(contested)


def _given(graph: Graph, plan: _Plan) -> frozenset[int]:
    """The inputs of loops' bodies that are made of constants outside, and that are all read as they lie."""
    alone = (holder for holder in graph.loop_constants() if not holder.views and holder.value not in plan.contested)
    return frozenset(holder.value for holder in alone if plan.free[holder.sources[0].value])


def _turned(product: Op, rank: int, made: int) -> tuple[int, ...]:
    """The order of a ``dot_general``'s dimensions in which its operands have changed places, by the first one's rank and its own."""
    (contracted, _), (batch, _) = product.params["dimension_numbers"]
    first = rank - len(contracted)  # the dimensions of the result that are the batch's and the first operand's
    return (*range(len(batch)), *range(first, made), *range(len(batch), first))


def _late(graph: Graph, plan: _Plan) -> dict[int, tuple[Layout, bool]]:
    """The products, summed over sharded dimensions, that are made turned around: a transpose alone reads them as they are.

    As `_Plan.late` has them. What is constrained is the transpose: a constraint between the two would keep XLA from making one product of
    them, and the gradient, and all state that is updated with it, would lie in the other order.
    """
    reads = Counter(graph.results)
    for op in graph.walk():
        reads.update(op.operands)
        reads.update(flow.value for holder in op.holders for flow in holder.sources)
        reads.update(value for body in op.bodies for value in body.outputs)
    # Per value the layout in which it is computed, the order of its product's dimensions, the two that can be made, and those before it.
    chains: dict[int, tuple[Layout, tuple[int, ...], tuple[tuple[int, ...], ...], dict[int, tuple[Layout, bool]]]] = {}
    late: dict[int, tuple[Layout, bool]] = {}
    for op in graph.walk():
        rule, choice = plan.rules[op.index], plan.assignment.choice(op.index)
        if op.primitive == "dot_general" and rule and reductions(rule, choice) and not exchanges(rule, choice, plan.assignment.mesh.sizes):
            layout, order = computed_layout(rule, choice, 0), tuple(range(len(rule.results[0])))
            made, before = (order, _turned(op, len(rule.operands[0]), len(order))), {}
        elif op.primitive == "transpose" and rule and op.operands[0] in chains:
            layout, order, made, before = chains[op.operands[0]]
            order = tuple(order[dim] for dim in op.params["permutation"])
            before = {**before, op.operands[0]: (layout, order != made[0])}
            layout = _carried(rule.operands[0], rule.results[0], layout)
            if order in made:
                late.update(before)
        else:
            continue
        (value,) = op.results
        if reads[value] == 1 and value not in plan.contested and result_layout(rule, choice, 0) == plan.layout(value):
            chains[value] = layout, order, made, before
    return late


def _tangled(graph: Graph, free: Sequence[bool]) -> frozenset[int]:
    makers = [op for op in graph.walk() if op.results and not op.bodies and all(free[value] for value in op.results)]
    read = Counter(value for op in makers for value in op.operands if graph.values[value].rank)
    found: set[int] = set()
    for op in makers:
        made_of_such = any(value in found for value in op.operands)
        found.update(value for value in op.results if made_of_such or read[value] > 1)
    for op in reversed(makers):
        if any(value in found for value in op.results):
            found.update(op.operands)
    return frozenset(found)


def _factors(dims: Dims) -> set[int]:
    return {factor for dim in dims for factor in dim}


def _carried(source: Dims, target: Dims, layout: Layout) -> Layout:
    """A tensor's layout carried through an op to another of its tensors, each dimension by its major factor."""
    where = {factor: dim for dim, factors in enumerate(target) for factor in factors}
    return tuple(where.get(next(iter(source[dim]), -1), -1) if dim >= 0 else -1 for dim in layout)


def needs_shard_map(op: Op, rule: Rule, choice: Choice, sizes: tuple[int, ...]) -> bool:
    """Whether an op is lowered as what each device does with its shards, since no constraint makes the partitioner do so."""
    return bool(exchanges(rule, choice, sizes)) or (_per_shard(op) and any(factor >= 0 for factor, _ in choice))


def _per_shard(op: Op) -> bool:
    return runs_per_shard(op.primitive, op.params)
