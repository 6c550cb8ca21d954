"""Laws of exact elimination, against enumeration."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from small_models import enumerated, restricted, small_models

from autoshard.budgets import BUDGETS
from autoshard.errors import SearchLimitError
from autoshard.inference import elimination_order
from autoshard.inference.elimination import Eliminator, eliminate
from autoshard.inference.model import PairwiseModel


@settings(max_examples=50, deadline=None)
@given(small_models())
def test_elimination_finds_the_minimum(model):
    """The cost equals that of enumeration, and is the energy of the labels returned."""
    found = eliminate(model)
    assert found.cost == enumerated(model) == model.energy(found.labels)


@settings(max_examples=100, deadline=None)
@given(small_models(), st.integers(0, 2**32 - 1))
def test_a_bounded_elimination_never_loses_to_its_incumbent(model, seed):
    """With tiny tables allowed, some variables keep their incumbent labels and the answer is at least as good as the incumbent."""
    generator = np.random.default_rng(seed)
    incumbent = [int(generator.integers(0, n)) for n in model.sizes]
    found = eliminate(model, max_entries=8, incumbent=incumbent)
    assert enumerated(model) <= found.cost <= model.energy(incumbent)
    assert model.energy(found.labels) == found.cost


def test_a_chain_has_width_one_however_long():
    """Elimination orders follow the structure: a chain of 2,000 variables never joins more than two."""
    generator = np.random.default_rng(0)
    unary = [generator.random(5) for _ in range(2000)]
    pairs = {(i, i + 1): generator.random((5, 5)) for i in range(1999)}
    assert eliminate(PairwiseModel(unary, pairs)).width <= 2


def test_too_large_a_table_names_the_searcher_to_try():
    """Without an incumbent a limit that is met is an error with what to do."""
    unary = [np.zeros(4) for _ in range(8)]
    pairs = {(i, j): np.ones((4, 4)) for i in range(8) for j in range(i + 1, 8)}
    with pytest.raises(SearchLimitError, match="recursive_programming"):
        eliminate(PairwiseModel(unary, pairs), max_entries=100)


@pytest.mark.parametrize(("limit", "cheap"), [({"joined_entries": 1000}, False), ({}, True)])
def test_many_large_tables_are_too_large_together(monkeypatch, limit, cheap):
    """The entries of all joined tables are limited as well, and more so where it has to be cheap; incumbents are improved still."""
    generator = np.random.default_rng(0)
    unary = [generator.random(4) for _ in range(8)]
    pairs = {(i, j): generator.random((4, 4)) for i in range(8) for j in range(i + 1, 8)}
    model = PairwiseModel(unary, pairs)
    best = eliminate(model)
    monkeypatch.setattr(elimination_order, "BUDGETS", replace(BUDGETS, small_entries=10, **limit))
    with pytest.raises(SearchLimitError, match=r"entries in all, at most, .*recursive_programming"):
        Eliminator()(model, cheap=cheap)
    found = Eliminator(max_entries=256)(model, incumbent=best.labels)
    assert found.cost == pytest.approx(best.cost)


def test_nothing_to_decide_costs_nothing():
    """No variables have one labelling."""
    found = eliminate(PairwiseModel([], {}))
    assert found.cost == 0.0 and found.labels.shape == (0,)


@settings(max_examples=100, deadline=None)
@given(small_models(), st.integers(0, 2**32 - 1))
def test_eliminations_that_share_an_order_are_exact_too(model, seed):
    """Over the same pairs an eliminator finds each minimum, whatever sizes the variables have from one time to the next."""
    generator = np.random.default_rng(seed)
    shared = Eliminator()
    for _ in range(4):
        some = restricted(model, [np.sort(generator.permutation(n)[: generator.integers(1, n + 1)]) for n in model.sizes])
        found = shared(some)
        assert found.cost == enumerated(some) == some.energy(found.labels)


def test_equal_layers_are_eliminated_once(monkeypatch):
    """In a chain of layers that have the very same tables, what is inside a layer is eliminated for all of them at once."""
    steps = []
    first = Eliminator._minimised
    monkeypatch.setattr(Eliminator, "_minimised", lambda self, *args: steps.append(1) or first(self, *args))
    generator = np.random.default_rng(0)
    variable, inside, between = generator.random(5), generator.random((5, 5)), generator.random((5, 5))
    n = 300
    pairs = {(i, i + 1): inside for i in range(n - 1) if i % 3 < 2} | {(i, i + 3): between for i in range(0, n - 3, 3)}
    found = Eliminator()(PairwiseModel([variable] * n, pairs))
    assert len(steps) < n / 3 + 10  # those of the layers' own variables, then the chain of what is left
    copies = Eliminator()(PairwiseModel([variable.copy() for _ in range(n)], {pair: table.copy() for pair, table in pairs.items()}))
    assert found.cost == pytest.approx(copies.cost) and (found.labels == copies.labels).all()
