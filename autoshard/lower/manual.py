"""A program as one `jax.shard_map` over the whole mesh: each device computes on its shards, and every collective is the planned one.

Nothing is left to the partitioner. An op reads its operands in the layouts of its choice, each by way of the cheapest reshard; it runs on
the shards (`autoshard.lower.shards`); partial results are combined and brought into their value's layout. A copy in another layout is made
once in a region (the program, or one body) for all who read it. Loops, branches and checkpoints are bound again around bodies that are
lowered the same way. What is made of constants alone is computed in each layout that it is read in, and sends nothing.

An op without a rule reads whole arrays and runs whole on every device; a callback with an effect runs on the first. A `jax.shard_map` of
the user's own becomes part of the program where it has the same mesh; else there is no manual lowering (`obstacle`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn
from jax.sharding import AbstractMesh, PartitionSpec

from autoshard.cost.profile import free_values
from autoshard.cost.reshard import Step, path_seconds
from autoshard.errors import ShardingError
from autoshard.ir import (
    Assignment,
    Body,
    Choice,
    Graph,
    Layout,
    Op,
    Origin,
    Rule,
    computed_layout,
    exchanges,
    legal,
    local_shape,
    operand_layout,
    reductions,
    replicated,
    result_layout,
    result_layouts,
    served_from,
    spec_to_layout,
)
from autoshard.lower.collectives import ReshardPath, combined, moved
from autoshard.lower.control_flow import FLOWS, Flows
from autoshard.lower.interpret import Interpreter, Path, apply, bind, ops_by_path
from autoshard.lower.mesh import to_named_sharding
from autoshard.lower.shards import Sharded
from autoshard.rules import registered, same_on_shards
from autoshard.trace.structure import subjaxprs

Mesh = jax.sharding.Mesh | AbstractMesh

# Where they are called at all, they are called once: on the first device, which then has the others know.
ON_ONE_DEVICE = frozenset({"debug_callback", "debug_print", "io_callback", "rng_uniform"})
# Inside a manual computation every array is where it is.
PLACED_ALREADY = frozenset({"device_put", "reshard", "sharding_constraint"})


def obstacle(graph: Graph, mesh: Mesh) -> str | None:
    """Why a program has no manual lowering on a mesh, and what is done instead; None where it has."""
    for op in graph.walk():
        if op.primitive == "shard_map" and not _same_mesh(op.params["mesh"], mesh):
            inner, ours = ({**dict(each.shape)} for each in (op.params["mesh"], mesh))
            return (
                f"a shard_map becomes part of the manual program where it has the strategy's mesh, in the same device order; the one at "
                f"{op.origin} has {inner}, the strategy {ours}. The step is lowered by sharding constraints instead."
            )
    return None


def _same_mesh(inner: Mesh, ours: Mesh) -> bool:
    """Whether a shard_map's mesh is the program's, as far as both are known."""
    if tuple(inner.shape.items()) != tuple(ours.shape.items()):
        return False
    return any(isinstance(each, AbstractMesh) for each in (inner, ours)) or bool(np.all(inner.devices == ours.devices))


def manual(
    jaxpr: ClosedJaxpr,
    graph: Graph,
    rules: tuple[Rule | None, ...],
    assignment: Assignment,
    mesh: Mesh,
    reshard_path: ReshardPath,
) -> Callable[..., list[Any]]:
    """A function from flat arguments to flat results that computes what ``jaxpr`` does, sharded as the assignment says.

    ``graph`` and ``rules`` are those of the same jaxpr. To be called under `jax.jit`. What it returns is not to be differentiated: custom
    derivatives inside are gone.

    Raises:
        ShardingError: there is an `obstacle`.
    """
    if (reason := obstacle(graph, mesh)) is not None:
        raise ShardingError(reason)
    plan = _Plan(graph, rules, assignment, mesh, reshard_path, ops_by_path(graph), _homes(graph), tuple(free_values(graph)))
    leaving = result_layouts(graph, assignment)

    captured = list(jaxpr.consts)
    read = {value for op in graph.walk() for value in op.operands} | set(graph.results)
    if read.isdisjoint((*graph.arguments, *graph.constants)):
        captured.append(np.zeros((), np.float32))  # XLA refuses manual computations that read nothing

    def one_device(constants: Sequence[Any], arguments: Sequence[Any]) -> list[Any]:
        region = _Region(plan)
        results = region.run(jaxpr.jaxpr, constants[: len(jaxpr.consts)], arguments)
        placed = [region.read(x, value, layout) for x, value, layout in zip(results, graph.results, leaving, strict=True)]
        unread = constants[len(jaxpr.consts) :]
        return lax.optimization_barrier((placed, *unread))[0] if unread else placed

    def spec(value: int, layout: Layout) -> PartitionSpec:
        return to_named_sharding(layout, graph.values[value].rank, mesh).spec

    entering = [spec(value, plan.layout(value)) for value in graph.arguments]
    made = [spec(value, layout) for value, layout in zip(graph.results, leaving, strict=True)]

    # Sharded and replicated operands meet in one primitive, which shard_map's own type check refuses.
    in_specs = [PartitionSpec()] * len(captured), entering
    mapped = jax.shard_map(one_device, mesh=mesh, in_specs=in_specs, out_specs=made, check_vma=False)
    return lambda *arguments: mapped(captured, list(arguments))


def derived_from(program: Callable[..., list[Any]], other: Callable[[], Callable[..., list[Any]]]) -> Callable[..., list[Any]]:
    """The program, differentiated as another one that computes the same; ``other`` is called where a derivative is asked for."""

    @jax.custom_jvp
    def function(*arguments: Any) -> list[Any]:
        return program(*arguments)

    function.defjvp(lambda primals, tangents: jax.jvp(other(), primals, tangents))
    return function


def _homes(graph: Graph) -> dict[int, int]:
    """Per value that shares a holder's layout, the holder's value."""
    return {view: holder.value for op in graph.walk() for holder in op.holders for view in holder.views}


@dataclass(frozen=True, slots=True, eq=False)
class _Plan:
    """What the whole program is lowered by.

    Attributes:
        ops: per path of an equation, its op.
        home: per value that shares a holder's layout, the holder's value.
        free: per value, whether it is made of constants alone.
    """

    graph: Graph
    rules: tuple[Rule | None, ...]
    assignment: Assignment
    mesh: Mesh
    reshard_path: ReshardPath
    ops: Mapping[Path, Op]
    home: Mapping[int, int]
    free: tuple[bool, ...]

    @property
    def whole(self) -> Layout:
        return replicated(self.assignment.mesh)

    def layout(self, value: int) -> Layout:
        """The layout in which a value's own array is kept; what the function captured is kept whole."""
        if value in self.graph.constants:
            return self.whole
        while value not in self.assignment.layouts and value in self.home:
            value = self.home[value]
        return self.assignment.layout(value)

    def flows(self, op: Op) -> Flows:
        return FLOWS[op.primitive](op, self.layout)

    def resharded(self, x: Any, value: int, source: Layout, target: Layout) -> Any:
        """An array of the value from one layout to another."""
        for step in self.reshard_path(value, source, target) if source != target else ():
            x = moved(x, step, self.assignment.mesh)
        return x

    def source(self, value: int, target: Layout) -> Layout:
        """The layout that a reader in another layout is served from: the value's, or its shared copy's where that is cheaper."""

        def seconds(source: Layout, target: Layout) -> float:
            return path_seconds(self.reshard_path(value, source, target))

        return served_from(self.layout(value), self.assignment.copies.get(value), target, seconds)


