"""The plan of loosely coupled slices: the arguments of one slice, which of them are parameters, and what exchanging them costs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax

from autoshard.cluster import Cluster
from autoshard.errors import ShardingError
from autoshard.explanation.groups import common_ending, joined
from autoshard.ir import Graph, Mesh
from autoshard.ir.naming import components, itemsize, matching, starred
from autoshard.judge.model import CostModel
from autoshard.plan.confirm import noted
from autoshard.plan.plan import Plan
from autoshard.plan.prepared import cluster_of, limit_of, traced_of
from autoshard.plan.request import Request
from autoshard.plan.searching import answered
from autoshard.problem import Problem
from autoshard.progress import Progress
from autoshard.recompute.offload import optimizer_state
from autoshard.render import format_bytes, format_seconds
from autoshard.run.diloco import DiLoCo
from autoshard.run.outer_step import SLICES, Division, parameter_bytes
from autoshard.search import batch_dims
from autoshard.trace import SplitModules, Traced, outside_mesh
from autoshard.trace.modules import has_modules


@dataclass(frozen=True, slots=True, eq=False)
class OuterPlan:
    """What is planned of a step on loosely coupled slices.

    Attributes:
        plan: that of one slice, with the costs of the exchange.
        division: how arguments are divided.
        args: those of one slice, abstract.
    """

    plan: Plan
    division: Division
    args: tuple[Any, ...]


def checked(request: Request) -> Request:
    """The request of loosely coupled slices, without what each step rewrites arguments for.

    Raises:
        ShardingError: there is one slice, or an option is not for several.
    """
    cluster = cluster_of(request.cluster)
    if not cluster.levels:
        raise ShardingError(
            f"loosely coupled slices are joined by a network of their own, and {cluster} is one slice. Write cluster='2*v5e:16x16' for "
            "two, or '2*cpu:4' of 8 virtual devices."
        )
    for name, is_given in (("stages", request.is_pipeline), ("offload", request.offload is not None)):
        if is_given:
            raise ShardingError(
                f"a step on loosely coupled slices is one program whose state is on devices, and {name}= asks for another. Leave out "
                f"{name}=, or outer=."
            )
    if any(level.sums for level in cluster.levels):
        raise ShardingError(
            "gradients of loosely coupled slices stay within each, so that slow_reduction has nothing to do. Leave it out, or outer=."
        )
    return replace(request, cluster=cluster, rewriting=replace(request.rewriting, padding=False))


@outside_mesh(keep_auto=True)
def planned(fn: Callable[..., Any], args: tuple[Any, ...], request: Request, diloco: DiLoCo, progress: Progress | bool) -> OuterPlan:
    """The plan for arguments of all slices.

    Raises:
        ShardingError: parameters or batch are not found, or do not go with the slices.
        InfeasibleError: a slice's step does not fit beside the outer optimizer's state.
    """
    cluster = cluster_of(request.cluster)
    n = cluster.levels[0].size
    division, own = divided(fn, args, request, diloco, n)
    part = cluster.part(n)
    inner = replace(request, cluster=part)
    found = answered(fn, own, inner, progress)
    limit, more = limit_of(part, request.memory_limit_bytes), _outer_bytes(found, division, diloco)
    if found.cost.peak_bytes + more > limit:
        found = answered(fn, own, replace(inner, memory_limit_bytes=limit - more), progress)
    return OuterPlan(priced(found, division, diloco, cluster), division, own)


def divided(fn: Callable[..., Any], args: tuple[Any, ...], request: Request, diloco: DiLoCo, n: int) -> tuple[Division, tuple[Any, ...]]:
    """The division of a step's arguments among slices, and the abstract arguments of one slice."""
    if has_modules(args):
        raise ShardingError(
            "with outer= each slice has parameters of its own, which a module cannot hold, and arguments are NNX objects. Write the step "
            "as a function of nnx.state(model) and the optimizer's, with nnx.merge inside."
        )
    traced, facts, _ = traced_of(fn, args, request.donate_argnums, request.axes, Cluster.parse(f"cpu:{n}"), batch=request.asked.batch)
    graph = traced.graph
    found = batch_dims(Problem(facts, CostModel(Cluster.parse(f"cpu:{n}"), Mesh.of({SLICES: n}))))
    dims = tuple(found.get(value) for value in graph.arguments)
    if not found:
        raise ShardingError(
            f"each of {n} slices has a part of the batch, and no argument of {graph.name!r} has one that they divide. Use a batch "
            f"of a multiple of {n}, or say by batch= which argument it is."
        )
    sizes = [child.num_leaves for child in traced.in_tree.children()]
    roots = [position for position, size in enumerate(sizes) for _ in range(size)]
    stateful = {roots[argument] for _, argument in graph.aliases if dims[argument] is None}
    replaced = {argument for _, argument in graph.aliases}
    has_copies = tuple(root in stateful and k in replaced and dims[k] is None for k, root in enumerate(roots))
    parameters = _parameters(traced, diloco, has_copies)
    holder = roots[parameters[0]]
    first = sum(sizes[:holder])
    last = first + sizes[holder]
    if not all(has_copies[first:last]):
        path = next(graph.argument_paths[k] for k in range(first, last) if not has_copies[k])
        raise ShardingError(
            f"the argument with the parameters comes back from the step as a whole, and {path} does not. Return it too, or pass it as "
            "another argument."
        )
    division = Division(n, dims, has_copies, parameters, holder, first, last, _place(traced, holder, first))
    return division, _of_one_slice(args, graph, dims, n)


