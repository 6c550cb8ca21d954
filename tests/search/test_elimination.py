"""Laws of exact elimination, against enumeration."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autoshard.errors import SearchLimitError
from autoshard.search.elimination import eliminate, table_cost


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
