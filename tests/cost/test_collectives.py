"""Laws of collective costs, and one published measurement."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autoshard.cluster import Cluster
from autoshard.cost.collectives import COLLECTIVES, Communication
from autoshard.ir import Mesh
from benchmarks.cost_model.nccl import PUBLISHED

PLACES = (
    ("v5e:4x4", (4, 4)),
    ("v5e:16x16", (16, 16)),
    ("v5p:4x4x8", (8, 16)),
    ("v6e:2x4", (4, 2)),
    ("h100:8x4", (4, 8)),
    ("h100:8x4", (2, 4, 4)),
    ("a100:8", (8,)),
    ("b200:8x3", (2, 12)),
    ("cpu:8", (2, 2, 2)),
)


def communication(text, sizes, **faster):
    data = Cluster.parse(text).to_dict()
    data["interconnect"].update({name: data["interconnect"][name] * factor for name, factor in faster.items()})
    return Communication(Cluster.from_dict(data).links(Mesh(tuple((f"a{axis}", size) for axis, size in enumerate(sizes)))))


places = st.sampled_from(PLACES)
kinds = st.sampled_from(COLLECTIVES)
sizes = st.floats(0, 1e11)


@st.composite
def axes_of(draw, place):
    return tuple(draw(st.sets(st.integers(0, len(place[1]) - 1), min_size=1)))


@settings(deadline=None, max_examples=60)
@given(st.data(), places, kinds, sizes, sizes)
def test_more_bytes_are_never_faster(data, place, kind, a, b):
    """Seconds are finite, not negative and monotone in bytes."""
    axes = data.draw(axes_of(place))
    model = communication(*place)
    less, more = sorted((a, b))
    assert 0 <= model.seconds(kind, less, axes) <= model.seconds(kind, more, axes) < np.inf


@settings(deadline=None, max_examples=60)
@given(st.data(), places, kinds, sizes, st.floats(1, 10))
def test_more_bandwidth_is_never_slower(data, place, kind, nbytes, factor):
    """Faster wires, near or far, never cost more."""
    axes = data.draw(axes_of(place))
    slow = communication(*place).seconds(kind, nbytes, axes)
    for name in ("bandwidth_bytes_per_second", "network_bandwidth_bytes_per_second"):
        assert communication(*place, **{name: factor}).seconds(kind, nbytes, axes) <= slow * (1 + 1e-12)


@settings(deadline=None, max_examples=60)
@given(st.data(), places, sizes)
def test_all_reduce_is_reduce_scatter_and_all_gather(data, place, nbytes):
    """The two halves cost the whole and one launch more, at least: GPUs have faster ways. What is empty is not sent and costs nothing."""
    axes = data.draw(axes_of(place))
    model = communication(*place)
    halves = model.seconds("reduce_scatter", nbytes, axes) + model.seconds("all_gather", nbytes, axes)
    launch = model.links[0].launch_seconds if nbytes and any(model.links[axis].size > 1 for axis in axes) else 0.0
    whole = model.seconds("all_reduce", nbytes, axes)
    assert whole <= halves * (1 + 1e-9)
    assert model.links[0].interconnect.protocols or whole == pytest.approx(halves - launch)


@settings(deadline=None, max_examples=60)
@given(st.data(), places, st.sampled_from(("all_gather", "all_reduce", "reduce_scatter")), sizes)
def test_order_of_axes_and_arrays_do_not_matter(data, place, kind, nbytes):
    """Axes are a set, and an array of sizes is costed elementwise."""
    axes = data.draw(axes_of(place))
    model = communication(*place)
    one = model.seconds(kind, nbytes, axes)
    assert model.seconds(kind, nbytes, axes[::-1]) == one
    assert model.seconds(kind, np.array([nbytes, 2 * nbytes]), axes).tolist() == [one, model.seconds(kind, 2 * nbytes, axes)]


@pytest.mark.parametrize("kind", COLLECTIVES)
def test_one_device_is_free(kind):
    """Axes of size 1 have no link, and a collective over no axes costs nothing."""
    model = communication("a100:8", (1, 8))
    assert model.seconds(kind, 1e9, ()) == 0.0
    assert model.seconds(kind, 1e9, (0,)) == communication("a100:8", (8,)).seconds(kind, 1e9, (0,)) > 0


@pytest.mark.parametrize("kind", COLLECTIVES)
@pytest.mark.parametrize("place", ["v5e:4x4", "v5e:16x16", "h100:8x4", "a100:8", "cpu:8"])
def test_groups_of_an_axis_cost_what_axes_of_their_own_would(kind, place):
    """Blocks and strides of one axis are as the inner and the outer axis of a mesh of two; a group of all devices is the axis."""
    n = Cluster.parse(place).n_devices
    whole = communication(place, (n,))
    for inner in (2, 4):
        axes = communication(place, (n // inner, inner))
        assert whole.seconds(kind, 1e8, (0,), (inner, 1)) == pytest.approx(axes.seconds(kind, 1e8, (1,)))
        assert whole.seconds(kind, 1e8, (0,), (n // inner, inner)) == pytest.approx(axes.seconds(kind, 1e8, (0,)))
    assert whole.seconds(kind, 1e8, (0,), (n, 1)) == whole.seconds(kind, 1e8, (0,))


def test_unknown_collectives_are_refused():
    """A collective that nobody defined is a programming error."""
    with pytest.raises(ValueError, match="all_gather"):
        communication("cpu:8", (8,)).seconds("broadcast", 1.0, (0,))


@pytest.mark.parametrize(("gpus", "latency", "bus_bandwidth"), [(8, 74e-6, 226e9), (4, 45e-6, 211e9), (2, 40e-6, 189e9)])
@pytest.mark.parametrize("nbytes", [2**28, 2**30])
def test_a100_all_reduce_as_measured(gpus, latency, bus_bandwidth, nbytes):
    """Near nccl-tests on one A100 host, which no constant was fitted to: alpha-beta fits of the tables of vTrain (MICRO 2024)."""
    measured = latency + 2 * (gpus - 1) / gpus * nbytes / bus_bandwidth
    predicted = communication(f"a100:{gpus}", (gpus,)).seconds("all_reduce", nbytes, (0,))
    assert predicted == pytest.approx(measured, rel=0.15)


@pytest.mark.parametrize("published", PUBLISHED, ids=lambda published: published.source)
def test_bus_bandwidths_as_published(published):
    """Within a tenth of what others published of nccl-tests, inside hosts and between them."""
    assert published.predicted() == pytest.approx(published.bus_bandwidth, rel=0.1)


def test_small_messages_take_another_protocol():
    """Eight bytes take NCCL's LL and not the bandwidth protocol: 15 us on 8 GPUs by its own model."""
    model = communication("a100:8", (8,))
    assert model.seconds("all_reduce", 8.0, (0,)) == pytest.approx(15e-6, rel=0.01)
    assert model.seconds("all_reduce", 2.0**30, (0,)) > 2**30 * 14 / 8 / 240e9