class _Region(Interpreter):
    """One region on one device while it is lowered. Arrays are in their values' layouts; of a free value there is none.

    Attributes:
        made: per value and layout the copy that all its readers in this region share; of free values all there is.
        recipes: per free value its op and equation, and the literals among its operands.
    """

    def __init__(self, plan: _Plan):
        super().__init__(plan.ops, differentiable=False)
        self.plan = plan
        self.made: dict[tuple[int, Layout], Any] = {}
        self.recipes: dict[int, tuple[Op, JaxprEqn, list[Any]]] = {}

    def region(self) -> _Region:
        return _Region(self.plan)

    def context(self, eqn: JaxprEqn) -> AbstractContextManager:
        """What was in force where the equation was traced, less its mesh: inside a manual computation that has its own."""
        context = eqn.ctx
        usual = context.threefry_partitionable == jax.config.jax_threefry_partitionable  # pyright: ignore[reportAttributeAccessIssue]
        if usual and context.compute_type is None and not context.xla_metadata:
            return nullcontext()
        stack, mesh = ExitStack(), jax.sharding.get_abstract_mesh()
        stack.enter_context(context.manager)
        stack.enter_context(jax.sharding.use_abstract_mesh(mesh))
        return stack

    def types(self, op: Op, number: int, body: Jaxpr) -> list[jax.ShapeDtypeStruct]:
        """A body is evaluated for the parts of its inputs that a device has."""
        sizes = self.plan.assignment.mesh.sizes
        layouts = self.plan.flows(op).inputs[number]
        return [
            jax.ShapeDtypeStruct(
                tuple(map(int, local_shape(v.aval.shape, layout, sizes))), v.aval.dtype, weak_type=getattr(v.aval, "weak_type", False)
            )
            for v, layout in zip(body.invars, layouts, strict=True)
        ]

    # -- reading ----------------------------------------------------------------------------------------------------

    def read(self, x: Any, value: int, target: Layout) -> Any:
        """The value in the target layout: its own array, or the region's one copy."""
        plan = self.plan
        if value in self.recipes:
            return self._expanded(value, target)
        own = plan.layout(value)
        if own == target or not plan.graph.values[value].rank:
            return x
        if (value, target) not in self.made:
            source = plan.source(value, target)
            self.made[value, target] = plan.resharded(self.read(x, value, source), value, source, target)
        return self.made[value, target]

    def _expanded(self, value: int, target: Layout) -> Any:
        """A free value in the target layout, computed from constants in it; where an op cannot be so split, whole and then sliced."""
        wanted: dict[tuple[int, Layout], tuple[Choice | None, list[Layout]]] = {}
        waiting = [(value, target)]
        while waiting:
            number, layout = key = waiting.pop()
            if key in wanted or key in self.made or number not in self.recipes:
                continue
            op, _, _ = self.recipes[number]
            rule, result = self.plan.rules[op.index], op.results.index(number)
            choice = None if rule is None else _choice_for(rule, result, layout, self.plan.assignment.mesh.sizes)
            if rule is None or choice is None:
                wanted[key] = None, []
                waiting.append((number, self.plan.whole))
            else:
                sources = [operand_layout(rule, choice, k) for k in range(len(op.operands))]
                wanted[key] = choice, sources
                waiting += zip(op.operands, sources, strict=True)
        for number, layout in sorted(wanted, key=lambda key: (self.recipes[key[0]][0].index, key[1] != self.plan.whole)):
            (op, eqn, operands), (choice, sources) = self.recipes[number], wanted[number, layout]
            if choice is None:
                sliced = self.plan.resharded(self.made[number, self.plan.whole], number, self.plan.whole, layout)
                self.made[number, layout] = sliced
                continue
            read = [self.made.get((v, at), x) for v, at, x in zip(op.operands, sources, operands, strict=True)]
            for result, x in zip(op.results, self._sharded(op, eqn, choice, read).computed(read), strict=True):
                self.made.setdefault((result, layout), x)
        return self.made[value, target]

    # -- ops ----------------------------------------------------------------------------------------------------------

    def op(self, op: Op, eqn: JaxprEqn, operands: list[Any]) -> list[Any]:
        plan = self.plan
        rule = plan.rules[op.index]
        if op.results and all(plan.free[value] for value in op.results):
            self.recipes.update((value, (op, eqn, operands)) for value in op.results)
            return [None] * len(op.results)
        choice = plan.assignment.choice(op.index)
        if rule is None or not self._runs_on_shards(op, eqn, rule, choice):
            return self._whole(op, eqn, operands)
        read = [
            self.read(x, value, operand_layout(rule, choice, k)) for k, (x, value) in enumerate(zip(operands, op.operands, strict=True))
        ]
        if op.primitive in PLACED_ALREADY:
            results = read
        else:
            results = self._sharded(op, eqn, choice, read).computed(read)
        return [self._settled(x, op, rule, choice, k) for k, x in enumerate(results)]

    def _sharded(self, op: Op, eqn: JaxprEqn, choice: Choice, read: Sequence[Any]) -> Sharded:
        def bound(*operands: Any, **replaced: Any) -> list[Any]:
            return bind(eqn, operands, **replaced)

        rule, values = self.plan.rules[op.index], self.plan.graph.values
        assert rule is not None
        shapes = (tuple(values[value].shape for value in group) for group in (op.operands, op.results))
        return Sharded(op.primitive, op.params, bound, rule, choice, self.plan.assignment.mesh, *shapes)

    def _runs_on_shards(self, op: Op, eqn: JaxprEqn, rule: Rule, choice: Choice) -> bool:
        """Whether the primitive means on shards what it means on the whole: of those without a rule here only what they lower to tells."""
        if op.primitive in registered() or all(factor < 0 for factor, _ in choice):
            return True
        sizes = self.plan.assignment.mesh.sizes
        local = [
            tuple(map(int, local_shape(self.plan.graph.values[value].shape, operand_layout(rule, choice, k), sizes)))
            for k, value in enumerate(op.operands)
        ]
        return same_on_shards(eqn, local)

    def _settled(self, x: Any, op: Op, rule: Rule, choice: Choice, result: int) -> Any:
        """A result with its partial sums combined, in its value's layout."""
        plan, value = self.plan, op.results[result]
        at = computed_layout(rule, choice, result)
        mesh = plan.assignment.mesh
        for operator, group in groupby(sorted(reductions(rule, choice), key=lambda each: each[1]), key=lambda each: each[1]):
            found = [(axis, scatter) for axis, _, scatter in group]
            scatters = {axis: scatter for axis, scatter in found if scatter >= 0}
            target = tuple(scatters.get(axis, dim) for axis, dim in enumerate(at))
            axes = tuple(axis for axis, _ in found)
            if len(scatters) == len(axes) and operator == "sum":
                x = moved(x, Step("reduce_scatter", axes, at, target, 0.0, 0.0), mesh)
            else:
                x = combined(x, operator, tuple(mesh.names[axis] for axis in axes if mesh.sizes[axis] > 1))
                x = moved(x, Step("slice", tuple(scatters), at, target, 0.0, 0.0), mesh) if scatters else x
            at = target
        return plan.resharded(x, value, at, plan.layout(value))

    def _whole(self, op: Op, eqn: JaxprEqn, operands: Sequence[Any]) -> list[Any]:
        """The results of an op that nothing is known of, on whole arrays."""
        if op.primitive == "shard_map":
            return self._mapped(op, eqn, operands)
        whole = self.plan.whole
        read = [self.read(x, value, whole) for x, value in zip(operands, op.operands, strict=True)]
        results = _on_one_device(eqn, read, self.plan.mesh) if op.primitive in ON_ONE_DEVICE else apply(eqn, read)
        return [self.plan.resharded(x, value, whole, self.plan.layout(value)) for x, value in zip(results, op.results, strict=True)]

    def _mapped(self, op: Op, eqn: JaxprEqn, operands: Sequence[Any]) -> list[Any]:
        """A shard_map of the user's own over the same mesh: this device's part of it."""
        mesh, values = self.plan.assignment.mesh, self.plan.graph.values

        def layouts(specs: Sequence[Any], of: Sequence[int]) -> list[Layout]:
            return [spec_to_layout(tuple(spec), mesh, values[value].rank, str(op.origin)) for spec, value in zip(specs, of, strict=True)]

        entering, leaving = layouts(eqn.params["in_specs"], op.operands), layouts(eqn.params["out_specs"], op.results)
        read = [self.read(x, value, layout) for x, value, layout in zip(operands, op.operands, entering, strict=True)]
        results = _Inside({}, differentiable=False).run(eqn.params["jaxpr"], (), read)
        settled = zip(results, op.results, leaving, strict=True)
        return [self.plan.resharded(x, value, layout, self.plan.layout(value)) for x, value, layout in settled]

    def control_flow(self, op: Op, eqn: JaxprEqn, operands: list[Any]) -> list[Any]:
        layouts = self.plan.flows(op).operands
        entering = [self.read(x, value, layout) for x, value, layout in zip(operands, op.operands, layouts, strict=True)]
        return self.rebound(op, eqn, entering)

    def leave(self, op: Op, number: int, results: Sequence[Any]) -> list[Any]:
        layouts = self.plan.flows(op).outputs[number]
        return [self.read(x, value, layout) for x, value, layout in zip(results, op.bodies[number].outputs, layouts, strict=True)]


