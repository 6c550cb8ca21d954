"""Pipelined programs compared with the same programs on one device."""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import jaxpr_as_fun

from autoshard.cluster import Cluster
from autoshard.compilers import compiler_of
from autoshard.compilers.program_facts import program_facts
from autoshard.ir import Mesh
from autoshard.ir.pieces import part_of
from autoshard.judge.model import CostModel
from autoshard.lower import stage_meshes
from autoshard.pipeline.programs import StagePlan
from autoshard.pipeline.run import Pipelined
from autoshard.pipeline.schedule import Schedule, Task
from autoshard.pipeline.scheduling import schedule_of
from autoshard.pipeline.stages import Staged, stages_of
from autoshard.problem import Problem
from autoshard.rules import rules_of
from autoshard.search import searcher_of, solve
from autoshard.trace import trace
from tests.programs import concrete
from tests.random_assignments import random_assignment


def plans_of(staged: Staged, n_stages: int, mesh: Mesh, searcher: str | int, placement: str = "loop") -> list[StagePlan]:
    """A plan for each piece, by a searcher, or with random assignments from a seed."""
    cluster = Cluster.of(f"cpu:{mesh.size}")
    model, meshes, plans = CostModel(cluster, mesh), stage_meshes([mesh] * n_stages), []
    for k, stage in enumerate(staged.stages):
        graph = stage.traced.graph
        rules = rules_of(graph)
        if isinstance(searcher, int):
            assignment = random_assignment(graph, rules, mesh, searcher + k)
        else:
            problem = Problem(program_facts(graph, rules, compiler_of(cluster)), model)
            assignment = solve(searcher_of(searcher), problem).assignment
        plans.append(StagePlan(assignment, meshes[part_of(k, n_stages, placement)], model.reshard_paths(graph.values)))
    return plans


def pipelined(
    fn,
    args,
    n_stages,
    n_microbatches,
    schedule="1f1b",
    mesh=None,
    searcher="data_parallel",
    n_chunks=1,
    demotes=False,
    donated=(),
    early=True,
) -> Pipelined:
    """A step as a pipeline; each stage has as many of the eight devices, and chunks of ``"auto"`` are in a V.

    ``demotes``: its plans are of a compiler that does; ``donated`` is of the trace. ``early`` says that each chunk is updated right after
    its last task.
    """
    mesh, placement = Mesh.of({"data": 8 // n_stages} if mesh is None else mesh), "v" if schedule == "auto" else "loop"
    staged = stages_of(trace(fn, *args, donate_argnums=donated), n_stages * n_chunks, n_microbatches)
    compiler = compiler_of(Cluster.parse("v5e:1x1")) if demotes else None
    plans = [replace(plan, compiler=compiler) for plan in plans_of(staged, n_stages, mesh, searcher, placement)]
    order = schedule_of(schedule, n_stages, n_microbatches, n_chunks, placement)
    return Pipelined(staged, plans, updated_early(order) if early else order)


def updated_early(schedule: Schedule) -> Schedule:
    """The schedule with each chunk's update right after its last task."""
    orders = []
    for order in schedule.orders:
        places = {task.chunk: k for k, task in enumerate(order)}
        updates = [(k + 0.5, Task("U", 0, chunk)) for chunk, k in places.items()]
        orders.append(tuple(task for _, task in sorted([*enumerate(order), *updates])))
    return Schedule(schedule.name, tuple(orders), schedule.placement)


def is_key(x) -> bool:
    """Whether an array has random keys."""
    return jnp.issubdtype(x.dtype, jax.dtypes.extended)


def numbers(x) -> np.ndarray:
    """An array's numbers, also of keys."""
    return np.asarray(jax.random.key_data(x) if is_key(x) else x, np.float64)


def compared(run: Pipelined, args, steps=3, loss=1e-6, state=3e-5) -> list:
    """Runs a pipeline and the step on one device for some steps, compares all they return, and gives the pipeline's last results.

    What is no state is equal within ``loss`` relative to its largest number, state after the last step within ``state``.
    """
    traced = run.staged.traced
    one = jax.jit(jaxpr_as_fun(traced.jaxpr))
    ours = [jnp.asarray(x) for x in jax.tree.leaves(concrete(args))]
    theirs = list(ours)
    replaced = dict(traced.graph.aliases)
    results: list = []
    for _ in range(steps):
        expected, results = one(*theirs), run(*ours)
        for k, path in enumerate(traced.graph.result_paths):
            if k not in replaced:
                close(expected[k], results[k], loss, path)
        for k, argument in replaced.items():
            theirs[argument], ours[argument] = expected[k], results[k]
            assert results[k].sharding.device_set <= {d for plan in run.plans for d in plan.mesh.devices.flat}
    for k, argument in replaced.items():
        close(theirs[argument], ours[argument], state, traced.graph.result_paths[k])
    return results


def close(expected, found, tolerance, what) -> None:
    """Checks that arrays are equal up to a share of the largest number."""
    assert (expected.shape, expected.dtype) == (found.shape, found.dtype), what
    one, other = numbers(expected), numbers(found)
    assert np.abs(one - other).max(initial=0.0) <= tolerance * (np.abs(one).max(initial=0.0) + 1e-8), what
