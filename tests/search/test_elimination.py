"""Laws of exact elimination, against enumeration."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autoshard.errors import SearchLimitError
from autoshard.problem import BUDGETS
from autoshard.search import elimination
from autoshard.search.elimination import Eliminator, eliminate, table_cost


@st.composite
def small_tables(draw):
    """Up to seven variables of up to four labels, random pairs among them."""
    sizes = draw(st.lists(st.integers(1, 4), min_size=1, max_size=7))
    generator = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    unary = [generator.integers(0, 9, n).astype(float) for n in sizes]
    edges = [(i, j) for i in range(len(sizes)) for j in range(i + 1, len(sizes)) if draw(st.booleans())]
    return unary, {(i, j): generator.integers(0, 9, (sizes[i], sizes[j])).astype(float) for i, j in edges}


def enumerated(unary, pairs):
    return min(table_cost(unary, pairs, labels) for labels in product(*(range(len(table)) for table in unary)))


@settings(max_examples=200, deadline=None)
@given(small_tables())
def test_elimination_finds_the_minimum(tables):
    """The cost equals that of enumeration, and is the cost of the labels returned."""
    unary, pairs = tables
    found = eliminate(unary, pairs)
    assert found.cost == enumerated(unary, pairs)
    assert table_cost(unary, pairs, found.labels) == found.cost


@settings(max_examples=100, deadline=None)
@given(small_tables(), st.integers(0, 2**32 - 1))
def test_a_bounded_elimination_never_loses_to_its_incumbent(tables, seed):
    """With tiny tables allowed, some variables keep their incumbent labels and the answer is at least as good as the incumbent."""
    unary, pairs = tables
    generator = np.random.default_rng(seed)
    incumbent = [int(generator.integers(0, len(table))) for table in unary]
    found = eliminate(unary, pairs, max_entries=8, incumbent=incumbent)
    assert enumerated(unary, pairs) <= found.cost <= table_cost(unary, pairs, incumbent)
    assert table_cost(unary, pairs, found.labels) == found.cost


def test_a_chain_has_width_one_however_long():
    """Elimination orders follow the structure: a chain of 2,000 variables never joins more than two."""
    generator = np.random.default_rng(0)
    unary = [generator.random(5) for _ in range(2000)]
    pairs = {(i, i + 1): generator.random((5, 5)) for i in range(1999)}
    assert eliminate(unary, pairs).width <= 2


def test_too_large_a_table_names_the_searcher_to_try():
    """Without an incumbent a limit that is met is an error with what to do."""
    unary = [np.zeros(4) for _ in range(8)]
    pairs = {(i, j): np.ones((4, 4)) for i in range(8) for j in range(i + 1, 8)}
    with pytest.raises(SearchLimitError, match="recursive_programming"):
        eliminate(unary, pairs, max_entries=100)


@pytest.mark.parametrize(("limit", "cheap"), [({"joined_entries": 1000}, False), ({}, True)])
def test_many_large_tables_are_too_large_together(monkeypatch, limit, cheap):
    """What all tables of an elimination hold is limited as well, and what a cheap one may; an incumbent is improved all the same."""
    generator = np.random.default_rng(0)
    unary = [generator.random(4) for _ in range(8)]
    pairs = {(i, j): generator.random((4, 4)) for i in range(8) for j in range(i + 1, 8)}
    best = eliminate(unary, pairs)
    monkeypatch.setattr(elimination, "BUDGETS", replace(BUDGETS, dear_entries=10, **limit))
    with pytest.raises(SearchLimitError, match=r"entries in all, at most, .*recursive_programming"):
        Eliminator()(unary, pairs, cheap=cheap)
    found = Eliminator(max_entries=256)(unary, pairs, incumbent=best.labels)
    assert found.cost == pytest.approx(best.cost)


def test_nothing_to_decide_costs_nothing():
    """No variables have one labelling."""
    found = eliminate([], {})
    assert found.cost == 0.0 and found.labels.shape == (0,)


@settings(max_examples=100, deadline=None)
@given(small_tables(), st.integers(0, 2**32 - 1))
def test_eliminations_that_share_an_order_are_exact_too(tables, seed):
    """Over the same pairs an eliminator finds each minimum, whatever sizes the variables have from one time to the next."""
    unary, pairs = tables
    generator = np.random.default_rng(seed)
    shared = Eliminator()
    for _ in range(4):
        kept = [np.sort(generator.permutation(len(table))[: generator.integers(1, len(table) + 1)]) for table in unary]
        some = [table[labels] for table, labels in zip(unary, kept, strict=True)]
        between = {(i, j): table[np.ix_(kept[i], kept[j])] for (i, j), table in pairs.items()}
        found = shared(some, between)
        assert found.cost == enumerated(some, between) == table_cost(some, between, found.labels)


def test_equal_layers_are_eliminated_once(monkeypatch):
    """In a chain of layers that have the very same tables, what is inside a layer is eliminated for all of them at once."""
    steps = []
    first = Eliminator._met_first
    monkeypatch.setattr(Eliminator, "_met_first", lambda self, *args: steps.append(1) or first(self, *args))
    generator = np.random.default_rng(0)
    node, inside, between = generator.random(5), generator.random((5, 5)), generator.random((5, 5))
    n = 300
    pairs = {(i, i + 1): inside for i in range(n - 1) if i % 3 < 2} | {(i, i + 3): between for i in range(0, n - 3, 3)}
    found = Eliminator()([node] * n, pairs)
    assert len(steps) < n / 3 + 10  # those of the layers' own variables, then the chain of what is left
    copies = Eliminator()([node.copy() for _ in range(n)], {pair: table.copy() for pair, table in pairs.items()})
    assert found.cost == pytest.approx(copies.cost) and (found.labels == copies.labels).all()
