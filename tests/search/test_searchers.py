"""Laws that every searcher obeys on every problem."""

from __future__ import annotations

import gc
import subprocess
import sys
import weakref
from functools import cache

import jax
import jax.numpy as jnp
import pytest
from problems import SMALL, eager_cluster, problem_of
from programs import PROGRAMS

import autoshard
from autoshard.errors import InfeasibleError, SearcherError, ShardingError
from autoshard.inference.elimination import eliminate
from autoshard.ir import legal, operand_layout, result_layout
from autoshard.judge.evaluate import evaluate
from autoshard.search import (
    SEARCHERS,
    BruteForce,
    DataParallel,
    DynamicProgramming,
    FullySharded,
    Manual,
    RecursiveProgramming,
    ShardingPropagation,
    TensorParallel,
    searcher_of,
    solve,
)
from benchmarks import models

SEARCHED = [
    DataParallel(),
    FullySharded(1),
    FullySharded(2),
    FullySharded(3),
    TensorParallel(),
    Manual(),
    ShardingPropagation(),
    RecursiveProgramming(),
    DynamicProgramming(),
]
ELSEWHERE = {"auto", "brute_force", "integer_programming"}  # with tests of their own: the portfolio is made of others, these are slow
SEARCHED += [SEARCHERS[name]() for name in SEARCHERS if name not in ELSEWHERE and name not in {one.name for one in SEARCHED}]
MESHES = [{"data": 8}, {"data": 4, "model": 2}, {"a": 2, "b": 2, "c": 2}]


def label(value):
    return value if isinstance(value, str) else getattr(value, "name", str(value)) + str(getattr(value, "stage", ""))


def batch_of(problem):
    """Pins for the arguments that data parallelism splits, as it splits them."""
    assignment = DataParallel().solve(problem).assignment
    layouts = {value: assignment.layout(value) for value in problem.graph.arguments}
    return {value: tuple(frozenset((dim,)) for dim in layout) for value, layout in layouts.items() if any(dim >= 0 for dim in layout)}


@cache
def shared(program, mesh, pinned):
    """One problem for all searchers, as in the portfolio: problems are immutable."""
    fn, args = (SMALL.get(program) or PROGRAMS[program])()
    return problem_of(fn, *args, mesh=dict(mesh), pins=batch_of(shared(program, mesh, False)) if pinned else None)


@pytest.mark.sample(40)
@pytest.mark.parametrize("mesh", MESHES, ids=str)
@pytest.mark.parametrize("searcher", SEARCHED, ids=label)
@pytest.mark.parametrize("program", [*SMALL, "gpt", "convnet", "gpt_scan", "moe_remat", "control_flow", "lstm"])
def test_solutions_are_legal_and_costed_honestly(program, searcher, mesh):
    """Every choice is legal, results have the layouts of their ops' choices, the judge agrees with the cost, and the bound is valid."""
    problem = shared(program, tuple(mesh.items()), isinstance(searcher, Manual | ShardingPropagation))
    solution = searcher.solve(problem)
    assignment = solution.assignment
    assert all(assignment.layout(value)[axis] in dims for value, pin in problem.pins.items() for axis, dims in enumerate(pin))
    for op in problem.graph.walk():
        rule, choice = problem.rules[op.index], assignment.choice(op.index)
        if rule is None:
            continue
        assert legal(rule, choice, problem.mesh.sizes), f"{op.primitive} {rule} {choice}"
        for k, value in enumerate(op.results):
            if problem.graph.values[value].rank and not problem.facts.free[value]:
                assert assignment.layout(value) == result_layout(rule, choice, k)
        for position in range(len(op.operands)):
            operand_layout(rule, choice, position)
    again = evaluate(problem.facts, problem.model, assignment)
    assert again.cost == solution.judgement.cost
    cost = again.cost
    assert 0 <= solution.lower_bound_seconds <= cost.objective_seconds
    assert cost.makespan_seconds <= cost.objective_seconds * (1 + 1e-9)
    assert cost.makespan_seconds >= cost.compute_seconds * (1 - 1e-9)


@pytest.mark.sample(3)
@pytest.mark.parametrize("program", SMALL)
def test_one_axis_is_solved_exactly(program):
    """With a single mesh axis recursive programming finds what brute force finds."""
    fn, args = SMALL[program]()
    problem = problem_of(fn, *args, mesh={"data": 4}, cluster=eager_cluster("v5e:2x2"))
    exact = BruteForce(max_assignments=3_000_000).solve(problem).judgement.cost.objective_seconds
    found = RecursiveProgramming().solve(problem).judgement.cost.objective_seconds
    assert found == pytest.approx(exact, rel=1e-9)


