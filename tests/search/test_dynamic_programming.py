"""The exact searcher: its optimum, its proof, and its answer where either is out of reach."""

from __future__ import annotations

import pytest
from problems import SMALL, eager_cluster, problem_of
from programs import PROGRAMS

from autoshard.errors import SearchLimitError
from autoshard.search import BruteForce, DynamicProgramming, RecursiveProgramming


@pytest.mark.sample(2)
@pytest.mark.parametrize("program", SMALL)
def test_dynamic_programming_finds_what_brute_force_finds(program):
    """On every small problem the objective is brute force's, and proven."""
    fn, args = SMALL[program]()
    problem = problem_of(fn, *args, mesh={"data": 4}, cluster=eager_cluster("v5e:2x2"))
    exact = BruteForce(max_assignments=3_000_000).solve(problem).judgement.cost.objective_seconds
    found = DynamicProgramming().solve(problem)
    assert found.judgement.cost.objective_seconds == pytest.approx(exact, rel=1e-9)
    assert found.lower_bound_seconds == pytest.approx(exact, rel=1e-9)


@pytest.mark.sample(1)
@pytest.mark.parametrize("mesh", [{"data": 4, "model": 2}, {"a": 2, "b": 2, "c": 2}], ids=str)
@pytest.mark.parametrize("program", ["mlp", "lstm", "convnet", "gpt_scan"])
def test_the_optimum_over_all_axes_is_proven(program, mesh):
    """With no tolerance, train steps have no gap on two axes and next to none on three, and sweeps of single axes are never better."""
    fn, args = PROGRAMS[program]()
    problem = problem_of(fn, *args, mesh=mesh)
    found = DynamicProgramming(tolerance=0.0).solve(problem)
    objective = found.judgement.cost.objective_seconds
    assert found.lower_bound_seconds == pytest.approx(objective, rel=1e-9 if len(mesh) == 2 else 5e-4)
    assert objective <= RecursiveProgramming().solve(problem).judgement.cost.objective_seconds * (1 + 1e-9)


@pytest.mark.slow
def test_small_tables_leave_a_gap_and_say_so():
    """Where elimination may not have large enough tables, the answer comes with a bound below it."""
    fn, args = PROGRAMS["gpt"]()
    problem = problem_of(fn, *args)
    exact = DynamicProgramming().solve(problem)
    hurried = DynamicProgramming(max_entries=40, max_sweeps=1).solve(problem)
    optimum = exact.judgement.cost.objective_seconds
    assert hurried.lower_bound_seconds <= optimum <= hurried.judgement.cost.objective_seconds * (1 + 1e-9)
    assert hurried.lower_bound_seconds < hurried.judgement.cost.objective_seconds


def test_too_many_axes_name_the_searcher_to_use():
    """Before any large table is made, the error names the limit and the way out."""
    fn, args = PROGRAMS["gpt"]()
    mesh = dict.fromkeys("abcdef", 2)
    with pytest.raises(SearchLimitError, match=r"up to 67,108,864 entries.*recursive_programming"):
        DynamicProgramming().solve(problem_of(fn, *args, mesh=mesh, cluster=eager_cluster("v5e:8x8")))


def test_the_memory_limit_is_kept():
    """Under a limit that binds, the peak is below it and the bound still that of the unlimited optimum."""
    fn, args = PROGRAMS["mlp"]()
    free = DynamicProgramming().solve(problem_of(fn, *args))
    limit = 0.95 * free.judgement.cost.peak_bytes
    found = DynamicProgramming().solve(problem_of(fn, *args, memory_limit_bytes=limit))
    assert found.judgement.cost.peak_bytes <= limit
    assert free.judgement.cost.objective_seconds <= found.judgement.cost.objective_seconds * (1 + 1e-9)
    assert found.lower_bound_seconds == pytest.approx(free.judgement.cost.objective_seconds, rel=1e-9)
