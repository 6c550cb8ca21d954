"""Recursive programming over prime factors: it leads to faster meshes, of any number of devices, and leaves named axes alone."""

from __future__ import annotations

import math
from dataclasses import replace
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from problems import eager_cluster, problem_of
from programs import PROGRAMS

import autoshard
from autoshard.budgets import BUDGETS
from autoshard.cluster import Cluster
from autoshard.cost.reshard import _moves
from autoshard.errors import InfeasibleError, SearchLimitError
from autoshard.ir import Mesh, layout_dims, layout_number, layout_numbers, layout_of, layouts
from autoshard.judge.approximate_reshard import ManyAxesModel
from autoshard.judge.model import CostModel
from autoshard.mesh_search import refinement
from autoshard.mesh_search.candidates import placed
from autoshard.mesh_search.refinement import refined
from autoshard.problem import Hints, Problem
from autoshard.reductions import axis_split
from autoshard.search import DynamicProgramming, RecursiveProgramming

TALL = jax.ShapeDtypeStruct((4, 2, 1023, 1023), jnp.float32), jax.ShapeDtypeStruct((2, 1023, 2 * 1023), jnp.float32)


def tall(x, w):
    """A product of which four sequences, two heads and two halves of the features may be split, and nothing else."""
    return jnp.einsum("bhij,hjk->bhik", x, w)


def wide_problem(cluster, mesh) -> Problem:
    fn, args = PROGRAMS["gpt"]()
    return problem_of(fn, *args, cluster=cluster, mesh=mesh)


@pytest.mark.parametrize("rank,n_axes", [(0, 2), (1, 3), (3, 2), (4, 9)])
def test_layouts_and_their_numbers(rank, n_axes):
    """Layouts are the same by one number, by many, and in a list, where that can be made."""
    numbers = np.random.default_rng(0).integers(0, (rank + 1) ** n_axes, 50)
    dims = layout_dims(numbers, rank, n_axes)
    assert (layout_numbers(dims, rank) == numbers).all()
    for number, layout in zip(numbers.tolist(), map(tuple, dims.tolist()), strict=True):
        assert layout_of(number, rank, n_axes) == layout
        assert layout_number(layout, rank) == number
        if n_axes < 9:
            assert layouts(rank, n_axes)[number] == layout


@pytest.mark.parametrize("shape", [(64, 32, 16), (4096, 2048, 16)])
@pytest.mark.parametrize("portable", [True, False])
def test_estimated_reshards_are_exact_for_single_moves(portable, shape):
    """What one move does costs what the exact tables say, on two axes of different links; equal layouts cost nothing."""
    mesh = Mesh.of({"data": 2, "model": 8})
    cluster = Cluster.parse("h100:8x2")
    exact, quick = CostModel(cluster, mesh), ManyAxesModel(cluster, mesh)
    everything = np.arange(4**2)
    table = quick.reshard_seconds(shape, 4, portable, everything[:, None], everything)
    expected = exact.reshard_matrix(shape, 4, portable)
    assert (np.diagonal(table) == 0).all()
    for (source, target), (kind, _) in _moves(3, 2).items():
        if kind in ("slice", "all_gather") or exact.reshard_path(_value(shape), *_pair(source, target))[0].kind == kind:
            assert table[source, target] == pytest.approx(expected[source, target], rel=1e-9), (source, target, kind)
    sliced_first, gathered_last = ((0, -1), (1, 2)), ((0, 2), (1, -1))  # which the all_to_all does not send
    for ends in (sliced_first, gathered_last) if shape[0] > 64 else (sliced_first,):  # of small arrays another order is cheaper
        pair = tuple(layout_number(end, 3) for end in ends)
        assert table[pair] == pytest.approx(expected[pair], rel=1e-9)


def test_a_model_of_many_axes_differs_in_reshards_alone():
    """No method of its own hides one of the model that it derives from."""
    assert {name for name in vars(ManyAxesModel) if not name.startswith("__")} & {*dir(CostModel)} == {"reshard_seconds"}


def _value(shape):
    from autoshard.ir import Value

    return Value(shape, "float32", 4)


def _pair(source, target):
    return layouts(3, 2)[source], layouts(3, 2)[target]


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    "name,mesh",
    [
        ("v5e:4x4", {"data": 8, "model": 2}),
        ("h100:8x3", {"data": 24}),
        ("cpu:12", {"data": 12}),
        ("h100:8x2048", {"data": 1024, "model": 16}),
    ],
)
def test_split_axes_are_prime_and_have_the_links_of_their_axis(name, mesh):
    """Each axis's factors together have its links, and costs of labels that are alike on them are the answer's own; many are joined."""
    cluster = Cluster.parse(name)
    for placing in placed(cluster, [Mesh.of(mesh)], renamed=False):
        fn, args = PROGRAMS["gpt"]()
        problem = Problem(problem_of(fn, *args, mesh=mesh, cluster=cluster).facts, CostModel(cluster, placing))
        split = axis_split.apply(problem)
        sizes, quick = split.problem.mesh.sizes, split.problem.model
        assert len(sizes) == BUDGETS.split_axes if cluster.n_devices > 256 else all(all(size % k for k in range(2, size)) for size in sizes)
        for axis, size in enumerate(placing.sizes):
            own = tuple(number for number, parent in enumerate(split.parents) if parent == axis)
            assert math.prod(sizes[number] for number in own) == size
            for kind in ("all_gather", "all_to_all"):
                assert quick.communication.seconds(kind, 1e6, own) == problem.model.communication.seconds(kind, 1e6, (axis,))


