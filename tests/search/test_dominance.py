"""Laws of leaving dominated labels out, against enumeration."""

from __future__ import annotations

import sys

import numpy as np
import pytest
from hypothesis import given, settings
from test_elimination import enumerated, small_tables

from autoshard.errors import SearchLimitError
from autoshard.problem import BUDGETS, Tables
from autoshard.search import dominance
from autoshard.search.dominance import undominated
from autoshard.search.elimination import table_cost
from autoshard.search.reparametrisation import Reparametrisation
from autoshard.search.shells import Shells


def left_of(unary, pairs, kept):
    return [costs[labels] for costs, labels in zip(unary, kept, strict=True)], {
        (i, j): table[kept[i][:, None], kept[j]] for (i, j), table in pairs.items()
    }


@settings(max_examples=500, deadline=None)
@given(small_tables())
def test_the_minimum_is_among_what_is_kept(tables):
    """Whole numbers tie all the time, and labels that take each other's place do not all go."""
    kept = undominated(*tables)
    assert all(len(labels) and np.all(np.diff(labels) > 0) for labels in kept)
    assert enumerated(*left_of(*tables, kept)) == enumerated(*tables)


def test_of_labels_that_cost_the_same_everywhere_the_first_stays():
    """Nodes without a neighbour keep their cheapest label; with one, a label that is cheaper beside some of its labels stays."""
    alone = [np.array([2.0, 1.0, 1.0])]
    assert [labels.tolist() for labels in undominated(alone, {})] == [[1]]
    unary = [np.zeros(3), np.zeros(2)]
    table = np.array([[0.0, 1.0], [1.0, 0.0], [0.0, 1.0]])
    assert [labels.tolist() for labels in undominated(unary, {(0, 1): table})] == [[0, 1], [0, 1]]
    assert [labels.tolist() for labels in undominated(unary, {(0, 1): table + np.array([0.0, 2.0])})] == [[0], [0]]


def test_equal_layers_are_looked_at_once(monkeypatch):
    """Of a chain of nodes with the very same tables two ends and the middle are looked at, however long it is."""
    looked = []
    dominates = dominance._dominates
    monkeypatch.setattr(dominance, "_dominates", lambda *args: looked.append(args) or dominates(*args))
    costs, table = np.arange(4.0), np.random.default_rng(0).random((4, 4)) * 8
    n = 50
    kept = undominated([costs] * n, {(i, i + 1): table for i in range(n - 1)})
    assert enumerated(*left_of([costs] * 3, {(0, 1): table, (1, 2): table}, kept[:2] + kept[-1:])) >= 0.0
    assert len(looked) <= 12 * BUDGETS.dominance_rounds


def test_a_shell_that_is_too_large_is_solved_without_dominated_labels(monkeypatch):
    """Where an elimination of all labels is refused, one of the undominated ones finds the same minimum."""
    generator = np.random.default_rng(1)
    n = 9
    unary = [np.concatenate([generator.random(2), 5 + generator.random(6)]) for _ in range(n)]  # six labels that nothing makes up for
    pairs = {(i, j): generator.random((8, 8)) / n for i in range(n) for j in range(i + 1, n)}
    tables = Tables(tuple(tuple((k,) for k in range(8)) for _ in range(n)), tuple(unary), pairs, np.zeros(n, np.int64))
    moved = Reparametrisation(0.0, tables.unary, pairs, {}, tuple(np.zeros(8) for _ in range(n)), 0)
    found = Shells(2**9, 1, 1e-3)._shell(tables, moved, 1.0)
    assert table_cost(unary, pairs, found) == pytest.approx(enumerated(*left_of(unary, pairs, undominated(unary, pairs))))
    monkeypatch.setattr(sys.modules[Shells.__module__], "undominated", lambda unary, _: [np.arange(len(costs)) for costs in unary])
    with pytest.raises(SearchLimitError):
        Shells(2**9, 1, 1e-3)._shell(tables, moved, 1.0)