@pytest.mark.sample(2)
@pytest.mark.parametrize("program", SMALL)
def test_two_axes_come_close_to_the_joint_optimum(program):
    """On two axes the sweeps end no more than a fifth above the exact optimum over both at once."""
    fn, args = SMALL[program]()
    problem = problem_of(fn, *args)
    tables = problem.tables((0, 1), problem.start())
    joint = eliminate(tables)
    assignment = problem.assignment(tables.at(joint.labels))
    exact = problem.evaluate(assignment).cost.objective_seconds
    assert exact == pytest.approx(joint.cost, rel=1e-9)
    assert RecursiveProgramming().solve(problem).judgement.cost.objective_seconds <= 1.2 * exact


@pytest.mark.sample(1)
@pytest.mark.parametrize("program", ["gpt", "convnet", "lstm", "gpt_scan"])
def test_automatic_searchers_are_never_judged_slower_than_data_parallel(program):
    """The better of their own answer and data parallel comes back."""
    fn, args = PROGRAMS[program]()
    for mesh in MESHES[:2]:
        problem = problem_of(fn, *args, mesh=mesh)
        baseline = DataParallel().solve(problem).judgement.cost
        assert solve(RecursiveProgramming(), problem).judgement.cost.makespan_seconds <= baseline.makespan_seconds


def test_data_parallel_splits_the_batch_and_reduces_gradients():
    """State is replicated, batch leaves are split on dimension 0, and the gradients are all that is sent."""
    fn, args = PROGRAMS["gpt"]()
    problem = problem_of(fn, *args, mesh={"data": 8})
    solution = DataParallel().solve(problem)
    layouts = dict(zip(problem.graph.argument_paths, map(solution.assignment.layout, problem.graph.arguments), strict=True))
    assert {layout for path, layout in layouts.items() if path.startswith("state")} == {(-1,)}
    assert {layout for path, layout in layouts.items() if not path.startswith("state")} == {(0,)}
    assert {c.kind for c in solution.judgement.cost.collectives} == {"all_reduce"}


def test_data_parallel_finds_the_batch_of_a_scanned_sequence():
    """Where the leading dimension is scanned, so that splitting it splits no work, the batch is the next one."""
    fn, args = PROGRAMS["lstm"]()
    problem = problem_of(fn, *args, mesh={"data": 8})
    alone = problem_of(fn, *args, mesh={"data": 1}, cluster=eager_cluster("cpu:1"))
    assert DataParallel().solve(problem).judgement.cost.flops < 0.3 * DataParallel().solve(alone).judgement.cost.flops


def test_data_parallel_does_not_split_time_though_some_work_is_split_by_it():
    """A language model that scans over time, first: the loss could be split over time, the layers cannot; over the batch both can."""
    fn, args = models.lstm(2, 256, 4096, 64, 128)  # batch, then length; tokens are time first
    problem = problem_of(fn, *args, mesh={"data": 8})
    found, graph = DataParallel().solve(problem).assignment, problem.graph
    tokens = [value for value, path in zip(graph.arguments, graph.argument_paths, strict=True) if not path.startswith("state")]
    assert {found.layout(value) for value in tokens} == {(1,)}


def test_fully_sharded_stages_shard_ever_more_state():
    """Memory of the arguments falls from data parallel over stage 1 to stage 3; stage 2 scatters gradients."""
    fn, args = PROGRAMS["gpt"]()
    problem = problem_of(fn, *args, mesh={"data": 8})

    def argument_bytes(searcher):
        assignment = searcher.solve(problem).assignment
        return sum(
            problem.graph.values[v].nbytes / (8 if any(d >= 0 for d in assignment.layout(v)) else 1) for v in problem.graph.arguments
        )

    assert argument_bytes(FullySharded(3)) < argument_bytes(FullySharded(1)) < argument_bytes(DataParallel())
    kinds = {stage: {c.kind for c in FullySharded(stage).solve(problem).judgement.cost.collectives} for stage in (1, 2)}
    assert "reduce_scatter" in kinds[2]
    assert "reduce_scatter" not in kinds[1]


def test_a_memory_limit_is_kept_or_refused():
    """A limit between the least peak and the unlimited one is kept; below the least, the error names it."""
    fn, args = PROGRAMS["gpt"]()
    cluster = eager_cluster(speed=1e-2)
    cluster_problem = problem_of(fn, *args, cluster=cluster, pins=None)
    free = RecursiveProgramming().solve(cluster_problem).judgement.cost
    with pytest.raises(InfeasibleError) as caught:
        RecursiveProgramming().solve(problem_of(fn, *args, cluster=cluster, memory_limit_bytes=1000))
    least = caught.value.smallest_peak_bytes
    assert 1000 < least <= free.peak_bytes
    limit = (least + free.peak_bytes) / 2
    kept = RecursiveProgramming().solve(problem_of(fn, *args, cluster=cluster, memory_limit_bytes=limit)).judgement.cost
    assert kept.peak_bytes <= limit


