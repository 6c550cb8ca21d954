"""Symmetry: repeated layers have equal labels, at the same cost, and no better answer is lost."""

from __future__ import annotations

from functools import cache, reduce

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from problems import problem_of
from programs import PROGRAMS, gpt

from autoshard.budgets import BUDGETS
from autoshard.cluster import Cluster
from autoshard.inference.model import PairwiseModel
from autoshard.inference.reparametrisation import normalised, reparametrise
from autoshard.inference.trw_s import MessagePassing
from autoshard.reductions import symmetry
from autoshard.reductions.symmetry import Quotient
from autoshard.search import DynamicProgramming


def deep(layers=6, **options):
    fn, args = gpt(n_layers=layers)
    return problem_of(fn, *args, **options)


@cache
def whole_problem():
    """The problem of six layers, one for all tests: problems are immutable."""
    return deep()


def random_labels(small: Quotient, seed: int):
    tables = small.tables(range(len(small.mesh.axes)), small.start())
    rng = np.random.default_rng(seed)
    return tables, np.array([rng.integers(len(options)) for options in tables.labels])


def test_layers_beyond_a_few_add_nothing():
    """However deep the program, the quotient problem is as large as that of a few layers, and its variables stand for all the others."""
    sizes = [symmetry.apply(deep(layers)).n_variables for layers in (6, 9, 12)]
    assert sizes[0] == sizes[1] == sizes[2] < deep(3).n_variables


@pytest.mark.parametrize("program", ["mlp", "convnet", "lstm"])
def test_programs_that_hardly_repeat_have_no_quotient(program):
    """Programs of a layer or two are searched as they are."""
    fn, args = PROGRAMS[program]()
    assert symmetry.apply(problem_of(fn, *args)) is None


@pytest.mark.sample(2)
@pytest.mark.parametrize("seed", range(5))
def test_quotient_labels_cost_the_same_in_the_whole(seed):
    """The quotient tables are the whole's, summed: any labels cost the same in both, and the judge agrees."""
    whole = whole_problem()
    small = symmetry.apply(whole)
    tables, chosen = random_labels(small, seed)
    labels = tables.at(chosen)
    every = whole.tables(range(2), small.invert(labels))
    at = every.positions(small.invert(labels))
    assert tables.energy(chosen) == pytest.approx(every.energy(at), rel=1e-12)
    assert small.project(small.invert(labels)) == labels == small.labels(small.assignment(labels))


@cache
def chain():
    """Forty products in a row, all but the outer ones of one class: its variables read each other."""
    weight = jax.ShapeDtypeStruct((64, 64), jnp.float32)
    return problem_of(lambda weights, x: reduce(lambda x, w: jnp.tanh(x @ w), weights, x), [weight] * 40, weight)


@pytest.mark.sample(2)
@pytest.mark.parametrize("make", [whole_problem, chain])
@pytest.mark.parametrize("free", [(0, 1), (0,), (1,)], ids=str)
def test_quotient_tables_are_the_sums_of_the_wholes(free, make):
    """Counting equal tables gives what adding them up does, whatever axes are free and whatever bytes cost."""
    whole = make()
    small = symmetry.apply(whole)
    tables, chosen = random_labels(small, 3)
    labels = tables.at(chosen)
    prices = {value: 1e-12 * (1 + value % 3) for value in range(0, len(whole.graph.values), 2)}
    own, summed = small.tables(free, labels, prices), small.project_tables(whole.tables(free, small.invert(labels), prices))
    assert own.labels == summed.labels and own.incumbent.tolist() == summed.incumbent.tolist()
    assert own.pairs.keys() == summed.pairs.keys()
    for one, other in zip((*own.unary, *own.pairs.values()), (*summed.unary, *map(summed.pairs.get, own.pairs)), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-9, atol=1e-15)


def test_lifted_messages_bound_the_whole():
    """Reparametrised by lifted messages the whole's tables are equivalent, and bound it better than without messages."""
    whole = whole_problem()
    small = symmetry.apply(whole)
    own = small.tables(range(2), small.start())
    every = whole.tables(range(2), whole.start())
    moved, plain = MessagePassing(every, small.lift(reparametrise(own).messages, every)), MessagePassing(every)
    shown = normalised(moved, 0)
    rng = np.random.default_rng(0)
    for _ in range(5):
        labels = [rng.integers(len(options)) for options in every.labels]
        again = shown.bound + PairwiseModel(shown.unary, shown.pairs).energy(labels)
        assert again == pytest.approx(every.energy(labels), rel=1e-9)
    moved.run(3)
    plain.run(3)
    assert plain.bound() < moved.bound()


@pytest.mark.sample(1)
@pytest.mark.parametrize("mesh", [{"data": 4, "model": 2}, {"data": 8}], ids=str)
def test_nothing_better_is_lost(mesh):
    """The answer by way of the quotient problem is within the tolerance of the whole's optimum, and its bound below that."""
    problem = deep(mesh=mesh)
    assert symmetry.apply(problem) is not None
    quick, exact = DynamicProgramming().solve(problem), DynamicProgramming(tolerance=0.0).solve(problem)
    objective = exact.judgement.cost.objective_seconds
    assert objective <= quick.judgement.cost.objective_seconds * (1 + 1e-9)
    assert quick.lower_bound_seconds <= objective * (1 + 1e-9)
    gap = 1 - quick.lower_bound_seconds / quick.judgement.cost.objective_seconds
    assert gap <= 1.01 * DynamicProgramming().tolerance * -(-quick.stats["sweeps"] // BUDGETS.attempt_sweeps)


def test_memory_limits_bind_problems_with_symmetry_too():
    """Under a limit that the fastest answer exceeds, the answer fits."""
    cluster = Cluster.parse("v5e:2x4")
    free = DynamicProgramming().solve(deep(cluster=cluster))
    limit = 0.7 * free.judgement.cost.peak_bytes
    found = DynamicProgramming().solve(deep(cluster=cluster, memory_limit_bytes=limit))
    assert found.judgement.cost.peak_bytes <= limit
    assert found.lower_bound_seconds <= free.judgement.cost.objective_seconds * (1 + 1e-9)
