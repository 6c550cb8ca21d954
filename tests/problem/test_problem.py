"""Problems stay as they were made: searches of one leave nothing behind that another would see."""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from problems import problem_of
from programs import PROGRAMS, gpt

from autoshard.budgets import BUDGETS
from autoshard.mesh_search.anytime import Incumbent
from autoshard.mesh_search.bounds import first_bound, message_bound
from autoshard.problem import Hints
from autoshard.reductions import symmetry
from autoshard.search import DataParallel, DynamicProgramming, RecursiveProgramming


def make(program="mlp", **options):
    fn, args = PROGRAMS[program]() if program in PROGRAMS else gpt(n_layers=6)
    return problem_of(fn, *args, **options)


@pytest.mark.parametrize("name", ["memory_limit_bytes", "observer", "pins", "anything"])
def test_no_attribute_can_be_set(name):
    """Neither of a problem nor of its quotient, whether it has such an attribute or not; the error says what to use."""
    problem = make("deep")
    for one in (problem, symmetry.apply(problem), problem.within(1e9)):
        with pytest.raises(AttributeError, match=r"stays as it was made.*problem\.within"):
            setattr(one, name, None)


@pytest.mark.parametrize("program", ["mlp", "deep"])
def test_a_bound_computed_twice_is_the_same(program):
    """Message passing keeps no state between calls but the hints, whatever was searched in between."""
    problem = make(program)
    first, bound = first_bound(problem)[0], message_bound(problem, 4)[0]
    DynamicProgramming().solve(problem)
    assert first_bound(problem)[0] == first == first_bound(make(program))[0]
    assert message_bound(problem, 4)[0] == bound > first


@pytest.mark.sample(2)
@pytest.mark.parametrize("searcher", [DynamicProgramming(), RecursiveProgramming()], ids=lambda one: one.name)
@pytest.mark.parametrize("share", [None, 0.9])
def test_a_search_leaves_nothing_behind(searcher, share):
    """The second search of a problem has the first one's answer, bound and number of sweeps; so with a limit that binds."""
    problem = make()
    if share is not None:
        problem = problem.within(share * searcher.solve(problem).judgement.cost.peak_bytes)
    first, second = searcher.solve(problem), searcher.solve(problem)
    assert second.judgement.cost == first.judgement.cost
    assert second.lower_bound_seconds == first.lower_bound_seconds
    assert {**second.stats, "search_seconds": 0.0} == {**first.stats, "search_seconds": 0.0}


def test_prices_of_a_vector_that_a_body_reads_as_a_matrix():
    """A price on a bias is one on each name that stores it, in the layouts of that name's rank."""

    def scanned(bias, xs):
        row = bias.reshape(1, 1, 32)
        return jax.lax.scan(lambda carry, x: (carry, jnp.sin(x + row)), 0.0, xs)[1], bias * 2

    problem = problem_of(scanned, *(jax.ShapeDtypeStruct(shape, "float32") for shape in ((32,), (4, 8, 16, 32))))
    bias = problem.graph.arguments[0]
    assert {rank for _, _, rank, _ in problem.charges(bias)} == {1, 3}
    free = range(len(problem.mesh.axes))
    plain, charged = (problem.tables(free, problem.start(), prices) for prices in (None, {bias: 1e-3}))
    assert any((after > before).any() for before, after in zip(plain.unary, charged.unary, strict=True))


def test_messages_start_the_next_search():
    """With the hints of the first search the second needs fewer sweeps."""
    problem = make("moe")
    first = DynamicProgramming(tolerance=0.0).solve(problem)
    second = DynamicProgramming(tolerance=0.0).solve(problem, hints=first.hints)
    assert second.stats["sweeps"] < first.stats["sweeps"]
    assert first.hints.messages and not Hints().messages


def test_problems_that_differ_in_their_limit_or_observer_share_their_tables():
    """Tables and facts are computed once; each has its own limit and observer."""
    problem = make()
    incumbent = Incumbent(problem)
    other = problem.within(1e9).observed_by(incumbent)
    assert other.whole_tables() is problem.whole_tables()
    assert (problem.memory_limit_bytes, other.memory_limit_bytes) == (None, 1e9)
    assert problem.observer is None and other.observer is incumbent
    DataParallel().solve(problem)
    assert incumbent.best is None
    RecursiveProgramming().solve(other)
    assert incumbent.best is not None


@pytest.mark.parametrize("program", ["mlp", "moe"])
def test_tables_of_some_axes_are_parts_of_those_of_all(program, monkeypatch):
    """Whatever axes are free, and whether all were before or not, tables, labels and the present ones are the same."""
    monkeypatch.setattr("autoshard.problem.cost_tables.BUDGETS", replace(BUDGETS, whole_labels=0))
    whole, alone = make(program), make(program)
    labels = whole.whole_tables().at([len(options) // 2 for options in whole.whole_tables().labels])
    domain = whole.costs.domain(0, labels[0], (0,))
    assert domain.whole is whole.costs.whole_domain(0) and alone.costs.domain(0, labels[0], (0,)).whole is None
    for free in ((), (0,), (1,)):
        ours, theirs = whole.tables(free, labels), alone.tables(free, labels)
        assert ours.labels == theirs.labels and ours.incumbent.tolist() == theirs.incumbent.tolist()
        assert all(np.array_equal(a, b) for a, b in zip(ours.unary, theirs.unary, strict=True))
        assert ours.pairs.keys() == theirs.pairs.keys() and all(np.array_equal(ours.pairs[k], theirs.pairs[k]) for k in ours.pairs)
