"""The search over meshes: cut meshes could not have gained, and the cuts are counted."""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from problems import eager_cluster, problem_of
from programs import PROGRAMS, mlp

import autoshard
from autoshard.budgets import BUDGETS
from autoshard.cluster import Cluster
from autoshard.errors import InfeasibleError, NothingFasterError, ShardingError
from autoshard.ir import Mesh
from autoshard.judge.model import CostModel
from autoshard.mesh_search import bounds
from autoshard.mesh_search import search as mesh_search
from autoshard.mesh_search.bounds import first_bound, large_bound, may_hide_more, message_bound, quotient_bound, transferred
from autoshard.mesh_search.candidates import placed
from autoshard.mesh_search.search import search_meshes
from autoshard.problem import Hints, Problem, cost_tables
from autoshard.progress import silent
from autoshard.reductions import symmetry
from autoshard.search import DataParallel, DynamicProgramming, RecursiveProgramming, solve
from benchmarks import models

MESHES = ({"data": 8}, {"data": 4, "model": 2}, {"data": 2, "model": 4}, {"a": 2, "b": 2, "c": 2})


def problems(program, **options):
    fn, args = PROGRAMS[program]()
    return [problem_of(fn, *args, mesh=mesh, **options) for mesh in MESHES]


@pytest.mark.sample(1)
@pytest.mark.parametrize("program", ["mlp", "lstm", "convnet"])
def test_cut_meshes_could_not_have_gained(program):
    """No mesh's optimum is lower than the answer's by more than the gain that is worth a search; every mesh is solved or cut."""
    searched = []

    def counted(searcher, problem, progress, hints):
        searched.append(problem)
        return solve(searcher, problem, progress, hints)

    every = problems(program)
    found, problem = search_meshes(DynamicProgramming(), every, counted)
    optima = [DynamicProgramming().solve(one).judgement.cost.objective_seconds for one in every]
    assert found.judgement.cost.objective_seconds * (1 - BUDGETS.least_gain) <= min(optima) * (1 + 1e-9)
    assert len(searched) + found.stats["meshes_cut"] == len(every)
    assert problem in searched


def test_tensor_parallelism_is_tried_on_a_cut_mesh_if_it_may_hide_enough():
    """The bound of the mesh is above the best makespan by more than any answer hides, or it is not."""
    problem = problems("mlp")[1]
    least = 0.9 * DynamicProgramming().solve(problem).judgement.cost.objective_seconds
    search = mesh_search._Search(DynamicProgramming(), [problem], solve, silent, False, None, hints={0: Hints(near_tensor_parallel=True)})
    for hiding, expected in ((1.2, True), (1.0, False)):
        search.best, search.hiding = (least, 0, None), hiding
        assert search._may_hide(0) is expected


def test_a_mesh_may_hide_more_than_the_best_one():
    """Where the best answer hides communication, as far as makespans of near objectives are apart; where it hides none, no mesh may."""
    problem = problems("mlp")[1]
    cost = DynamicProgramming().solve(problem).judgement.cost
    objective = cost.objective_seconds
    hiding, waiting = (replace(cost, makespan_seconds=share * objective) for share in (0.8, 1.0))
    for best, least, expected in ((hiding, 0.98 * objective, True), (waiting, 0.98 * objective, False), (hiding, 0.9 * objective, False)):
        assert may_hide_more(problem, best, least, Hints()) is expected


@pytest.mark.slow
def test_experts_are_in_groups_within_an_nvlink_domain():
    """The answer on a free mesh is no slower than on the mesh of hosts, whose communication is more, and hidden."""
    step, args = models.moe(2, width=2048, experts=16, batch=256)
    meshes = None, {"data": 8, "expert": 8}
    free, given = (autoshard.search(step, *args, cluster="h100:8x8", donate_argnums=0, mesh=mesh) for mesh in meshes)
    assert free.cost.makespan_seconds <= given.cost.makespan_seconds * (1 + 1e-9)


def test_what_is_known_elsewhere_cuts_meshes():
    """Below the optimum of all meshes there is nothing to find, which is said; a search with more to gain finds the same as without."""
    found, _ = search_meshes(DynamicProgramming(), problems("mlp"), solve)
    least = found.judgement.cost.objective_seconds
    with pytest.raises(NothingFasterError):
        search_meshes(DynamicProgramming(), problems("mlp"), solve, warm=Hints(least=0.9 * least))
    again, _ = search_meshes(DynamicProgramming(), problems("mlp"), solve, warm=Hints(least=1.1 * least))
    assert again.judgement.cost == found.judgement.cost