def test_hosts_in_the_middle():
    """A collective over devices of several hosts costs no less than inside a host and no more than if every hop were the network."""
    joint = communication("h100:8x4", (4, 8))
    inside, outside = communication("h100:8", (8,)), communication("h100:1x32", (32,))
    for kind in COLLECTIVES:
        for nbytes in (1e3, 1e6, 1e9):
            assert inside.seconds(kind, nbytes, (0,)) <= joint.seconds(kind, nbytes, (0, 1)) <= outside.seconds(kind, nbytes, (0,))


@settings(deadline=None, max_examples=60)
@given(st.sampled_from((("v5e:4x4", (4, 4)), ("v5p:4x4x8", (8, 16)), ("v5e:16x16", (16, 16)), ("a100:8", (2, 4)))), st.floats(1, 1e11))
def test_joined_axes_cost_no_more_than_one_after_the_other(place, nbytes):
    """Gathering over two axes at once is no slower than over one and then the other; across hosts NCCL's one ring may be."""
    model = communication(*place)
    for first, second in ((0, 1), (1, 0)):
        after = model.seconds("all_gather", nbytes / place[1][second], (first,)) + model.seconds("all_gather", nbytes, (second,))
        assert model.seconds("all_gather", nbytes, (0, 1)) <= after * (1 + 1e-9)


def test_scaling_book_example():
    """A gather on a ring of TPU v5e: bytes over twice the link's one-way bandwidth (scaling book, sharded matrices)."""
    model = communication("v5e:16x16", (16, 16))
    nbytes = 34e6
    assert model.seconds("all_gather", nbytes, (0,)) == pytest.approx(nbytes / 9e10, rel=0.1)
    assert model.seconds("all_to_all", nbytes / 16, (0,)) == pytest.approx(nbytes / 4 / 9e10, rel=0.1)