def _of_one_slice(args: tuple, graph: Graph, dims: Sequence[int | None], n: int) -> tuple:
    """The abstract arguments of one slice.

    Raises:
        ShardingError: a batch cannot be divided.
    """
    split = SplitModules(args)
    leaves, tree = jax.tree.flatten(split.states)
    own = []
    for x, dim, path in zip(leaves, dims, graph.argument_paths, strict=True):
        kind = jax.typeof(x)
        shape = list(kind.shape)
        if dim is not None:
            if shape[dim] % n:
                raise ShardingError(
                    f"each of {n} slices has as many examples, and dim {dim} of {path} has size {shape[dim]}. Use a multiple of {n}."
                )
            shape[dim] //= n
        own.append(jax.ShapeDtypeStruct(shape, kind.dtype, weak_type=kind.weak_type))
    return split.rebuild(tree.unflatten(own))


def _parameters(traced: Traced, diloco: DiLoCo, has_copies: Sequence[bool]) -> tuple[int, ...]:
    """The leaves that are exchanged.

    Raises:
        ShardingError: there are none, or they may be others.
    """
    graph = traced.graph
    paths, values = graph.argument_paths, [graph.values[value] for value in graph.arguments]
    if diloco.parameters is not None:
        patterns = [diloco.parameters] if isinstance(diloco.parameters, str) else list(diloco.parameters)
        found = sorted({k for pattern in patterns for k in _below(pattern, paths)})
        if wrong := [paths[k] for k in found if not (has_copies[k] and "float" in values[k].dtype)]:
            raise ShardingError(
                f"parameters are arrays of floats that the step returns anew, and {joined(wrong[:1], False)} is none. Name others in "
                "DiLoCo(parameters=...)."
            )
        return tuple(found)
    apart = {*optimizer_state(traced, least=0)}
    found = [k for k, own in enumerate(has_copies) if own and k not in apart and "float" in values[k].dtype]
    if not found:
        raise ShardingError(
            f"parameters are arrays of floats that the step returns anew and a product or loop reads, and {graph.name!r} has none. Name "
            "them in DiLoCo(parameters=...), by path or pattern."
        )
    kinds, depth = {k: (values[k].shape, values[k].dtype) for k in found}, {k: len(components(paths[k])) for k in found}
    alike = [(one, other) for one in found for other in found if depth[one] < depth[other] and kinds[one] == kinds[other]]
    mirrored = [(one, other) for one, other in alike if common_ending(paths[one], paths[other])]
    if 2 * len({k for pair in mirrored for k in pair}) > len(found):
        one, other = mirrored[0]
        raise ShardingError(
            f"parameters are told from moments by what products and loops read, and these read both {paths[one]} and {paths[other]}. Name "
            "the parameters in DiLoCo(parameters=...), by path or pattern."
        )
    return tuple(found)


