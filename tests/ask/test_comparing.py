"""Comparisons of two strategies say what differs and what it costs."""

from dataclasses import replace

import pytest
from jax.sharding import PartitionSpec as P
from programs import two_products, two_products_step

import autoshard
from autoshard.errors import StrategyError
from autoshard.explanation.difference import Change, _ranked


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


def test_different_programs_are_told():
    """First of all, with what differs; of one program in microbatches, or under another sharding, nothing is said."""
    options = {"cluster": "v5e:2x4", "mesh": {"data": 8}, "in_specs": {"*": P()}}
    one, larger = (autoshard.evaluate(two_products_step, *two_products(batch), **options) for batch in (256, 512))
    halved = autoshard.evaluate(two_products_step, *two_products(), microbatches=2, **options)
    other = autoshard.evaluate(lambda w, v: w @ v, *two_products()[0]["params"].values(), **options)
    assert autoshard.compare(one, halved).data.same_program and "Different programs" not in str(autoshard.compare(one, halved))
    found = " ".join(str(autoshard.compare(one, larger)).split())
    assert "Different programs: two_products_step (first) and two_products_step (second); x is float32[256,512] in one" in found
    found = " ".join(str(autoshard.compare(one, other)).split())
    assert "of 3 and 2 arguments 0 have the same path" in found and "None has the same path in both." in found
    many = one.with_record(replace(one.record, cost=replace(one.cost, makespan_seconds=100 * one.cost.makespan_seconds)))
    found = " ".join(str(autoshard.compare(one, many)).split())
    assert ", 100 times the " in found and " 100 x " in found


def test_rounding_is_no_difference():
    """Sums of the same seconds in another order are equal, and seconds that overlap are none where all are exposed."""
    whole = autoshard.evaluate(two_products_step, *two_products(), cluster="v5e:2x4", mesh={"data": 8}, in_specs={"x": P("data")})
    cost = whole.record.cost
    assert cost.exposed_communication_seconds > 0
    dust = cost.exposed_communication_seconds * (1 + 1e-15)
    other = whole.with_record(replace(whole.record, cost=replace(cost, communication_seconds=dust)))
    assert autoshard.compare(whole, other).data.after.hidden_seconds in (0.0, autoshard.compare(whole, other).data.before.hidden_seconds)
    (change,) = _ranked([Change("layer", 0.3, 0.1 + 0.2)])
    assert change.after_seconds == change.before_seconds


def test_equal_specs_on_other_meshes_are_not_called_equal_shardings():
    """What is split over 'data' alike is split in 8 on one mesh and in 4 on another; on one mesh it is sharded alike."""
    options = {"cluster": "v5e:2x4", "in_specs": {"x": P("data"), "*": P()}}
    one, other = (
        autoshard.evaluate(two_products_step, *two_products(), mesh=mesh, **options) for mesh in ({"data": 8}, {"data": 4, "model": 2})
    )
    assert "All have the same specs, each on its own mesh." in str(autoshard.compare(one, other))
    assert "All are sharded alike." in str(autoshard.compare(one, one))


def test_nothing_is_said_to_be_found_where_shardings_are_given():
    """The report of what was evaluated names no searcher."""
    given = autoshard.evaluate(two_products_step, *two_products(), cluster="v5e:2x4", mesh={"data": 8}, in_specs={"x": P("data")})
    assert "as given, without a search" in str(given.explain()) and "found by" not in str(given.explain())
