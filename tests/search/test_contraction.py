"""Laws of taking nodes out of tables, against enumeration."""

from __future__ import annotations

import sys
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_elimination import enumerated, small_tables

from autoshard.problem import BUDGETS, Tables
from autoshard.search.contraction import contracted
from autoshard.search.elimination import table_cost


def tables_of(unary, pairs) -> Tables:
    return Tables(tuple(tuple((k,) for k in range(len(table))) for table in unary), tuple(unary), pairs, np.zeros(len(unary), np.int64))


def entries(tables: Tables) -> int:
    return sum(table.size for table in tables.pairs.values())


@settings(max_examples=300, deadline=None)
@given(small_tables(), st.booleans(), st.sampled_from([1, 16, 1 << 16]))
def test_the_minimum_stays_and_labels_come_back(tables, turned, joined):
    """What is left costs as much as the whole at any labels, once those of the nodes that went are the best beside them."""
    unary, pairs = tables
    given_pairs = {(j, i): table.T for (i, j), table in pairs.items()} if turned else pairs
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys.modules[contracted.__module__], "BUDGETS", replace(BUDGETS, contracted_entries=joined))
        fewer = contracted(tables_of(unary, given_pairs))
    left = fewer.tables
    assert [len(table) for table in left.unary] == [len(options) for options in left.labels]
    assert enumerated(left.unary, left.pairs) == enumerated(unary, pairs)
    for found in product(*(range(len(table)) for table in left.unary)):
        assert table_cost(unary, pairs, fewer.labels(np.array(found))) == table_cost(left.unary, left.pairs, found)


@settings(max_examples=100, deadline=None)
@given(small_tables())
def test_tables_never_grow(tables):
    """Pairs have no more entries without the nodes that went, and of those that stayed none has a single neighbour."""
    whole = tables_of(*tables)
    left = contracted(whole).tables
    assert entries(left) <= entries(whole)
    ends = [node for pair in left.pairs for node in pair]
    assert not ends or min(ends.count(node) for node in set(ends)) > 1


def test_a_ring_goes_but_not_what_is_knitted_closer():
    """Of a ring nothing is left but its minimum; four nodes that are all in pairs with each other stay."""
    generator = np.random.default_rng(0)
    unary = [generator.random(3) for _ in range(12)]
    ring = {(i, (i + 1) % 12): generator.random((3, 3)) for i in range(12)}
    fewer = contracted(tables_of(unary, ring))
    assert not fewer.tables.pairs and len(fewer.gone) == 12
    assert sum(table.item() for table in fewer.tables.unary) == pytest.approx(table_cost(unary, ring, fewer.labels(np.zeros(12, int))))
    close = {(i, j): generator.random((3, 3)) for i in range(4) for j in range(i + 1, 4)}
    assert not contracted(tables_of(unary[:4], close)).gone


def test_a_node_of_few_labels_between_two_of_many_stays():
    """Without it there would be a pair of more entries than its two have; beside such a pair it goes."""
    generator = np.random.default_rng(0)
    unary = [generator.random(n) for n in (2, 5, 5, 3, 3, 3)]
    knit = [(1, 3), (1, 4), (1, 5), (2, 3), (2, 4), (2, 5), (3, 4), (3, 5), (4, 5)]
    pairs = {(i, j): generator.random((len(unary[i]), len(unary[j]))) for i, j in [(0, 1), (0, 2), *knit]}
    assert not contracted(tables_of(unary, pairs)).gone
    pairs[1, 2] = generator.random((5, 5))
    assert [node for node, _, _ in contracted(tables_of(unary, pairs)).gone] == [0]


def test_equal_layers_share_what_comes_of_them():
    """Layers of the very same tables are contracted once, and their new tables are the same again."""
    generator = np.random.default_rng(0)
    node, inside, between = generator.random(5), generator.random((5, 5)), generator.random((5, 5))
    layers = 20
    pairs = {}
    for layer in range(layers):  # three corners, all in pairs with the next layer's, and one node between two of them
        first = 4 * layer
        pairs |= {(first, first + 1): inside, (first, first + 2): inside, (first + 2, first + 3): inside, (first + 1, first + 3): inside}
        if layer:
            pairs |= {(first - 4 + k, first + k): between for k in (0, 1, 3)}
    left = contracted(tables_of([node] * (4 * layers), pairs)).tables
    inner = [left.pairs[4 * layer, 4 * layer + 3] for layer in range(layers)]
    assert len({id(table) for table in inner}) == 1
