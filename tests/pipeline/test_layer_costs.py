"""Costs of layers from costs of programs."""

from __future__ import annotations

from dataclasses import astuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autoshard.pipeline.layer_costs import Costs, LayerCosts, layer_costs, with_less_memory

COSTS = st.builds(Costs, *[st.floats(0, 100)] * 6)


@given(COSTS, COSTS, st.integers(1, 5), st.integers(1, 20))
def test_affine_costs_are_found_and_extended(layer, ends, fewer, n):
    """Two programs of layers and ends give both, and so the costs of any number of layers."""
    truth = LayerCosts(layer, ends)
    found = layer_costs(truth.of(fewer), truth.of(fewer + 1), fewer)
    assert astuple(found.of(n)) == pytest.approx(astuple(truth.of(n)), abs=1e-6)


@given(COSTS, COSTS)
def test_no_cost_is_negative(fewer, more):
    """Searches need not be consistent, and costs stay ones."""
    found = layer_costs(fewer, more, 2)
    assert min(*astuple(found.layer), *astuple(found.ends)) >= 0


def test_another_solution_changes_layers_alone():
    """Of a solution of less memory the ends cost what they did, but for their share of its state."""
    free = LayerCosts(Costs(1, 1, 1, 0, 10, 5), Costs(2, 2, 2, 1, 4, 3))
    found = with_less_memory(free, Costs(8, 8, 7, 1, 10, 9), 0.9, 3)
    assert found.ends == Costs(2, 2, 2, 1, pytest.approx(1.0), 3)
    assert astuple(found.layer) == pytest.approx((2, 2, 5 / 3, 0, 3, 2))