@pytest.mark.slow
def test_a_third_axis_where_a_program_wants_one():
    """Where no two axes use all devices three do, one for each dimension: four sequences, two heads, two halves."""
    two = autoshard.search(tall, *TALL, cluster="v5e:4x4", mesh=2)
    for searcher in ("recursive_programming", "dynamic_programming", "auto"):
        three = autoshard.search(tall, *TALL, cluster="v5e:4x4", searcher=searcher)
        assert sorted(three.record.mesh.sizes) == [2, 2, 4]
        assert three.cost.makespan_seconds < 0.6 * two.cost.makespan_seconds
        assert three.stats["meshes"] > two.stats["meshes"]
    assert len(autoshard.search(tall, *TALL, cluster="v5e:4x4", mesh=1).record.mesh.axes) == 1
    assert len(two.record.mesh.axes) <= 2


def test_any_number_of_devices():
    """Twelve devices are split into three, two and two where that is what divides."""
    args = jax.ShapeDtypeStruct((3 * 4, 2 * 511, 511), jnp.float32), jax.ShapeDtypeStruct((511, 2 * 511), jnp.float32)
    found = autoshard.search(lambda x, w: x @ w, *args, cluster=eager_cluster("h100:4x3"), searcher="recursive_programming")
    assert found.record.mesh.size == 12
    assert math.prod(found.record.mesh.sizes) == 12
    whole = autoshard.search(lambda x, w: x @ w, *args, cluster=eager_cluster("h100:4x3"), searcher="data_parallel")
    assert found.cost.makespan_seconds <= whole.cost.makespan_seconds


def test_axes_that_are_named_stay():
    """A mesh that is given, or whose axes pins name, is not split."""
    pinned = autoshard.search(tall, *TALL, cluster="v5e:4x4", pins={"x": P("rows")}, searcher="recursive_programming")
    assert set(pinned.record.mesh.names) <= {"rows", "data", "model"}
    given = autoshard.search(tall, *TALL, cluster="v5e:4x4", mesh={"a": 4, "b": 4}, searcher="recursive_programming")
    assert given.record.mesh.axes == (("a", 4), ("b", 4))


def test_merged_labels_are_legal_and_equal():
    """Whatever axes are merged, every variable has a label of its domain, the same on all axes of a group, and on the merged mesh."""
    cluster = eager_cluster("v5e:4x4")
    problem = wide_problem(cluster, {"data": 4, "model": 4})
    split = axis_split.apply(problem)
    started = split.project(problem.labels(RecursiveProgramming().solve(problem).assignment))
    for most in (1, 2, 3):
        mesh, merged = split.invert(started, ("a", "b", "c")[:most])
        assert len(mesh.axes) == most and mesh.size == 16
        coarse = Problem(problem.facts, CostModel(cluster, mesh), like=problem)
        assert all(coarse.allows(variable, label) for variable, label in enumerate(merged))
    for one, other in ((0, 2), (2, 0), (1, 3)):
        for variable, label in enumerate(axis_split._equal_on(split.problem, started, [one], [other])):
            assert label[one] == label[other]
            assert split.problem.allows(variable, label)


def test_the_finer_problem_has_the_gain():
    """A finer problem starts with labels that cost less than the answer by the required gain; else there is none."""
    cluster = Cluster.parse("v5e:4x4")
    problem = problem_of(tall, *TALL, cluster=cluster, mesh={"data": 4, "model": 4})
    labels = problem.labels(RecursiveProgramming().solve(problem).assignment)

    def on(mesh):
        return [Problem(problem.facts, CostModel(cluster, placing)) for placing in placed(cluster, [mesh], renamed=False)]

    found = refined(problem, labels, 3, 0.01, on)
    assert found is not None
    found, hints = found
    assert found.cost_of(hints.start) <= 0.99 * problem.cost_of(labels)
    assert found.assignment(hints.start).mesh is found.mesh
    assert refined(problem, labels, 3, 0.9, on) is None
    best = found.labels(RecursiveProgramming().solve(found).assignment)
    assert refined(found, best, 3, 0.01, on) is None


