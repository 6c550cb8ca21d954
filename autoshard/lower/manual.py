"""Lowering to one `jax.shard_map` over the whole mesh: each device computes on its shards, and every collective is the planned one.

The partitioner decides nothing. Operands are resharded to the layouts of an op's choice by the cheapest collectives; the op runs on
shards (`autoshard.lower.shards`); partial results are combined and resharded to their value's layout. A copy in another layout is made once
per region (the program, or one body) and shared by its readers. Loops, branches and checkpoints are bound again around bodies that
are lowered the same way. Values of constants alone are computed in each layout in which they are read, without communication.

An op without a rule reads whole arrays and runs on every device; a callback with an effect runs on the first. A user's `jax.shard_map` is
inlined where it has the same mesh; otherwise there is no manual lowering (`obstacle`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn
from jax.sharding import PartitionSpec

from autoshard.analysis.partial_sums import carried_move
from autoshard.compilers import Compiler
from autoshard.cost.narrow_sums import Crossing
from autoshard.cost.prefetch import Prefetch, prefetches
from autoshard.cost.reshard import Combination, ReshardPath, Step, combinations
from autoshard.errors import ShardingError
from autoshard.ir import (
    Assignment,
    Choice,
    Graph,
    Layout,
    Op,
    Rule,
    choice_for,
    computed_layout,
    given_choice,
    is_transfer,
    local_shape,
    operand_layout,
    reductions,
    result_layouts,
    view_of,
)
from autoshard.ir.scan import num_carry, num_consts
from autoshard.lower.collectives import combined
from autoshard.lower.interpret import Interpreter, Path, bind, bind_unplaced, manual_context, unread
from autoshard.lower.manual_plan import ManualPlan, manual_plan
from autoshard.lower.mesh import to_partition_spec
from autoshard.lower.nested import Inside, Mesh, axes_of
from autoshard.lower.shards import Sharded
from autoshard.lower.transfers import Waiting
from autoshard.lower.transforms import whole_transform
from autoshard.lower.windows import windowed
from autoshard.lower.xla_workarounds import bind_in_range
from autoshard.primitives import is_placement, is_rearrangement, is_stateful
from autoshard.rules import in_order, registered, same_on_shards
from autoshard.trace.mapped import BODY, ENTERING, LEAVING, MAPPED
from autoshard.trace.structure import opened, types_of


def obstacle(graph: Graph, mesh: Mesh) -> str | None:
    """Why a program has no manual lowering on a mesh, and what is done instead; None where it has one."""
    for op in graph.walk():
        if op.primitive != MAPPED:
            continue
        if not in_order(op):
            return (
                "axes that split one dimension are in the order of the mesh where a program is lowered manually, and a spec of the "
                f"shard_map at {op.origin} has others first. The step is lowered by sharding constraints instead."
            )
        if axes_of(op.params["mesh"], mesh) is None:
            inner, ours = (dict(each.shape) for each in (op.params["mesh"], mesh))
            return (
                "a shard_map becomes part of the manual program where its mesh has the strategy's devices in the same order and each "
                f"of its axes is one or several of the strategy's; the one at {op.origin} has {inner}, the strategy {ours}. The step is "
                "lowered by sharding constraints instead, from which XLA's partitioner makes the collectives."
            )
    return None


def manual_program(
    jaxpr: ClosedJaxpr,
    graph: Graph,
    rules: tuple[Rule | None, ...],
    assignment: Assignment,
    mesh: Mesh,
    reshard_path: ReshardPath,
    copies: jax.sharding.Mesh | None = None,
    narrow: Mapping[str, Crossing] | None = None,
    compiler: Compiler | None = None,
) -> Callable[..., list[Any]]:
    """The function of ``jaxpr``, from flat arguments to flat results, sharded by the assignment.

    ``graph`` and ``rules`` are those of the same jaxpr. To be called under `jax.jit`, and not to be differentiated: custom derivatives
    inside are inlined.

    Args:
        copies: the mesh with one more axis, the first, each index of which runs a copy of the program on arguments of its own: arguments
            and results have one more dimension, the first, split over it.
        narrow: the mesh axes along which sums cross levels in a narrow type.
        compiler: tells the depth of products that are stored before they update state, and the lanes that stacks of slices are to fill.

    Raises:
        ShardingError: there is an `obstacle`.
    """
    if (reason := obstacle(graph, mesh)) is not None:
        raise ShardingError(reason)
    plan = manual_plan(graph, rules, assignment, mesh, reshard_path, narrow or {}, compiler)
    leaving = result_layouts(graph, assignment)

    captured = list(jaxpr.consts)
    read = {value for op in graph.walk() for value in op.operands} | set(graph.results)
    if not any(value in read and graph.values[value].size for value in (*graph.arguments, *graph.constants)):
        captured.append(np.zeros((), np.float32))  # XLA refuses manual computations that read nothing

    def one_device(constants: Sequence[Any], arguments: Sequence[Any]) -> list[Any]:
        region = _Region(plan)
        results = region.run(jaxpr.jaxpr, constants[: len(jaxpr.consts)], arguments)
        placed = [region.read(x, value, layout) for x, value, layout in zip(results, graph.results, leaving, strict=True)]
        on_host = [graph.values[value].on_host for value in graph.results]
        placed = [jax.device_put(x, jax.memory.Space.Host) if to_host else x for x, to_host in zip(placed, on_host, strict=True)]
        unread = constants[len(jaxpr.consts) :]
        return lax.optimization_barrier((placed, *unread))[0] if unread else placed

    def copy(constants: Sequence[Any], arguments: Sequence[Any]) -> list[Any]:
        return [x[None] for x in one_device(constants, [x[0] for x in arguments])]

    def spec(value: int, layout: Layout) -> PartitionSpec:
        own = to_partition_spec(layout, graph.values[value].rank, assignment.mesh.names)
        return own if copies is None else PartitionSpec(copies.axis_names[0], *own)

    entering = [spec(value, plan.layout(value)) for value in graph.arguments]
    made = [spec(value, layout) for value, layout in zip(graph.results, leaving, strict=True)]

    # One primitive may have sharded and replicated operands, which shard_map's type check refuses.
    in_specs = [PartitionSpec()] * len(captured), entering
    function, over = (one_device, mesh) if copies is None else (copy, copies)
    mapped = jax.shard_map(function, mesh=over, in_specs=in_specs, out_specs=made, check_vma=False)
    return lambda *arguments: mapped(captured, list(arguments))


def derived_from(program: Callable[..., list[Any]], other: Callable[[], Callable[..., list[Any]]]) -> Callable[..., list[Any]]:
    """The program with the derivatives of another one that computes the same; ``other`` is called when it is differentiated."""

    @jax.custom_jvp
    def function(*arguments: Any) -> list[Any]:
        return program(*arguments)

    function.defjvp(lambda primals, tangents: jax.jvp(other(), primals, tangents))
    return function


class _Region(Interpreter):
    """The lowering of one region. Arrays are shards in their values' layouts; a free value has no array of its own.

    Attributes:
        copies: per value and other layout, the array that all readers in this region share; of free values all arrays.
        recipes: per free value its op and equation, and the literals among its operands.
        views: per result of an op that rearranges its operand, the op and its equation.
        partial: per late value, the collectives that combine it; one record for all regions, since a checkpoint's results may be late.
        waiting: the order of transfers between the device and its host.
        ahead: per value and layout, the array that the previous trip has gathered.
    """

    is_final = True

    def __init__(
        self,
        plan: ManualPlan,
        ahead: dict[tuple[int, Layout], Any] | None = None,
        partial: dict[int, tuple[Combination, ...]] | None = None,
    ):
        super().__init__(plan.ops, differentiable=False)
        self.plan = plan
        self.copies: dict[tuple[int, Layout], Any] = {}
        self.recipes: dict[int, tuple[Op, JaxprEqn, list[Any]]] = {}
        self.views: dict[int, tuple[Op, JaxprEqn]] = {}
        self.partial: dict[int, tuple[Combination, ...]] = {} if partial is None else partial
        self.waiting = Waiting()
        self.ahead: dict[tuple[int, Layout], Any] = {} if ahead is None else ahead
        self.copies.update(self.ahead)

    def region(self) -> _Region:
        return _Region(self.plan, self.ahead, self.partial)

    def context(self, eqn: JaxprEqn) -> AbstractContextManager:
        return manual_context(eqn)

    def types(self, op: Op, number: int, body: Jaxpr) -> list[jax.ShapeDtypeStruct]:
        """The types of a body's inputs as shards."""
        sizes = self.plan.assignment.mesh.sizes
        layouts = self.plan.flows(op).inputs[number]
        found = [
            jax.ShapeDtypeStruct(tuple(map(int, local_shape(whole.shape, layout, sizes))), whole.dtype, weak_type=whole.weak_type)
            for whole, layout in zip(types_of(body.invars), layouts, strict=True)
        ]
        for position, value in self._stacks(op, op.operands):
            found[position] = found[position].update(shape=self.plan.stacks[value][1:])
        return found

    def _stacks(self, op: Op, values: Sequence[int]) -> list[tuple[int, int]]:
        """The stacks among a scan's operands or results that are stored in another shape, each with its position."""
        return [(k, value) for k, value in enumerate(values) if value in self.plan.stacks] if op.primitive == "scan" else []

    def enter(self, op: Op, number: int, arguments: Sequence[Any]) -> list[Any]:
        plan, found = self.plan, list(arguments)
        for position, value in self._stacks(op, op.operands):
            local = local_shape(plan.graph.values[value].shape, plan.layout(value), plan.assignment.mesh.sizes)
            found[position] = lax.reshape(found[position], tuple(map(int, local[1:])))
        return found

    # -- reading ----------------------------------------------------------------------------------------------------

    def read(self, x: Any, value: int, target: Layout) -> Any:
        """The value in the target layout: its own array, or the region's copy."""
        plan = self.plan
        if value in self.recipes:
            return self._expanded(value, target)
        own = plan.layout(value)
        if own == target or not plan.graph.values[value].rank:
            return x
        if (value, target) not in self.copies:
            self.copies[value, target] = self._copy(x, value, target)
        return self.copies[value, target]

    def _copy(self, x: Any, value: int, target: Layout) -> Any:
        """The value in another layout than its own: as a view of an array that this region has, or resharded."""
        plan = self.plan
        if value in self.views:
            op, eqn = self.views[value]
            rule, sizes = plan.rules[op.index], plan.assignment.mesh.sizes
            before = view_of(op.primitive, rule, target, sizes)
            if rule is not None and before is not None and (operand := self.copies.get((op.operands[0], before))) is not None:
                choice = choice_for(rule, 0, target, sizes)
                assert choice is not None, "view_of found one"
                return self._sharded(op, eqn, choice).computed([operand])[0]
        source = plan.source(value, target)
        return plan.resharded(self.read(x, value, source), value, source, target)

    def _expanded(self, value: int, target: Layout) -> Any:
        """A free value, computed from constants in the target layout; where an op cannot be split for that, whole and then sliced."""
        plan, whole = self.plan, self.plan.whole
        wanted: dict[tuple[int, Layout], tuple[Choice | None, list[Layout]]] = {}
        waiting = [(value, target)]
        while waiting:
            number, layout = key = waiting.pop()
            if key in wanted or key in self.copies or number not in self.recipes:
                continue
            op, _, _ = self.recipes[number]
            rule = plan.rules[op.index]
            choice = None if rule is None else choice_for(rule, op.results.index(number), layout, plan.assignment.mesh.sizes)
            if rule is not None and choice is not None:
                sources = [operand_layout(rule, choice, k) for k in range(len(op.operands))]
            else:
                sources = [whole] * len(op.operands)
            wanted[key] = choice, sources
            waiting += zip(op.operands, sources, strict=True) if choice is not None or layout == whole else [(number, whole)]
        for number, layout in sorted(wanted, key=lambda key: (self.recipes[key[0]][0].index, key[1] != whole)):
            (op, eqn, operands), (choice, sources) = self.recipes[number], wanted[number, layout]
            if choice is None and layout != whole:
                self.copies[number, layout] = plan.resharded(self.copies[number, whole], number, whole, layout)
                continue
            read = [self.copies.get((v, at), x) for v, at, x in zip(op.operands, sources, operands, strict=True)]
            if is_placement(op.primitive):
                results = read
            else:
                results = bind_in_range(eqn, read) if choice is None else self._sharded(op, eqn, choice).computed(read)
            self.copies[number, layout] = results[op.results.index(number)]
        return self.copies[value, target]

    # -- ops ----------------------------------------------------------------------------------------------------------

    def op(self, op: Op, eqn: JaxprEqn, operands: list[Any]) -> list[Any]:
        plan = self.plan
        rule = plan.rules[op.index]
        if op.results and all(plan.free[value] for value in op.results):
            self.recipes.update((value, (op, eqn, operands)) for value in op.results)
            return [None] * len(op.results)
        if is_rearrangement(op.primitive):
            self.views[op.results[0]] = op, eqn
        if is_transfer(op):
            return self._transferred(op, eqn, operands)
        choice = plan.assignment.choice(op.index)
        if rule is None or not self._runs_on_shards(op, eqn, rule, choice):
            return self._whole(op, eqn, operands)
        window = plan.windows.get(op.index)
        layouts = [operand_layout(rule, choice, k) for k in range(len(operands))]
        if window is not None and window.operand >= 0:
            layouts[window.operand] = window.step.source
        read = [self.read(x, value, layout) for x, value, layout in zip(operands, op.operands, layouts, strict=True)]
        if window is not None:
            made = windowed(lambda *parts: bind_unplaced(eqn, parts)[0], read, window, rule, plan.assignment.mesh)
            if window.operand < 0:
                return [plan.resharded(made, op.results[0], window.step.target, plan.layout(op.results[0]))]
            results = [made]
        elif is_placement(op.primitive):
            results = read
        else:
            results = self._sharded(op, eqn, choice).computed(read)
        return self.waiting.computed(op, [self._stored(x, op, rule, choice, k) for k, x in enumerate(results)], plan.graph.values)

    def _transferred(self, op: Op, eqn: JaxprEqn, operands: list[Any]) -> list[Any]:
        """The value in the other memory. It is resharded in the device's alone: results of the program are moved to hosts when they are."""
        plan, (value,), (made,) = self.plan, op.operands, op.results
        if plan.graph.values[made].on_host:
            x = self.read(operands[0], value, plan.layout(made))
            return [x] if made in plan.graph.results else self.waiting.sent(bind(eqn, [x]))
        arrived = self.waiting.fetched(value, lambda: bind(eqn, operands)[0])
        return [plan.resharded(arrived, made, plan.layout(value), plan.layout(made))]

    def _inlined(self, eqn: JaxprEqn, operands: list[Any], path: Path) -> list[Any]:
        made = whole_transform(self.plan, eqn, operands[0], path, self.read) if len(operands) == 1 else None
        return [made[0]] if made else super()._inlined(eqn, operands, path)

    def _sharded(self, op: Op, eqn: JaxprEqn, choice: Choice) -> Sharded:
        def bound(*operands: Any, **replaced: Any) -> list[Any]:
            return bind_in_range(eqn, operands, **replaced)

        rule, values = self.plan.rules[op.index], self.plan.graph.values
        assert rule is not None
        shapes = (tuple(values[value].shape for value in group) for group in (op.operands, op.results))
        return Sharded(op.primitive, op.params, bound, rule, choice, self.plan.assignment.mesh, *shapes)

    def _runs_on_shards(self, op: Op, eqn: JaxprEqn, rule: Rule, choice: Choice) -> bool:
        """Whether the primitive can run on shards: registered ones can, others where they lower to the same operations for shards."""
        if op.primitive in registered() or all(factor < 0 for factor, _ in choice):
            return True
        sizes = self.plan.assignment.mesh.sizes
        local = [
            tuple(map(int, local_shape(self.plan.graph.values[value].shape, operand_layout(rule, choice, k), sizes)))
            for k, value in enumerate(op.operands)
        ]
        return same_on_shards(eqn, local)

    def _stored(self, x: Any, op: Op, rule: Rule, choice: Choice, result: int) -> Any:
        """A result in its value's layout, with its partial sums combined, unless it is a late value."""
        plan, value = self.plan, op.results[result]
        at = computed_layout(rule, choice, result)
        moves = tuple(combinations(at, reductions(rule, choice)))
        if carried := next((self.partial[operand] for operand in op.operands if operand in self.partial), ()):
            moves = tuple(carried_move(move, op, at) for move in carried)
            at = moves[0][3]
        if value in plan.late:
            if moves:
                self.partial[value] = moves
            return x
        for kind, operator, axes, before, after in moves:
            step = Step(kind, axes, before, after, 0.0, 0.0)
            x = plan.combined(x, operator, axes, step if kind == "reduce_scatter" else None)
            at = after
        if moves or value in plan.apart:  # otherwise XLA may combine a sum of it instead, or widen it before combining
            x = lax.optimization_barrier(x)
        return plan.resharded(x, value, at, plan.layout(value))

    def _whole(self, op: Op, eqn: JaxprEqn, operands: Sequence[Any]) -> list[Any]:
        """The results of an op that is not sharded, on whole arrays."""
        whole = self.plan.whole
        read = [self.read(x, value, whole) for x, value in zip(operands, op.operands, strict=True)]
        results = _on_one_device(eqn, read, self.plan.mesh) if is_stateful(op.primitive) else bind_in_range(eqn, read)
        return [self.plan.resharded(x, value, whole, self.plan.layout(value)) for x, value in zip(results, op.results, strict=True)]

    def mapped(self, eqn: JaxprEqn, operands: list[Any], path: Path, nested: bool = False) -> list[Any]:
        """The results of a user's shard_map over the same devices, inlined; one inside another takes apart what each device has."""
        plan, axes = self.plan, axes_of(eqn.params["mesh"], self.plan.mesh)
        assert axes is not None, "an obstacle"
        entering, leaving = ([plan.ops.get((*path, side, k)) for k in range(n)] for side, n in _ends(eqn))

        def entered(op: Op, x: Any) -> Any:
            value, given = op.operands[0], self._given(op, enters=True)
            return plan.resharded(x, value, plan.whole, given) if nested else self.read(x, value, given)

        def left(op: Op, x: Any) -> Any:
            value, given = op.results[0], self._given(op, enters=False)
            return plan.resharded(x, value, given, plan.whole if nested else plan.layout(value))

        inputs = zip(operands, entering, opened(eqn.params["jaxpr"])[0].invars, strict=True)
        read = [unread(v) if op is None else entered(op, x) for x, op, v in inputs]
        inside = Inside(axes, plan.ops, lambda *of_nested: self.mapped(*of_nested, nested=True))
        results = inside.run(*opened(eqn.params["jaxpr"]), read, (*path, BODY))
        return [None if op is None else left(op, x) for x, op in zip(results, leaving, strict=True)]

    def _given(self, op: Op, enters: bool) -> Layout:
        """The layout of a shard_map's operand or result."""
        rule = self.plan.rules[op.index]
        assert rule is not None
        choice = given_choice(rule, self.plan.assignment.mesh.sizes)
        return operand_layout(rule, choice, 0) if enters else computed_layout(rule, choice, 0)

    def control_flow(self, op: Op, eqn: JaxprEqn, operands: list[Any]) -> list[Any]:
        layouts = self.plan.flows(op).operands
        entering = [self.read(x, value, layout) for x, value, layout in zip(operands, op.operands, layouts, strict=True)]
        plan = self.plan
        partial = {k: plan.loops[value] for k, value in enumerate(op.bodies[0].inputs) if value in plan.loops}
        started = {k: entering[k] for k in partial}
        entering = [jnp.zeros_like(x) if k in partial else x for k, x in enumerate(entering)]
        if plan.needs_no_barrier(op):
            eqn = eqn.replace(params={**eqn.params, "prevent_cse": False})
        found = prefetches(plan.graph, plan.rules, plan.assignment, op, plan.reshard_path)
        results = self._ahead(op, eqn, entering, found) if found else self.rebound(op, eqn, entering)
        for k, axes in partial.items():
            summed = lax.optimization_barrier(plan.combined(results[k - num_consts(op.params)], "sum", axes))
            results[k - num_consts(op.params)] = started[k] + summed
        return self.waiting.computed(op, results, plan.graph.values)

    def _ahead(self, op: Op, eqn: JaxprEqn, entering: Sequence[Any], found: Sequence[Prefetch]) -> list[Any]:
        """The results of a scan with prefetching: each trip gathers for the next one."""
        plan, params = self.plan, eqn.params
        consts, first_slice = num_consts(params), num_consts(params) + num_carry(params)
        length, step = params["length"], -1 if params["reverse"] else 1

        def gathered(trip: Any) -> list[Any]:
            slices = {k: lax.dynamic_index_in_dim(entering[k], trip, keepdims=False) for k in {each.operand for each in found}}
            return [self._gathered(each, slices[each.operand]) for each in found]

        def body(state: tuple, slices: list[Any]) -> tuple:
            trip, carry, arrays = state
            inner = _Region(plan, dict(zip([(each.value, each.target) for each in found], arrays, strict=True)))
            entered = inner.enter(op, 0, [*entering[:consts], *carry, *slices])
            results = inner.run(*opened(params["jaxpr"]), entered, (*op.path, 0))
            results = inner.leave(op, 0, results)
            following = lax.clamp(np.int32(0), trip + np.int32(step), np.int32(length - 1))  # the last trip's gathers are unused
            return (following, results[: num_carry(params)], gathered(following)), results[num_carry(params) :]

        first = np.int32(length - 1 if params["reverse"] else 0)
        (_, carry, _), stacked = lax.scan(
            body,
            (first, list(entering[consts:first_slice]), gathered(first)),
            list(entering[first_slice:]),
            length,
            params["reverse"],
            params["unroll"],
        )
        return [*carry, *stacked]

    def _gathered(self, prefetch: Prefetch, x: Any) -> Any:
        """A prefetched value in its target layout, computed from a trip's slice."""
        plan = self.plan
        for op in prefetch.chain:
            (x,) = self._sharded(op, op.equation, plan.assignment.choice(op.index)).computed([x])
        return plan.resharded(x, prefetch.value, plan.layout(prefetch.value), prefetch.target)

    def leave(self, op: Op, number: int, results: Sequence[Any]) -> list[Any]:
        layouts = self.plan.flows(op).outputs[number]
        found = [self.read(x, value, layout) for x, value, layout in zip(results, op.bodies[number].outputs, layouts, strict=True)]
        for position, value in self._stacks(op, op.results):
            found[position] = lax.reshape(found[position], self.plan.stacks[value][1:])
        return found


def _ends(eqn: JaxprEqn) -> tuple[tuple[int, int], ...]:
    """The sides of a shard_map, with the number of arrays on each."""
    return (ENTERING, len(eqn.invars)), (LEAVING, len(eqn.outvars))


def _on_one_device(eqn: JaxprEqn, operands: Sequence[Any], mesh: Mesh) -> list[Any]:
    """The results on all devices of an equation that only the first device computes."""
    first = lax.axis_index(mesh.axis_names) == 0
    types = types_of(eqn.outvars)
    results = lax.cond(first, lambda: bind_unplaced(eqn, operands), lambda: [jnp.zeros(each.shape, each.dtype) for each in types])
    return [combined(x, "or" if x.dtype == bool else "sum", tuple(mesh.axis_names)) for x in results]
