"""Laws of leaving dominated labels out, against enumeration."""

from __future__ import annotations

import sys

import numpy as np
import pytest
from hypothesis import given, settings
from small_models import enumerated, restricted, small_models

from autoshard.budgets import BUDGETS
from autoshard.errors import SearchLimitError
from autoshard.inference import dead_end_elimination
from autoshard.inference.dead_end_elimination import undominated
from autoshard.inference.model import PairwiseModel
from autoshard.inference.reduced_cost_fixing import ReducedCostFixing
from autoshard.inference.reparametrisation import Reparametrisation


@settings(max_examples=100, deadline=None)
@given(small_models())
def test_the_minimum_is_among_the_kept_labels(model):
    """Whole numbers tie all the time, and labels that take each other's place do not all go."""
    kept = undominated(model)
    assert all(len(labels) and np.all(np.diff(labels) > 0) for labels in kept)
    assert enumerated(restricted(model, kept)) == enumerated(model)


def test_of_labels_that_cost_the_same_everywhere_the_first_stays():
    """Variables without a neighbour keep their cheapest label; with one, a label that is cheaper beside some of its labels stays."""
    alone = [np.array([2.0, 1.0, 1.0])]
    assert [labels.tolist() for labels in undominated(PairwiseModel(alone, {}))] == [[1]]
    unary = [np.zeros(3), np.zeros(2)]
    table = np.array([[0.0, 1.0], [1.0, 0.0], [0.0, 1.0]])
    assert [labels.tolist() for labels in undominated(PairwiseModel(unary, {(0, 1): table}))] == [[0, 1], [0, 1]]
    assert [labels.tolist() for labels in undominated(PairwiseModel(unary, {(0, 1): table + np.array([0.0, 2.0])}))] == [[0], [0]]


def test_equal_layers_are_looked_at_once(monkeypatch):
    """Of a chain of variables with the very same tables two ends and the middle are looked at, however long it is."""
    looked = []
    dominates = dead_end_elimination._dominates
    monkeypatch.setattr(dead_end_elimination, "_dominates", lambda *args: looked.append(args) or dominates(*args))
    costs, table = np.arange(4.0), np.random.default_rng(0).random((4, 4)) * 8
    n = 50
    kept = undominated(PairwiseModel([costs] * n, {(i, i + 1): table for i in range(n - 1)}))
    assert len(kept) == n
    assert len(looked) <= 12 * BUDGETS.dominance_rounds


def test_a_restriction_that_is_too_large_is_solved_without_dominated_labels(monkeypatch):
    """Where an elimination of all labels is refused, one of the undominated ones finds the same minimum."""
    generator = np.random.default_rng(1)
    n = 9
    unary = [np.concatenate([generator.random(2), 5 + generator.random(6)]) for _ in range(n)]  # six labels that nothing makes up for
    pairs = {(i, j): generator.random((8, 8)) / n for i in range(n) for j in range(i + 1, n)}
    model = PairwiseModel(unary, pairs)
    moved = Reparametrisation(0.0, tuple(unary), pairs, {}, tuple(np.zeros(8) for _ in range(n)), 0)
    found = ReducedCostFixing(2**9, 1, 1e-3)._restricted_minimum(model, moved, 1.0)
    assert model.energy(found) == pytest.approx(enumerated(restricted(model, undominated(model))))
    monkeypatch.setattr(sys.modules[ReducedCostFixing.__module__], "undominated", lambda model: [np.arange(n) for n in model.sizes])
    with pytest.raises(SearchLimitError):
        ReducedCostFixing(2**9, 1, 1e-3)._restricted_minimum(model, moved, 1.0)