def test_the_best_labels_of_a_placement_are_tried_in_all_others(monkeypatch):
    """A descent is in the placement in which labels cost least, and again in another one if its labels are cheaper there."""
    costs = {"start": (4.0, 3.0, 5.0), "second": (1.5, 2.0, 3.0), "first": (1.0, 2.0, 3.0)}
    problems = [SimpleNamespace(number=k, cost_of=lambda labels, k=k: costs["".join(labels)][k]) for k in range(3)]
    asked = []

    def descended(problem, labels, progress):
        asked.append(problem.number)
        found = {1: "second", 0: "first"}[problem.number]
        return list(found), costs[found][problem.number]

    monkeypatch.setattr(refinement, "_descended", descended)
    (problem, hints), cost = refinement._settled(problems, list("start"), None)
    assert (problem.number, "".join(hints.start), cost, asked) == (0, "first", 1.0, [1, 0])


def test_refinement_ends_where_it_cannot_gain_or_makes_too_many_tables(monkeypatch):
    """Compute that nothing is faster than, or layers that differ, end it before any table is made; a search says the latter."""
    cluster = Cluster.parse("v5e:4x4")
    problem = problem_of(tall, *TALL, cluster=cluster, mesh={"data": 4, "model": 4})
    labels = problem.labels(RecursiveProgramming().solve(problem).assignment)
    with monkeypatch.context() as patch:
        patch.setattr(refinement, "_descended", None)
        patch.setattr(Problem, "compute_bound", lambda problem: problem.fixed_seconds() + problem.cost_of(labels))
        assert refined(problem, labels, 3, 0.01, list) is None
    monkeypatch.setattr(refinement, "BUDGETS", replace(BUDGETS, refined_tables=1))
    with pytest.raises(SearchLimitError, match="layers of this program differ"):
        refined(problem, labels, 3, 0.01, list)
    strategy = autoshard.search(tall, *TALL, cluster=cluster)
    assert len(strategy.mesh_shape) == 2
    assert any("were not split any further" in note for note in strategy.notes)


def test_a_start_is_improved_upon():
    """Recursive programming that is handed the optimum keeps it, where from everything replicated it ends above it."""
    fn, args = PROGRAMS["convnet"]()
    problem = problem_of(fn, *args, mesh={"data": 4, "model": 2})
    best = DynamicProgramming().solve(problem)
    alone = RecursiveProgramming().solve(problem)
    handed = RecursiveProgramming().solve(problem, hints=Hints(start=tuple(problem.labels(best.assignment))))
    assert alone.judgement.cost.objective_seconds > best.judgement.cost.objective_seconds * (1 + 1e-4)
    assert handed.judgement.cost.objective_seconds <= best.judgement.cost.objective_seconds * (1 + 1e-9)


def test_the_slowest_links_are_first():
    """Whatever the order of a mesh's axes, the one whose gathers take longest is freed first, and then the next."""
    fn, args = PROGRAMS["mlp"]()
    cluster = Cluster.parse("v5e:4x4")
    graph = problem_of(fn, *args, cluster=cluster, mesh={"data": 2, "model": 2, "third": 4}).facts
    orders = set()
    for mesh in placed(
        cluster, [Mesh.of({"data": 2, "model": 2, "third": 4}), Mesh.of({"data": 4, "model": 2, "third": 2})], renamed=False
    ):
        freed: list[str] = []
        model = CostModel(cluster, mesh)
        RecursiveProgramming().solve(Problem(graph, model), lambda what, _, freed=freed: freed.append(what))
        first = [what.removeprefix("axis ") for what in freed if what.startswith("axis ")][:3]
        seconds = [model.communication.seconds("all_gather", 1e7, (mesh.names.index(name),)) for name in first]
        assert seconds == sorted(seconds, reverse=True)
        orders.add(tuple(first))
    assert len(orders) > 1


@pytest.mark.slow
@pytest.mark.parametrize("searcher", ["recursive_programming", "auto"])
def test_more_axes_where_nothing_else_fits(searcher):
    """A limit that no mesh of two axes keeps is kept on one of three; else the error has the advice to try all of three."""
    asked = {"cluster": "v5e:4x4", "searcher": searcher, "padding": False}  # 1,023 may not become 1,024
    two = autoshard.search(tall, *TALL, mesh=2, **asked)
    limit = 0.75 * two.cost.peak_bytes
    with pytest.raises(InfeasibleError):
        autoshard.search(tall, *TALL, mesh=2, **asked, memory_limit_bytes=limit)
    three = autoshard.search(tall, *TALL, **asked, memory_limit_bytes=limit)
    assert len(three.record.mesh.axes) == 3 and three.cost.peak_bytes <= limit
    assert three.cost.makespan_seconds < two.cost.makespan_seconds
    with pytest.raises(InfeasibleError, match=r"Or try mesh=3: of the meshes of 3 axes one at most was searched|none takes less than"):
        autoshard.search(tall, *TALL, **asked, memory_limit_bytes=0.5 * three.cost.peak_bytes)