@pytest.mark.sample(1)
@pytest.mark.parametrize("program", ["mlp", "gpt"])
def test_bounds_rise_with_sweeps_and_stay_below_the_optimum(program):
    """Message passing bounds the optimum from below, the tighter the longer, and at least as well as compute alone."""
    fn, args = PROGRAMS[program]()
    problem = problem_of(fn, *args)
    bounds = [problem.compute_bound(), *(message_bound(problem, sweeps)[0] for sweeps in (1, 4, 20))]
    assert bounds == sorted(bounds)
    assert bounds[-1] <= RecursiveProgramming().solve(problem).judgement.cost.objective_seconds * (1 + 1e-9)


@pytest.mark.sample(1)
@pytest.mark.parametrize("program", ["mlp", "gpt"])
def test_quick_bounds_stay_below_what_is_found(program):
    """Those by which a what-if cuts meshes, of answers that are the same in equal layers; the search with them finds as good an answer."""
    every = problems(program)[:3]
    found, _ = search_meshes(DynamicProgramming(), every, solve, quick=True)
    whole, _ = search_meshes(DynamicProgramming(), every, solve)
    least = found.judgement.cost.objective_seconds
    assert least * (1 - BUDGETS.least_gain) <= whole.judgement.cost.objective_seconds * (1 + 1e-9)
    for problem in every:
        optimum = DynamicProgramming().solve(problem).judgement.cost.objective_seconds
        first, passing = first_bound(problem)
        assert first <= quotient_bound(problem, 20, float("inf"), passing) <= optimum * (1 + 1e-9)


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
    strategy = autoshard.search(lambda w, x: x @ w, *args, cluster=cluster, padding=False)
    assert any("of size 7 shards nothing" in note and "64, 32" in note for note in strategy.notes)


SMALL = {"n_layers": 1, "d_model": 256, "ffn": 1024, "batch": 16, "seq": 128, "vocab": 512}  # a wire's direction tells


def placements(name, sizes, **options):
    """The problems of a program on one mesh in every placement worth trying."""
    fn, args = PROGRAMS[name](**options)
    cluster, first = Cluster.parse("v5e:2x4"), problem_of(fn, *args, mesh=sizes)
    meshes = placed(cluster, [Mesh.of(sizes)], renamed=False)
    return [Problem(first.facts, CostModel(cluster, mesh), like=first) for mesh in meshes]


@pytest.mark.slow
def test_the_least_bound_is_searched_first():
    """Of three placements of a mesh the one of least optimum is searched before the others, which are then cut."""
    every, searched = placements("gpt", {"data": 2, "model": 4}, **SMALL), []
    optima = [DynamicProgramming().solve(problem).judgement.cost.objective_seconds for problem in every]
    assert len(every) == 3 and min(optima) < (1 - BUDGETS.least_gain) * optima[0]

    def counted(searcher, problem, progress, hints):
        searched.append(every.index(problem))
        return solve(searcher, problem, progress, hints)

    found, _ = search_meshes(DynamicProgramming(), every, counted)
    assert searched[0] == optima.index(min(optima)) and found.judgement.cost.objective_seconds == min(optima)
    assert found.stats["meshes_cut"] == len(every) - len(searched) > 0


@pytest.mark.slow
@pytest.mark.parametrize("mesh", [{"data": 4, "model": 2}, {"data": 2, "model": 4}])
def test_a_mesh_that_is_given_is_searched_no_worse_than_free(mesh):
    """Nothing that a search of all meshes finds on this one is missed where it is given."""
    fn, args = PROGRAMS["gpt"](**SMALL)
    given = autoshard.search(fn, *args, cluster="v5e:2x4", mesh=mesh)
    free = autoshard.search(fn, *args, cluster="v5e:2x4")
    assert given.cost.makespan_seconds <= free.cost.makespan_seconds * (1 + BUDGETS.least_gain) or free.mesh_shape != mesh


def test_equal_tables_are_one_and_others_are_not(monkeypatch):
    """Tables that are equal are the same object, however few hashes there are."""
    fn, args = PROGRAMS["gpt"]()
    tables = problem_of(fn, *args).whole_tables()
    distinct = {(table.shape, table.tobytes()) for table in tables.pairs.values()}
    assert len({id(table) for table in tables.pairs.values()}) == len(distinct) > 10
    monkeypatch.setattr(cost_tables, "hash", lambda _: 0, raising=False)
    again = problem_of(fn, *args).whole_tables()
    assert all(np.array_equal(table, again.pairs[pair]) for pair, table in tables.pairs.items())


