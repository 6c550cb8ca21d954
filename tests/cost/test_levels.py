"""Costs of collectives between the parts of a cluster."""

from dataclasses import replace

import numpy as np
import pytest

from autoshard.cluster import Cluster
from autoshard.cost.collectives import COLLECTIVES, Communication
from autoshard.ir import Mesh

BYTES = 1e9


def costs(text, sizes, **level):
    cluster = Cluster.parse(text)
    cluster = replace(cluster, levels=tuple(replace(each, **level) for each in cluster.levels))
    return Communication(cluster.links(Mesh(tuple((f"a{axis}", size) for axis, size in enumerate(sizes)))))


def test_large_sums_cross_levels_in_parts():
    """An all_reduce over 2 slices of 16 sends a 16th of the bytes of each device across, and as much within as on one slice."""
    model = costs("2*v5e:4x4", (2, 16), latency_seconds=0.0)
    across = 2 * (1 / 2) * BYTES / 16 / (25e9 / 8)
    within = model.seconds("all_reduce", BYTES, (1,))
    assert model.seconds("all_reduce", BYTES, (0, 1)) == pytest.approx(across + within, rel=1e-3)
    assert model.seconds("all_gather", BYTES, (0, 1)) == pytest.approx(across / 2 + model.seconds("all_gather", BYTES, (1,)), rel=1e-3)


def test_small_sums_cross_levels_whole():
    """The fewest messages count where bytes do not: no reduce_scatter and all_gather around the step across."""
    model = costs("2*h100:8x2", (2, 16))
    level = Cluster.parse("2*h100:8x2").levels[0]
    assert model.seconds("all_reduce", 4.0, (0, 1)) < model.seconds("all_reduce", 4.0, (1,)) + 3 * level.latency_seconds + 1e-5


def test_xla_divides_some_collectives_of_slices_badly():
    """A reduce_scatter of several slices reduces on all devices within; an all_to_all sends everything between hosts."""
    tpu = costs("2*v5e:4x4", (2, 16), latency_seconds=0.0)
    scattered, across = tpu.seconds("reduce_scatter", BYTES, (0, 1)), (1 / 2) * BYTES / 16 / (25e9 / 8)
    assert scattered == pytest.approx(across + tpu.seconds("all_reduce", BYTES, (1,)), rel=1e-3)
    assert tpu.seconds("all_to_all", BYTES, (0, 1)) == pytest.approx(31 / 32 * BYTES / (25e9 / 8), rel=1e-3)
    gpu = costs("2*h100:8x2", (2, 16), latency_seconds=0.0)
    assert gpu.seconds("all_to_all", BYTES, (0, 1)) == pytest.approx(
        1 / 2 * BYTES / 48e9 + gpu.seconds("all_to_all", BYTES, (1,)), rel=1e-2
    )


@pytest.mark.parametrize("text", ["2*v5e:4x4", "4*h100:8x2", "2*cpu:4"])
@pytest.mark.parametrize("kind", COLLECTIVES)
def test_laws(text, kind):
    """Seconds grow with bytes and parts, fall with bandwidth, and are those of one slice for an axis within it."""
    cluster = Cluster.parse(text)
    n = cluster.levels[0].size
    inner = cluster.n_devices // n
    model, sizes = costs(text, (n, inner)), np.array([1.0, 1e3, 1e6, 1e9])
    for axes in ((0,), (0, 1)):
        seconds = model.seconds(kind, sizes, axes)
        assert np.all(np.diff(seconds) > 0)
        slower = costs(text, (n, inner), oversubscription=2.0).seconds(kind, sizes, axes)
        assert np.all(seconds <= slower) and seconds[-1] < slower[-1]
        more = Cluster.parse(f"{2 * n}*{text.partition('*')[2]}")
        assert np.all(seconds <= costs(more.name, (2 * n, inner)).seconds(kind, sizes, axes) * (1 + 1e-9))
    alone = Communication(Cluster.parse(text.partition("*")[2]).links(Mesh.of({"a": inner})))
    assert np.array_equal(model.seconds(kind, sizes, (1,)), alone.seconds(kind, sizes, (0,)))
    if kind == "all_reduce":
        both = model.seconds("reduce_scatter", sizes, (0, 1)) + model.seconds("all_gather", sizes, (0, 1))
        assert np.all(model.seconds(kind, sizes, (0, 1)) <= both * (1 + 1e-9))
