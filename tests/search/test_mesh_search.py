"""The search over meshes: what is cut could not have gained, and the cut is seen."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
from problems import eager_cluster, problem_of
from programs import PROGRAMS

import autoshard
from autoshard.errors import InfeasibleError
from autoshard.search import DataParallel, DynamicProgramming, RecursiveProgramming, solve
from autoshard.search.mesh_search import LEAST_GAIN, message_bound, search_meshes

MESHES = ({"data": 8}, {"data": 4, "model": 2}, {"data": 2, "model": 4}, {"a": 2, "b": 2, "c": 2})


def problems(program, **options):
    fn, args = PROGRAMS[program]()
    return [problem_of(fn, *args, mesh=mesh, **options) for mesh in MESHES]


@pytest.mark.parametrize("program", ["mlp", "lstm", "convnet"])
def test_cut_meshes_could_not_have_gained(program):
    """No mesh's optimum is lower than the answer's by more than the gain that is worth a search; every mesh is solved or cut."""
    asked = []

    def counted(searcher, problem, progress):
        asked.append(problem)
        return solve(searcher, problem, progress)

    every = problems(program)
    found, problem = search_meshes(DynamicProgramming(), every, counted)
    optima = [DynamicProgramming().solve(one).judgement.cost.objective_seconds for one in every]
    assert found.judgement.cost.objective_seconds * (1 - LEAST_GAIN) <= min(optima) * (1 + 1e-9)
    assert len(asked) + found.stats["meshes_cut"] == len(every)
    assert problem in asked


@pytest.mark.parametrize("program", ["mlp", "gpt"])
def test_bounds_rise_with_sweeps_and_stay_below_the_optimum(program):
    """Message passing bounds the optimum from below, the tighter the longer, and at least as well as compute alone."""
    fn, args = PROGRAMS[program]()
    problem = problem_of(fn, *args)
    bounds = [problem.compute_bound(), *(message_bound(problem, sweeps) for sweeps in (1, 4, 20))]
    assert bounds == sorted(bounds)
    assert bounds[-1] <= RecursiveProgramming().solve(problem).judgement.cost.objective_seconds * (1 + 1e-9)


@pytest.mark.parametrize("searcher", [RecursiveProgramming(), DataParallel()], ids=lambda one: one.name)
def test_heuristics_get_a_bound_that_is_worth_something(searcher):
    """The bound of a searcher that proves nothing is that of message passing."""
    every = problems("mlp")[1:2]
    found, problem = search_meshes(searcher, every, solve)
    assert problem.compute_bound() < found.lower_bound_seconds <= found.judgement.cost.objective_seconds


def test_the_smallest_peak_of_all_meshes_is_named():
    """Where nothing fits, the error is that of the mesh that came nearest."""
    with pytest.raises(InfeasibleError) as caught:
        search_meshes(DataParallel(), problems("mlp", memory_limit_bytes=1000.0), solve)
    peaks = [DataParallel().solve(one).judgement.cost.peak_bytes for one in problems("mlp")]
    assert caught.value.smallest_peak_bytes == min(peaks)


def test_an_axis_that_divides_nothing_says_so():
    """A mesh of seven devices and a batch of 32: the strategy's notes say why nothing is sharded."""
    args = jnp.ones((64, 64)), jax.ShapeDtypeStruct((32, 64), jnp.float32)
    cluster = eager_cluster("cpu:7")
    strategy = autoshard.search(lambda w, x: x @ w, *args, cluster=cluster)
    assert any("of size 7 shards nothing" in note and "64, 32" in note for note in strategy.notes)
