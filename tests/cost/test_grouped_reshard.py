"""Reshards pair by pair against those of all layouts at once."""

import itertools
import math

import pytest

from autoshard.cluster import Cluster
from autoshard.cost.collectives import Communication
from autoshard.cost.grouped_reshard import GroupedReshards
from autoshard.cost.reshard import Reshards, path_seconds
from autoshard.ir import Mesh, layout_number, layouts

SHAPE = (64, 64)


@pytest.mark.parametrize(("text", "sizes"), [("v5e:2x4", (2, 2, 2)), ("h100:8x4", (4, 2, 4)), ("v5p:4x4x4", (4, 4, 4))])
def test_pairs_cost_what_the_table_of_all_layouts_says(text, sizes):
    """No path is cheaper than the cheapest, nine of ten are that one, and the steps of each lead from its source to its target."""
    mesh = Mesh(tuple(zip("abc", sizes, strict=True)))
    communication = Communication(Cluster.parse(text).links(mesh))
    options = 1e-12, False
    whole = Reshards(mesh, communication, *options)
    grouped = GroupedReshards(mesh, communication, whole, *options)
    matrix, equal = whole.matrix(SHAPE, 4.0), []
    for source, target in itertools.permutations(layouts(2, 3), 2):
        path = grouped.path(SHAPE, 4.0, source, target)
        assert (path[0].source, path[-1].target) == (source, target)
        assert all(one.target == other.source for one, other in itertools.pairwise(path))
        least, seconds = matrix[layout_number(source, 2), layout_number(target, 2)], path_seconds(path)
        assert seconds >= least * (1 - 1e-9) - 1e-11
        equal.append(math.isclose(seconds, least, rel_tol=1e-6, abs_tol=1e-11))
    assert sum(equal) >= 0.9 * len(equal)


def test_a_pair_of_many_axes_takes_no_table():
    """Eight axes have 6,561 layouts of a matrix; what changes is one axis, which is gathered alone."""
    mesh = Mesh(tuple((f"a{number}", 2) for number in range(8)))
    communication = Communication(Cluster.parse("v5e:16x16").links(mesh))
    whole = Reshards(mesh, communication)
    source = (0, 0, 0, 1, 1, 1, -1, -1)
    (step,) = GroupedReshards(mesh, communication, whole, 0.0, True).path((4096, 4096), 2.0, source, (0, 0, -1, *source[3:]))
    assert (step.kind, step.axes, step.nbytes) == ("all_gather", (2,), 4096 * 4096 * 2 / 32)

