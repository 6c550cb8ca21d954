"""The division of layers into stages against all divisions."""

from __future__ import annotations

from dataclasses import fields, replace
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autoshard.pipeline.layer_costs import Costs, LayerCosts
from autoshard.pipeline.layering import best_layering

NOTHING = Costs(*[0.0] * len(fields(Costs)))


def costs(seconds, state=0.0, residual=0.0, end_seconds=0.0, end_state=0.0):
    """Costs of a layer and of the ends."""
    return LayerCosts(
        replace(NOTHING, microbatch_seconds=seconds, objective_seconds=seconds, state_bytes=state, kept_bytes=residual),
        replace(NOTHING, microbatch_seconds=end_seconds, objective_seconds=end_seconds, state_bytes=end_state),
    )


def by_hand(options, n_layers, m, alive, limit, send):
    """The least makespan of all divisions."""
    best = float("inf")
    n_stages = len(alive)
    for layers in product(range(1, n_layers + 1), repeat=n_stages):
        if sum(layers) != n_layers:
            continue
        times = []
        for s, k in enumerate(layers):
            share = float(s == n_stages - 1)
            fitting = [
                max(k * each.layer.microbatch_seconds + share * each.ends.microbatch_seconds, send)
                for each in options
                if k * (each.layer.state_bytes + alive[s] * each.layer.kept_bytes) + share * each.ends.state_bytes <= limit
            ]
            times.append(min(fitting, default=float("inf")))
        best = min(best, sum(times) + (m - 1) * max(times) + 2 * (n_stages - 1) * send)
    return best


@settings(max_examples=150, deadline=None)
@given(
    st.lists(
        st.builds(costs, st.integers(1, 9), st.integers(0, 4), st.integers(0, 4), st.integers(0, 9), st.integers(0, 4)),
        min_size=1,
        max_size=2,
    ),
    st.integers(1, 3),
    st.integers(1, 7),
    st.integers(1, 6),
    st.integers(5, 40),
    st.integers(0, 3),
)
def test_the_best_of_all_divisions(options, n_stages, n_layers, m, limit, send):
    """No division that fits has a smaller makespan, and where none fits there is no answer."""
    alive = [n_stages - s for s in range(n_stages)]
    found = best_layering(options, n_layers, m, alive, limit, send)
    least = by_hand(options, n_layers, m, alive, limit, send)
    if least == float("inf"):
        assert found is None
        return
    assert found is not None
    assert found.makespan_seconds == pytest.approx(least)
    assert sum(found.layers) == n_layers
    assert max(found.peak_bytes) <= limit


def test_a_stage_with_the_ends_gets_fewer_layers():
    """What is not in layers counts on the last stage."""
    found = best_layering([costs(1.0, end_seconds=3.0)], 13, 100, [4, 3, 2, 1], 1.0)
    assert found.layers == (4, 4, 4, 1)


def test_a_stage_takes_the_faster_plan_where_it_fits():
    """The first stages hold more microbatches, and alone need the plan of less memory."""
    options = [costs(1.0, residual=3.0), costs(1.5, residual=1.0)]
    found = best_layering(options, 4, 1, [4, 3, 2, 1], 6.0)
    assert found.options == (1, 1, 0, 0)