def test_a_mesh_without_a_legal_sharding_does_not_end_the_search(monkeypatch):
    """A mesh on which pins leave no sharding has no first bound either, and the others are searched."""
    every = problems("mlp")
    refused, tables = every[1], Problem.tables

    def none(problem, *args):
        if problem is refused:
            raise ShardingError("a pin leaves none.")
        return tables(problem, *args)

    monkeypatch.setattr(Problem, "tables", none)
    found, problem = search_meshes(DynamicProgramming(), every, solve)
    assert problem is not refused and found.stats["meshes"] == len(every)
    with pytest.raises(ShardingError, match="leaves none"):
        search_meshes(DynamicProgramming(), [refused, refused], solve)


@pytest.mark.slow
@pytest.mark.parametrize("share", [0.995, 0.05])
def test_where_memory_binds_one_placement_is_searched(share):
    """Where the limit binds one placement of each mesh is searched; the others have its answer, judged on their links, or its refusal."""
    fn, args = PROGRAMS["gpt_scan"]()
    cluster = eager_cluster("v5e:4x4")
    free = problem_of(fn, *args, cluster=cluster, mesh={"data": 4, "model": 4})
    limit = share * RecursiveProgramming().solve(free).judgement.cost.peak_bytes
    meshes = placed(cluster, [Mesh.of({"data": 8, "model": 2}), Mesh.of({"data": 4, "model": 4})], renamed=False)
    every = [Problem(free.facts, CostModel(cluster, mesh), None, limit, free) for mesh in meshes]
    searched = []

    def counted(searcher, problem, progress, hints):
        searched.append(problem.mesh.sizes)
        return solve(searcher, problem, progress, hints)

    if share < 0.1:
        with pytest.raises(InfeasibleError, match="a strategy must fit"):
            search_meshes(RecursiveProgramming(), every, counted)
    else:
        found, problem = search_meshes(RecursiveProgramming(), every, counted)
        assert found.judgement.cost.peak_bytes <= limit
        assert found.judgement.assignment.mesh is problem.mesh
        assert found.lower_bound_seconds <= found.judgement.cost.objective_seconds
    assert len(every) > len(set(searched)) == len(searched)


def test_an_answer_is_transferred_to_other_links():
    """The same labels, judged by the other placement's costs."""
    fn, args = PROGRAMS["mlp"]()
    cluster = Cluster.parse("v5e:2x4")
    one, other = (
        Problem(problem_of(fn, *args, cluster=cluster, mesh={"data": 4, "model": 2}).facts, CostModel(cluster, mesh))
        for mesh in placed(cluster, [Mesh.of({"data": 4, "model": 2})], renamed=False)[:2]
    )
    solution = RecursiveProgramming().solve(one)
    there = transferred(other, one, solution)
    assert other.labels(there.assignment) == one.labels(solution.assignment)
    assert there.assignment.mesh is other.mesh is not one.mesh
    assert there.judgement.cost.makespan_seconds == other.evaluate(there.assignment).cost.makespan_seconds
    assert there.lower_bound_seconds <= there.judgement.cost.objective_seconds


@pytest.mark.slow
def test_of_many_meshes_those_of_large_tables_are_cut_by_a_layer(monkeypatch):
    """Where all meshes of three axes are searched and their tables are too large, the bound of a layer cuts them, and only then."""
    fn, args = mlp(layers=16, batch=64)
    problem = problem_of(fn, *args, mesh={"a": 2, "b": 2, "c": 2})
    small = symmetry.apply(problem)
    assert small is not None
    axes = range(3)
    limit = small.table_entries(axes, BUDGETS.bound_entries)
    assert limit < problem.table_entries(axes, BUDGETS.bound_entries)
    assert large_bound(problem, 60, float("inf")) == problem.compute_bound()
    monkeypatch.setattr(bounds, "BUDGETS", replace(BUDGETS, bound_entries=limit))
    best = DynamicProgramming().solve(problem)
    bound = large_bound(problem, 60, float("inf"))
    assert problem.compute_bound() < bound <= best.judgement.cost.objective_seconds * (1 + 1e-9)
    asked = []
    monkeypatch.setattr(mesh_search, "large_bound", lambda problem, *_: asked.append(problem.mesh.sizes) or float("inf"))
    for most, meshes in ((2, set()), (3, {(2, 2, 2)})):
        strategy = autoshard.search(fn, *args, cluster=eager_cluster(), mesh=most)
        assert set(asked) == meshes
        assert len(strategy.mesh_shape) < 3
