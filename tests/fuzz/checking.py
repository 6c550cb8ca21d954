"""The check of a program: every sharding keeps its numbers, and sends what was predicted."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from problems import eager_cluster
from programs import concrete
from random_assignments import random_assignment
from rewrite.padding_checks import everywhere, with_garbage

import autoshard
from autoshard.compilers import compiler_of
from autoshard.compilers.program_facts import program_facts
from autoshard.ir import Assignment, Collective, Mesh, replicated, result_layouts
from autoshard.judge.model import CostModel
from autoshard.lower import jax_mesh, manual_program, to_named_sharding
from autoshard.problem import Problem
from autoshard.rewrite import rewritten
from autoshard.rewrite.extents import resized
from autoshard.rules import rules_of
from autoshard.run.padded import PaddedArguments
from autoshard.run.tracing import TracedOnce
from autoshard.trace import Traced, trace
from autoshard.verify import compare, explicit_collectives

MESH = Mesh.of({"x": 2, "y": 4})
SEARCHERS = ("recursive_programming", "data_parallel", "fully_sharded")


class Mismatch(AssertionError):
    """A program that computes otherwise sharded than unsharded, or sends what nobody predicted."""


def check(
    fn: Callable,
    *args: Any,
    pins: dict[str, P] | None = None,
    in_specs: dict[str, P] | None = None,
    searchers: Sequence[Any] = SEARCHERS,
    seeds: Sequence[int] = (0,),
    run: bool = True,
    only: str | None = None,
    padded: bool = False,
) -> None:
    """Raises `Mismatch`, or whatever autoshard raises, unless every sharding of the program keeps its numbers and predictions.

    Args:
        seeds: of random legal assignments that are lowered besides those that are searched.
        run: whether to compile and compare numbers; else collectives alone are compared.
        only: the one sharding to check: a searcher's name, ``"evaluate"`` or ``"random assignment 0"``.
        padded: whether all dimensions of arguments that the devices do not divide are padded first.
    """
    if only is not None:
        searchers = [searcher for searcher in searchers if str(searcher) == only]
        seeds = [seed for seed in seeds if f"random assignment {seed}" == only]
        in_specs = in_specs if only == "evaluate" else None
    cluster, mesh = eager_cluster(), dict(MESH.axes)
    wanted = _plain(fn, concrete(args)) if run else None
    traced = trace(fn, *args, axis_names=MESH.names)
    if padded:
        rewrite = everywhere(traced, MESH.size)
        if rewrite.dims:
            fn, traced = TracedOnce(fn, (rewrite,)), rewritten(traced, (rewrite,))
        in_specs = None
    found: dict[str, tuple[jax.stages.Lowered, tuple]] = {}
    for searcher in searchers:
        strategy = autoshard.search(fn, *args, cluster=cluster, searcher=searcher, mesh=mesh, pins=pins, padding=False)
        loaded = _reloaded(strategy)
        found[str(searcher)] = loaded.apply(fn).lower(*PaddedArguments(loaded.record).as_stored(args)), strategy.cost.collectives
    if in_specs is not None:
        strategy = autoshard.evaluate(fn, *args, cluster=cluster, mesh=mesh, in_specs=in_specs)
        found["evaluate"] = strategy.apply(fn).lower(*args), strategy.cost.collectives
    rules, model = rules_of(traced.graph), CostModel(cluster, MESH)
    problem = Problem(program_facts(traced.graph, rules, compiler_of(model.cluster)), model)
    for seed in seeds:
        assignment = random_assignment(traced.graph, rules, MESH, seed)
        predicted = problem.evaluate(assignment).cost.collectives
        found[f"random assignment {seed}"] = _lowered(traced, rules, assignment, model), predicted
    if run:
        ran: set[str] = set()
        for label, (lowered, _) in found.items():
            text = lowered.as_text()
            if text not in ran:
                ran.add(text)
                _same_numbers(label, wanted, _own(traced, _placed(lowered, _stored(traced, concrete(args)))))
    for label, (lowered, predicted) in found.items():
        _same_collectives(label, predicted, lowered)


def _plain(fn: Callable, args: tuple) -> Any:
    """What the function computes on one device."""
    one = jax.make_mesh((1,) * len(MESH.axes), MESH.names, axis_types=(AxisType.Auto,) * len(MESH.axes), devices=jax.devices()[:1])
    with jax.sharding.set_mesh(one):
        return jax.jit(fn)(*args)


def _reloaded(strategy: autoshard.Strategy) -> autoshard.Strategy:
    """The strategy, written to a file and read again."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "strategy.json"
        strategy.save(path)
        loaded = autoshard.load(path)
    if loaded != strategy:
        raise Mismatch("a saved strategy comes back as another one")
    return loaded


