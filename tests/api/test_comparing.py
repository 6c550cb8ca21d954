"""Comparisons of two strategies say what differs and what it costs."""

import pytest
from jax.sharding import PartitionSpec as P
from programs import two_products, two_products_step

import autoshard
from autoshard.errors import StrategyError


def test_a_comparison_has_what_differs():
    """Groups whose specs differ with both, collectives by kind, and seconds by layer that add up to the two steps."""
    specs = {"x": P("data"), "*": P()}
    whole = autoshard.evaluate(two_products_step, *two_products(), cluster="v5e:2x4", mesh={"data": 8}, in_specs=specs)
    split = autoshard.evaluate(
        two_products_step, *two_products(), cluster="v5e:2x4", mesh={"data": 8}, in_specs={**specs, "*down*": P("data")}
    )
    found = autoshard.compare(whole, split, names=("whole", "split")).data
    (change,) = found.tensors
    assert (change.before, change.after) == ((None, None), ("data", None)) and change.before_bytes == 8 * change.after_bytes
    assert {each.name for each in found.collectives} >= {"all_reduce", "all_gather"}
    assert sum(each.before_seconds for each in found.layers) == pytest.approx(
        whole.cost.compute_seconds + whole.cost.exposed_communication_seconds
    )
    assert "whole" in str(autoshard.compare(whole, split, names=("whole", "split")))
    assert autoshard.compare(whole, whole).data.tensors == ()
    with pytest.raises(StrategyError, match="two strategies"):
        autoshard.compare(whole, "split.json")
