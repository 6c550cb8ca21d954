"""Exchanges between shards: their sizes counted by hand, on rules in Shardy's notation."""

from __future__ import annotations

import pytest

from autoshard.cluster import Cluster
from autoshard.cost.collectives import Communication
from autoshard.cost.halo_exchange import exchange_steps
from autoshard.ir import Mesh, Rule, Value

MESH = Mesh.of({"x": 2, "y": 4})
COMMUNICATION = Communication(Cluster.parse("cpu:8").links(MESH))
NONE = (-1, -1)


def steps(rule, choice, *shapes, wanted=None):
    """Kind, axes and bytes of each exchange; values are of four bytes an element."""
    values = [Value(shape, "float32", 4.0) for shape in shapes]
    found = exchange_steps(MESH, COMMUNICATION, Rule.parse(rule), choice, values, wanted or [True] * len(values))
    assert all(step.seconds == COMMUNICATION.seconds(step.kind, step.nbytes, step.axes) > 0 for step in found)
    assert all(step.source == step.target for step in found)
    return [(step.kind, step.axes, step.nbytes / 4) for step in found]


@pytest.mark.parametrize(
    ("sends", "choice", "expected"),
    [
        ("collective_permute 2 of 0", ((0, -1), NONE), [("collective_permute", (0,), 2 * 8)]),
        ("collective_permute 2 of 0", (NONE, (0, -1)), [("collective_permute", (1,), 2 * 8)]),
        ("collective_permute all of 0", (NONE, (0, -1)), [("collective_permute", (1,), 4 * 8)]),
        ("all_gather 1 of 0", ((0, -1), NONE), [("all_gather", (0,), 2 * 8)]),  # from each shard its one row
        ("all_gather 1 of 0", ((0, -1), (0, -1)), [("all_gather", (0, 1), 8 * 8)]),
        ("all_gather 1 of 0", ((0, -1), (1, -1)), [("all_gather", (0,), 2 * 2)]),  # of rows that are split themselves
        ("all_gather 1 of 0", (NONE, (1, -1)), []),
        ("collective_permute 1 of 0 + collective_permute 1 of 0", ((0, -1), NONE), [("collective_permute", (0,), 8)] * 2),
    ],
)
def test_shards_send_what_their_factor_says(sends, choice, expected):
    """As many elements along the factor as it says, of as much of the other dimensions as a device has; nothing where it is whole."""
    assert steps(f"([i, j])->([i, j]) {{i=16, j=8}} permutation={{i/{sends}}}", choice, (16, 8), (16, 8)) == expected


def test_later_factors_send_what_came_in_before():
    """A second halo has the corners, which the first one brought."""
    rule = "([i, j])->([i, j]) {i=16, j=8} permutation={i/collective_permute 1 of 0, j/collective_permute 1 of 0}"
    found = steps(rule, ((0, -1), (1, -1)), (16, 8), (16, 8))
    assert found == [("collective_permute", (0,), 1 * 2), ("collective_permute", (1,), (8 + 1) * 1)]


def test_results_that_nobody_reads_are_not_sent():
    """Of two results only the wanted one is."""
    rule = "([i])->([i], [i]) {i=16} permutation={i/all_gather 1 of 1 + all_gather 1 of 2}"
    assert len(steps(rule, ((0, -1), NONE), (16,), (16,), (16,))) == 2
    assert len(steps(rule, ((0, -1), NONE), (16,), (16,), (16,), wanted=[True, True, False])) == 1