def _lowered(traced: Traced, rules: tuple, assignment: Assignment, model: CostModel) -> jax.stages.Lowered:
    """The program lowered by an assignment that nobody searched."""
    graph, mesh = traced.graph, jax_mesh(MESH)

    def sharding(layout, value):
        found = graph.values[value]
        return to_named_sharding(layout if found.size else replicated(MESH), found.rank, MESH.names, mesh)

    flat = manual_program(traced.jaxpr, graph, rules, assignment, mesh, model.reshard_paths(graph.values))
    entering = tuple(sharding(assignment.layout(value), value) for value in graph.arguments)
    leaving = [sharding(layout, value) for layout, value in zip(result_layouts(graph, assignment), graph.results, strict=True)]
    jitted = jax.jit(
        lambda *args: traced.pack(flat(*jax.tree.leaves(args))),
        in_shardings=traced.in_tree.unflatten(entering),
        out_shardings=traced.pack(leaving),
    )
    avals = [jax.ShapeDtypeStruct(aval.shape, aval.dtype, weak_type=aval.weak_type) for aval in traced.jaxpr.in_avals]
    return jitted.lower(*traced.in_tree.unflatten(avals))


def _stored(traced: Traced, args: tuple) -> tuple:
    """The arguments as a program takes them, with NaN in their padding."""
    leaves, tree = jax.tree.flatten(args)
    extents = traced.padding or tuple(((),) * jnp.ndim(x) for x in leaves)
    return tree.unflatten([with_garbage(x, of) for x, of in zip(leaves, extents, strict=True)])


def _own(traced: Traced, results: Any) -> Any:
    """The results of a program without padding."""
    leaves, tree = jax.tree.flatten(results)
    for result, argument in traced.graph.aliases if traced.padding else ():
        of = traced.padding[argument]
        leaves[result] = resized(leaves[result], of, ((),) * len(of))
    return tree.unflatten(leaves)


def _placed(lowered: jax.stages.Lowered, args: tuple) -> Any:
    """What the lowered program computes on all devices."""
    compiled = lowered.compile()
    return compiled(*jax.tree.map(jax.device_put, args, compiled.input_shardings[0]))


def _same_collectives(label: str, predicted: Sequence[Collective], lowered: jax.stages.Lowered) -> None:
    rows = compare(predicted, explicit_collectives(lowered, MESH))
    wrong = [row for row in rows if not row.agrees or row.predicted_count != row.actual_count]
    if wrong:
        text = "; ".join(
            f"{row.kind} over {row.mesh_axes}: predicted {row.predicted_count} of {row.predicted_bytes:g} bytes, "
            f"Shardy has {row.actual_count} of {row.actual_bytes:g}"
            for row in wrong
        )
        raise Mismatch(f"collectives of {label}: {text}")


def _same_numbers(label: str, wanted: Any, got: Any) -> None:
    for position, (a, b) in enumerate(zip(jax.tree.leaves(wanted), jax.tree.leaves(got), strict=True)):
        a, b = (np.asarray(jax.random.key_data(v) if jnp.issubdtype(v.dtype, jax.dtypes.prng_key) else v) for v in (a, b))
        coarse = any(x.dtype == jnp.bfloat16 for x in jax.tree.leaves(wanted))
        if not np.issubdtype(a.dtype, np.floating) and a.dtype != jnp.bfloat16:
            same = np.array_equal(a, b)
        else:
            a, b = a.astype(np.float64), b.astype(np.float64)
            scale = np.abs(a).max(initial=0.0)
            same = bool(np.all(np.abs(a - b) <= (5e-2 if coarse else 1e-3) * scale + 1e-5)) and bool(np.isfinite(b).all())
        if not same:
            raise Mismatch(f"numbers of {label}: result {position} is {_short(b)}, unsharded {_short(a)}")


def _short(array: np.ndarray) -> str:
    return np.array2string(array.ravel()[:4], precision=6, threshold=4) + (f" and {array.size - 4} more" if array.size > 4 else "")