def test_pins_are_kept():
    """A pinned argument keeps its layout, whatever that costs."""
    fn, args = SMALL["two_matmuls"]()
    graph = problem_of(fn, *args).graph
    pins = {graph.arguments[1]: (frozenset((1,)), frozenset((-1,)))}
    solution = RecursiveProgramming().solve(problem_of(fn, *args, pins=pins))
    assert solution.assignment.layout(graph.arguments[1]) == (1, -1)


def test_an_impossible_pin_says_so():
    """A pin that no legal layout satisfies names the tensor and the mesh."""
    fn, args = SMALL["matmul"]()
    graph = problem_of(fn, *args).graph
    pins = {graph.arguments[0]: (frozenset((5,)), frozenset((-1,)))}
    with pytest.raises(ShardingError, match=r"w \(16, 32\).*Loosen the pin"):
        RecursiveProgramming().solve(problem_of(fn, *args, pins=pins))


@pytest.mark.parametrize("name", sorted(set(SEARCHERS) - {"sharding_propagation"}))
def test_a_program_without_decisions_has_a_strategy(name):
    """On scalars alone nothing is to be sharded, and nothing fails."""
    problem = problem_of(lambda x: x * 2 + 1, 3.0)
    solution = searcher_of(name).solve(problem)
    assert solution.judgement.cost.communication_seconds == 0.0
    assert solution.lower_bound_seconds <= solution.judgement.cost.objective_seconds


def test_searchers_have_names():
    """The table's names give their searchers, and an unknown one lists them."""
    for name in SEARCHERS:
        assert searcher_of(name).name == name
    with pytest.raises(SearcherError, match="recursive_programming"):
        searcher_of("simulated_annealing")
    with pytest.raises(SearcherError, match="Did you mean 'dynamic_programming'"):
        searcher_of("dynamic_programing")
    with pytest.raises(ShardingError, match="1, 2 and 3"):
        FullySharded(4)


@pytest.mark.slow
def test_results_do_not_depend_on_the_hash_seed():
    """Two processes with different hash seeds find the same assignment."""
    script = (
        "from problems import problem_of; from programs import PROGRAMS; from autoshard.search import RecursiveProgramming\n"
        "fn, args = PROGRAMS['moe'](); a = RecursiveProgramming().solve(problem_of(fn, *args)).assignment\n"
        "print(sorted(a.layouts.items()), sorted(a.choices.items()), sorted(a.copies.items()))"
    )
    from os import environ

    outputs = {
        subprocess.run(
            [sys.executable, "-c", script],
            env={**environ, "PYTHONHASHSEED": seed, "PYTHONPATH": "tests"},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert len(outputs) == 1


def test_fully_sharded_gathers_loop_constants_once():
    """The weights of a recurrent layer are gathered before its loop, not in every trip."""
    fn, args = PROGRAMS["lstm"]()
    cost = FullySharded().solve(problem_of(fn, *args, mesh={"data": 8})).judgement.cost
    assert {c.count for c in cost.collectives if c.kind == "all_gather"} == {1}


def test_a_value_with_a_solve_method_is_a_searcher():
    """It may take the problem alone, or progress and hints as well, and has its own name in the strategy."""

    class Alone:
        name = "mine"

        def solve(self, problem):
            return DataParallel().solve(problem)

    class Full:
        def solve(self, problem, progress, hints):
            assert callable(progress) and hints is not None
            return DataParallel().solve(problem)

    def program(w, x):
        return jnp.tanh(x @ w)

    like = jax.ShapeDtypeStruct((64, 64), jnp.float32)
    wanted = autoshard.search(program, like, like, cluster="cpu:8", mesh={"data": 8}, searcher="data_parallel")
    for searcher, name in ((Alone(), "mine"), (Full(), "Full")):
        found = autoshard.search(program, like, like, cluster="cpu:8", mesh={"data": 8}, searcher=searcher)
        assert found.record.searcher.name == name and found.in_specs == wanted.in_specs


@pytest.mark.sample(4)
@pytest.mark.parametrize("searcher", [*SEARCHED, SEARCHERS["auto"]()], ids=label)
def test_problems_are_freed_without_garbage_collection(searcher):
    """Nothing that a searcher leaves with a problem refers to it: its tables, gigabytes on meshes of three axes, go with its last user."""
    fn, args = SMALL["two_matmuls"]()
    problem = problem_of(fn, *args)
    problem = problem_of(fn, *args, pins=batch_of(problem))
    gc.collect()
    gc.disable()
    try:
        searcher.solve(problem)
        left = weakref.ref(problem)
        del problem
        assert left() is None
    finally:
        gc.enable()
