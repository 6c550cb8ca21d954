"""Laws of reduced-cost fixing, against enumeration."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from small_models import enumerated, small_models

from autoshard.inference.reduced_cost_fixing import ReducedCostFixing
from autoshard.inference.reparametrisation import reparametrise


@settings(max_examples=50, deadline=None)
@given(small_models(), st.sampled_from([0, 1, 60]))
def test_thresholds_rise_to_the_optimum(model, sweeps):
    """However loose the bound, the labels that are found are optimal, and the bound is then their cost."""
    found, bound = ReducedCostFixing(1 << 21, 60, 0.0).minimise(model, reparametrise(model, max_sweeps=sweeps))
    best = enumerated(model)
    assert bound == pytest.approx(best, abs=1e-6)
    assert model.energy(found) == pytest.approx(best, abs=1e-9)


@settings(max_examples=50, deadline=None)
@given(small_models(), st.sampled_from([0.0, 1e-3, 0.3, 2.0]), st.integers(1, 5), st.booleans(), st.sampled_from([2, 6, 1 << 21]))
def test_few_thresholds_are_tried_and_the_bound_holds(model, tolerance, attempt, last, max_entries):
    """Whatever is tolerated and however small tables must stay, a few dozen restrictions give a bound below the optimum, labels above."""
    fixing, calls = ReducedCostFixing(max_entries, 60, tolerance), []
    restricted = fixing._restricted_minimum
    with pytest.MonkeyPatch.context() as patch:
        counted = lambda *args, **options: calls.append(args) or _at_most(60, calls) or restricted(*args, **options)  # noqa: E731
        patch.setattr(fixing, "_restricted_minimum", counted)
        found, bound = fixing.minimise(model, reparametrise(model, max_sweeps=1), attempt, last)
    best = enumerated(model)
    assert bound <= best + 1e-9
    assert model.energy(found) >= best - 1e-9
    if last and not tolerance and max_entries > 6:
        assert bound == pytest.approx(best, abs=1e-6)


def _at_most(n: int, calls: list) -> None:
    assert len(calls) <= n, "the same threshold is tried again and again"