class _Inside(Interpreter):
    """The body of a shard_map of the user's own, evaluated where JAX keeps no account of what varies over the mesh."""

    def context(self, eqn: JaxprEqn) -> AbstractContextManager:
        return nullcontext()

    def region(self) -> _Inside:
        return self

    def op(self, op: Op, eqn: JaxprEqn, operands: list[Any]) -> list[Any]:
        return _UNACCOUNTED[eqn.primitive.name](operands, eqn.params) if eqn.primitive.name in _UNACCOUNTED else bind(eqn, operands)

    def found(self, eqn: JaxprEqn, path: Path) -> Op:
        """An op that stands for the equation: only its path and its bodies count here."""
        bodies = tuple(Body((), (), ()) for _ in subjaxprs(eqn))
        return Op(0, eqn.primitive.name, (), (), eqn.params, Origin(), path, bodies=bodies)


# Primitives that keep that account, and those that do the same without it.
_UNACCOUNTED: dict[str, Callable[[list[Any], Mapping[str, Any]], list[Any]]] = {
    "pvary": lambda operands, params: operands,
    "psum_invariant": lambda operands, params: [lax.psum(x, params["axes"]) for x in operands],
    "all_gather_invariant": lambda operands, params: [
        lax.all_gather(x, params["axis_name"], axis=params["all_gather_dimension"], tiled=params["tiled"]) for x in operands
    ],
}


