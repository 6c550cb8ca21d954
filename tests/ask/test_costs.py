"""What single collectives and products cost: the cost model itself, by public names."""

import doctest
import importlib

import numpy as np
import pytest

import autoshard
from autoshard.cost.collectives import COLLECTIVES
from autoshard.ir import Mesh
from autoshard.judge.model import CostModel

SIZES = 2.0 ** np.arange(10, 31, 2)


def test_examples():
    """The examples in the docstrings hold."""
    assert doctest.testmod(importlib.import_module("autoshard.ask.costs")).failed == 0


@pytest.mark.parametrize("cluster", ["v5e:4x4", "h100:8x2", "cpu:16"])
@pytest.mark.parametrize("kind", COLLECTIVES)
def test_a_collective_costs_what_the_judge_says(cluster, kind):
    """By axis name or all axes, for one size or many: the seconds of the judge's own model."""
    shape = {"data": 4, "model": 4}
    model = CostModel(autoshard.Cluster.parse(cluster), Mesh.of(shape)).communication
    seconds = autoshard.collective_seconds(kind, SIZES, cluster=cluster, mesh=shape, axes="model")
    assert np.array_equal(seconds, model.seconds(kind, SIZES, (1,))) and np.all(np.diff(seconds) > 0)
    assert autoshard.collective_seconds(kind, SIZES[3], cluster=cluster, mesh=shape, axes=("model",)) == seconds[3]
    assert autoshard.collective_seconds(kind, 2.0**20, cluster=cluster, mesh=shape) == model.seconds(kind, 2.0**20, (0, 1))


def test_a_product_below_the_tile_costs_as_much_as_one_that_fills_it():
    """Halving a side that the matrix unit pads anyway saves nothing; doubling one that fills it doubles the time."""
    seconds = autoshard.matmul_seconds(8192, 8192, np.array([64, 128, 4096, 8192]), cluster="v5e:1x1")
    assert seconds[0] == pytest.approx(seconds[1], rel=0.05) and seconds[3] == pytest.approx(2 * seconds[2], rel=0.1)


@pytest.mark.parametrize(
    ("asked", "words"),
    [({"kind": "all_sum"}, ("all_reduce", "'all_sum'")), ({"axes": "x"}, ("('x',)", "model"))],
)
def test_wrong_names_are_refused(asked, words):
    """An unknown collective and an unknown axis are told apart from those there are."""
    with pytest.raises(autoshard.ShardingError) as error:
        autoshard.collective_seconds(**{"kind": "all_reduce", "nbytes": 8, "cluster": "cpu:8", "mesh": {"data": 2, "model": 4}, **asked})
    assert all(word in str(error.value) for word in words)