def _below(pattern: str, paths: Sequence[str]) -> list[int]:
    """The positions of the paths that a pattern matches, or that lie below the path that it is."""
    below = [k for k, path in enumerate(paths) if path.startswith(pattern) and path[len(pattern) :][:1] in (".", "[")]
    return below or matching(pattern, paths)


def _place(traced: Traced, holder: int, first: int) -> int | None:
    """Which part of the result replaces an argument; None: the result as a whole.

    Args:
        holder, first: the argument, and the first of its leaves.

    Raises:
        ShardingError: no part does.
    """
    tree, arguments = traced.in_tree.children()[holder], dict(traced.graph.aliases)
    if traced.out_tree == tree:
        return None
    result = 0
    for number, child in enumerate(traced.out_tree.children()):
        if child == tree and all(arguments.get(result + k) == first + k for k in range(child.num_leaves)):
            return number
        result += child.num_leaves
    raise ShardingError(
        f"the argument with the parameters, {traced.graph.argument_paths[first]} and more, comes back from a step as it is or as one part "
        f"of a tuple, and {traced.graph.name!r} returns it otherwise. Return it so."
    )


def _outer_bytes(plan: Plan, division: Division, diloco: DiLoCo) -> float:
    """The bytes that a device holds between steps for the outer optimization, and for the gradients of its largest fragment."""
    record, nbytes = plan.record, parameter_bytes(plan.record, division)
    types = [jax.ShapeDtypeStruct(record.arguments[k].shape, record.arguments[k].dtype) for k in division.parameters]
    shares = [own / (each.size * each.dtype.itemsize or 1) for own, each in zip(nbytes, types, strict=True)]
    held = sum(nbytes)
    for fragment in (fragments := diloco.fragments_of(nbytes)):
        state = jax.eval_shape(diloco.transformation.init, [types[k] for k in fragment])
        by_shape = {types[k].shape: shares[k] for k in fragment}
        held += sum(x.size * x.dtype.itemsize * by_shape.get(x.shape, 1.0) for x in jax.tree.leaves(state))
    return held + max(sum(nbytes[k] for k in fragment) for fragment in fragments)


def priced(plan: Plan, division: Division, diloco: DiLoCo, cluster: Cluster) -> Plan:
    """The plan of one slice with the exchange in its cost, per step in the mean.

    An exchange is an all_reduce over slices of a device's shards of a fragment, in float32 at least, beside which nothing is computed.
    """
    record, nbytes = plan.record, parameter_bytes(plan.record, division)
    wide = [own * max(1.0, 4 / itemsize(record.arguments[k].dtype)) for own, k in zip(nbytes, division.parameters, strict=True)]
    fragments = diloco.fragments_of(nbytes)
    mesh = Mesh.of({SLICES: division.n, "devices": record.mesh.size})
    communication = CostModel(cluster, mesh).communication
    each = [float(communication.seconds("all_reduce", sum(wide[k] for k in fragment), (0,))) for fragment in fragments]
    amortised = sum(each) / diloco.every
    cost = record.cost
    cost = replace(
        cost,
        makespan_seconds=cost.makespan_seconds + amortised,
        communication_seconds=cost.communication_seconds + amortised,
        exposed_communication_seconds=cost.exposed_communication_seconds + amortised,
        peak_bytes=cost.peak_bytes + _outer_bytes(plan, division, diloco),
    )
    paths = [record.arguments[k].path for k in division.parameters]
    patterns = list(dict.fromkeys(map(starred, paths)))
    told = ", ".join(patterns[:4]) + (f" and {len(patterns) - 4} more" if len(patterns) > 4 else "")
    parts = "in one go" if diloco.fragments == 1 else f"in {diloco.fragments} parts"
    note = (
        f"the plan is that of one of {division.n} slices; after every {diloco.every} steps of its own {told} are exchanged, "
        f"{format_bytes(sum(wide))} a device {parts} of at most {format_seconds(max(each))}. The step time has "
        f"{format_seconds(amortised)} of that, the mean of a step, and the peak the outer parameters and optimizer state"
    )
    return noted(plan.with_record(replace(record, cost=cost)), note)
