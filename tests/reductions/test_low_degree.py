"""Laws of eliminating variables of low degree, against enumeration."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from small_models import enumerated, labellings, small_models

from autoshard.budgets import BUDGETS
from autoshard.inference.model import PairwiseModel
from autoshard.reductions import low_degree


@settings(max_examples=60, deadline=None)
@given(small_models(), st.booleans(), st.sampled_from([1, 16, 1 << 16]))
def test_the_minimum_stays_and_labels_come_back(model, turned, joined):
    """The reduced model has the energy of the whole at any labels, once those of the eliminated variables are the best beside them."""
    given_pairs = {(j, i): table.T for (i, j), table in model.pairs.items()} if turned else model.pairs
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(low_degree, "BUDGETS", replace(BUDGETS, low_degree_entries=joined))
        reduced = low_degree.apply(PairwiseModel(model.unary, given_pairs))
    assert enumerated(reduced.model) == enumerated(model)
    for found in labellings(reduced.model):
        assert model.energy(reduced.invert(np.array(found))) == reduced.model.energy(found)


@settings(max_examples=100, deadline=None)
@given(small_models())
def test_tables_never_grow(model):
    """Pairs have no more entries without the eliminated variables, and none that is left has a single neighbour."""
    left = low_degree.apply(model).model
    assert left.n_entries <= model.n_entries
    ends = [variable for pair in left.pairs for variable in pair]
    assert not ends or min(ends.count(variable) for variable in set(ends)) > 1


def test_a_ring_is_eliminated_but_not_a_clique():
    """Of a ring nothing is left but its minimum; four variables that are all in pairs with each other stay."""
    generator = np.random.default_rng(0)
    unary = [generator.random(3) for _ in range(12)]
    ring = {(i, (i + 1) % 12): generator.random((3, 3)) for i in range(12)}
    whole = PairwiseModel(unary, ring)
    reduced = low_degree.apply(whole)
    assert not reduced.model.pairs and len(reduced.eliminated) == 12
    assert sum(table.item() for table in reduced.model.unary) == pytest.approx(whole.energy(reduced.invert(np.zeros(12, int))))
    close = {(i, j): generator.random((3, 3)) for i in range(4) for j in range(i + 1, 4)}
    assert not low_degree.apply(PairwiseModel(unary[:4], close)).eliminated


def test_a_variable_of_few_labels_between_two_of_many_stays():
    """Without it there would be a pair of more entries than its two have; beside such a pair it goes."""
    generator = np.random.default_rng(0)
    unary = [generator.random(n) for n in (2, 5, 5, 3, 3, 3)]
    knit = [(1, 3), (1, 4), (1, 5), (2, 3), (2, 4), (2, 5), (3, 4), (3, 5), (4, 5)]
    pairs = {(i, j): generator.random((len(unary[i]), len(unary[j]))) for i, j in [(0, 1), (0, 2), *knit]}
    assert not low_degree.apply(PairwiseModel(unary, pairs)).eliminated
    pairs[1, 2] = generator.random((5, 5))
    assert [one.variable for one in low_degree.apply(PairwiseModel(unary, pairs)).eliminated] == [0]


def test_equal_layers_share_their_results():
    """Layers of the very same tables are eliminated once, and their new tables are the same again."""
    generator = np.random.default_rng(0)
    variable, inside, between = generator.random(5), generator.random((5, 5)), generator.random((5, 5))
    layers = 20
    pairs = {}
    for layer in range(layers):  # three corners, all in pairs with the next layer's, and one variable between two of them
        first = 4 * layer
        pairs |= {(first, first + 1): inside, (first, first + 2): inside, (first + 2, first + 3): inside, (first + 1, first + 3): inside}
        if layer:
            pairs |= {(first - 4 + k, first + k): between for k in (0, 1, 3)}
    left = low_degree.apply(PairwiseModel([variable] * (4 * layers), pairs)).model
    inner = [left.pairs[4 * layer, 4 * layer + 3] for layer in range(layers)]
    assert len({id(table) for table in inner}) == 1
