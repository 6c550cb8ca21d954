from __future__ import annotations

import json
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from problems import eager_cluster
from programs import concrete, mlp

import autoshard
from autoshard.errors import StrategyError
from autoshard.ir import Mesh
from autoshard.verify import Row

MESH = {"x": 2, "y": 4}


@pytest.fixture(scope="module")
def program():
    fn, args = mlp()
    return fn, args, autoshard.search(fn, *args, cluster=eager_cluster(), mesh=MESH)


@pytest.mark.parametrize("target", ["shardy", "cpu"])
def test_a_strategy_does_what_it_says(program, target):
    """Of the partitioner's and of the compiler's collectives, none is missing, none is new, and all have the predicted size."""
    fn, args, strategy = program
    found = autoshard.verify(strategy, fn, *args, target=target)
    assert found.exact and found.bytes_ratio == 1.0
    assert sum(row.actual_count for row in found.rows) == sum(c.count for c in strategy.cost.collectives) > 0
    assert (found.actual_peak_bytes or 0) > 0 or target == "shardy"


def test_arrays_do_for_types(program):
    """Real arguments, wherever they lie, give the same answer as abstract ones."""
    fn, args, strategy = program
    assert autoshard.verify(strategy, fn, *concrete(args)) == autoshard.verify(strategy, fn, *args)


def test_a_mesh_needs_no_devices():
    """A strategy for more devices than there are is held against the partitioner all the same."""
    fn, args = mlp(layers=1)
    strategy = autoshard.search(fn, *args, cluster=eager_cluster("v5e:4x8"), mesh={"x": 4, "y": 8})
    assert autoshard.verify(strategy, fn, *args).exact
    with pytest.raises(autoshard.ClusterError, match=r"32, and there are 8 devices"):
        autoshard.verify(strategy, fn, *args, target="cpu")


def test_a_difference_shows(program):
    """Where the prediction lacks a collective, the report marks its row and the ratio is not one."""
    fn, args, strategy = program
    cost = strategy.cost
    fewer = replace(strategy.record, cost=replace(cost, collectives=cost.collectives[1:]))
    found = autoshard.verify(autoshard.Strategy(fewer), fn, *args)
    assert not found.exact and found.bytes_ratio > 1.0
    assert str(found).count("differs") == 1 and "differs" in found._repr_html_()


def test_json_says_it_all(program):
    """A verification is plain JSON, round numbers and all."""
    fn, args, strategy = program
    found = json.loads(json.dumps(autoshard.verify(strategy, fn, *args).to_json()))
    assert found["exact"] is True and found["mesh"] == MESH
    assert found["rows"][0].keys() == Row.__dataclass_fields__.keys()


def test_a_loaded_strategy_is_verified(program, tmp_path):
    """What was saved can be held against the partitioner in another process."""
    fn, args, strategy = program
    strategy.save(tmp_path / "s.json")
    assert autoshard.verify(autoshard.load(tmp_path / "s.json"), fn, *args).exact


def test_wrong_input_is_refused(program):
    """An unknown target and another program are named for what they are."""
    fn, args, strategy = program
    with pytest.raises(StrategyError, match=r"one of \['cpu', 'shardy'\], got 'abacus'"):
        autoshard.verify(strategy, fn, *args, target="abacus")
    with pytest.raises(StrategyError):
        autoshard.verify(strategy, lambda *a: jax.tree.map(jnp.sin, a), *args)


def test_no_collectives_is_a_ratio_of_one():
    """A program without communication on either side agrees."""
    strategy = autoshard.search(lambda x: x + 1.0, jax.ShapeDtypeStruct((8, 8), np.float32), cluster="cpu:8", mesh={"data": 8})
    found = autoshard.verify(strategy, lambda x: x + 1.0, jax.ShapeDtypeStruct((8, 8), np.float32))
    assert found.exact and found.bytes_ratio == 1.0 and found.mesh == Mesh.of({"data": 8})