def _choice_for(rule: Rule, result: int, layout: Layout, sizes: tuple[int, ...]) -> Choice | None:
    """The choice under which a result is computed in a layout; None where there is none that sends nothing."""
    left = {factor: entry.size for factor, entry in enumerate(rule.factors)}
    choice = []
    for dim, size in zip(layout, sizes, strict=True):
        factor = next((f for f in rule.results[result][dim] if left[f] > 1), -1) if dim >= 0 else -1
        if dim >= 0 and (factor < 0 or left[factor] % size):
            return None
        if factor >= 0:
            left[factor] //= size
        choice.append((factor, -1))
    found = tuple(choice)
    sends = reductions(rule, found) or exchanges(rule, found, sizes)
    return None if sends or not legal(rule, found, sizes) or result_layout(rule, found, result) != layout else found


def _on_one_device(eqn: JaxprEqn, operands: Sequence[Any], mesh: Mesh) -> list[Any]:
    """The results of an equation that the first device alone computes, on all of them."""
    first = lax.axis_index(mesh.axis_names) == 0
    types = [jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in eqn.outvars]
    results = lax.cond(first, lambda: bind(eqn, operands), lambda: [jnp.zeros(each.shape, each.dtype) for each in types])
    return [combined(x, "or" if x.dtype == bool else "sum", tuple(mesh.axis_names)) for x in results]
