"""Placements of meshes: the links of each axis, and the placements that are worth a search."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import permutations

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import PartitionSpec

import autoshard
from autoshard.cluster import Cluster
from autoshard.cost.collectives import Communication
from autoshard.errors import ClusterError, ShardingError
from autoshard.ir import Mesh, Placement
from autoshard.lower import jax_mesh
from autoshard.lower.mesh import _coordinates, _placed
from autoshard.mesh_search.candidates import candidate_meshes, placed

CLUSTERS = ("v5e:2x4", "v5e:4x8", "v5p:2x2x4", "v5p:4x4x8", "h100:8x4", "h100:6x4", "cpu:8")


def placement(text, sizes, dims, axes):
    cluster = Cluster.parse(text)
    mesh = Mesh(tuple((f"a{k}", size) for k, size in enumerate(sizes)), Placement(cluster.dimensions, dims, axes))
    return cluster, mesh


@st.composite
def placements(draw):
    """A cluster, a mesh of it, and any placement."""
    cluster = Cluster.parse(draw(st.sampled_from(CLUSTERS)))
    mesh = draw(st.sampled_from(candidate_meshes(cluster.n_devices, (), 3)))
    dims = draw(st.sampled_from(list(permutations(range(len(cluster.dimensions))))))
    axes = draw(st.sampled_from(list(permutations(range(len(mesh.axes))))))
    return cluster, replace(mesh, placement=Placement(cluster.dimensions, dims, axes))


@dataclass(frozen=True, slots=True)
class FakeDevice:
    """A device of a slice, known by its coordinates."""

    id: int
    coords: tuple[int, ...]


def test_an_axis_may_have_a_dimension_whole():
    """On 2 x 4 the axis of 4 takes the dimension of 4 and the axis of 2 the other; GPUs have either axis inside the host."""
    cluster, mesh = placement("v5e:2x4", (4, 2), (1, 0), (0, 1))
    data, model = cluster.links(mesh)
    assert [(span.dim, span.extent, span.stride) for span in data.spans] == [(1, 4, 1)]
    assert [(span.dim, span.extent, span.stride) for span in model.spans] == [(0, 2, 1)]
    cluster, mesh = placement("h100:8x4", (8, 4), (1, 0), (0, 1))
    assert [link.kind for link in cluster.links(mesh)] == ["switch", "network"]


@settings(deadline=None, max_examples=80)
@given(placements())
def test_devices_are_where_links_say(case):
    """Along an axis exactly the coordinates of its spans change, and all axes together reach every device once."""
    cluster, mesh = case
    links = cluster.links(mesh)
    whole = np.arange(cluster.n_devices)
    grid = _grid(mesh, whole)
    assert sorted(grid.flat) == whole.tolist() and grid.shape == mesh.sizes
    if any(span.straddles for link in links for span in link.spans):
        return
    for axis, link in enumerate(links):
        line = np.moveaxis(grid, axis, 0).reshape(mesh.sizes[axis], -1)[:, 0]
        coords = np.array(np.unravel_index(line, cluster.dimensions)).T
        expected = dict.fromkeys(range(len(cluster.dimensions)), 1)
        for span in link.spans:
            expected[span.dim] *= span.extent
            assert {*range(0, span.extent * span.stride, span.stride)} <= {*coords[:, span.dim].tolist()}
        assert {dim: len(set(coords[:, dim])) for dim in expected} == expected


def _grid(mesh, numbers):
    devices = jax_mesh_of([FakeDevice(int(n), (int(n),)) for n in numbers], mesh)
    return np.vectorize(lambda device: device.id)(devices)


def jax_mesh_of(devices, mesh):
    """The array of devices that `jax_mesh` would make a JAX mesh of, which takes real devices only."""
    return _placed(mesh, mesh.placement, sorted(devices, key=_coordinates))


def test_a_slice_is_laid_by_coordinates():
    """However a slice numbers its devices, rows of the mesh are rows of the slice: v5e:4x4 counts host by host."""
    devices = [FakeDevice(n, (x + 2 * (n // 4 % 2), y + 2 * (n // 8))) for n, (x, y) in enumerate([(0, 0), (1, 0), (0, 1), (1, 1)] * 4)]
    _, mesh = placement("v5e:4x4", (4, 4), (0, 1), (0, 1))
    grid = jax_mesh_of(devices, mesh)
    assert [[device.coords for device in row] for row in grid] == [[(x, y) for y in range(4)] for x in range(4)]


def test_devices_without_coordinates_keep_their_order():
    """JAX lists GPUs host by host: a placement that turns hosts and GPUs round deals them out so."""
    mesh = Mesh((("data", 4), ("model", 2)), Placement((2, 4), (1, 0), (0, 1)))
    found = jax_mesh(mesh).devices
    assert [[device.id for device in row] for row in found] == [[n, n + 4] for n in (device.id for device in jax.devices()[:4])]


@pytest.mark.parametrize("text", CLUSTERS)
def test_a_given_mesh_has_few_placements_and_none_is_useless(text):
    """Row-major comes first, said outright on a torus, which JAX would fill otherwise; each further one is somewhere the fastest."""
    cluster = Cluster.parse(text)
    for mesh in candidate_meshes(cluster.n_devices):
        found = placed(cluster, [mesh], renamed=False, most=3)
        dims = tuple(range(len(cluster.dimensions)))
        torus = cluster.interconnect.kind == "torus"
        first = Placement(cluster.dimensions, dims, tuple(range(len(mesh.axes)))) if torus else None
        assert found[0] == replace(mesh, placement=first) and 1 <= len(found) <= 3
        seconds = [_everything(cluster, other) for other in found]
        for k, ours in enumerate(seconds[1:], 1):
            assert all(np.any(ours < theirs) for other, theirs in enumerate(seconds) if other != k)


def _everything(cluster, mesh):
    model = Communication(cluster.links(mesh))
    n = len(mesh.axes)
    subsets = [tuple(axis for axis in range(n) if bits >> axis & 1) for bits in range(1, 2**n)]
    kinds = ("all_gather", "all_reduce", "all_to_all", "collective_permute")
    return np.array([model.seconds(kind, nbytes, axes) for kind in kinds for nbytes in (1e5, 1e7, 1e9) for axes in subsets])


def test_unnamed_axes_in_another_order_come_last():
    """Placed with whole dimensions, 4 x 2 is 2 x 4 with its axes in another order: tried where few meshes are, and not on large slices."""
    for text, reordered in (("cpu:8", False), ("v5e:2x4", True), ("v5p:4x4x4", True), ("v5e:16x16", True), ("v4:4x4x8", True)):
        cluster = Cluster.parse(text)
        meshes = candidate_meshes(cluster.n_devices)
        found = placed(cluster, meshes, renamed=True)
        assert [mesh.sizes for mesh in found[: len(meshes)]] == [mesh.sizes for mesh in meshes]
        links = [tuple(sorted(map(repr, cluster.links(mesh)))) for mesh in found]
        twice = [links[k] in links[:k] for k in range(len(links))]
        assert any(twice) == reordered and twice == sorted(twice)
        assert len(found) <= max(10, twice.index(True) if reordered else 10)


def test_a_placement_of_another_topology_is_refused():
    """A mesh placed on one slice has no links on another one, and orders are permutations."""
    _, mesh = placement("v5e:2x4", (4, 2), (1, 0), (0, 1))
    with pytest.raises(ClusterError, match=r"\(2, 4\).*Search again"):
        Cluster.parse("cpu:8").links(mesh)
    with pytest.raises(ShardingError, match="permutations"):
        Placement((2, 4), (0, 0), (0, 1))
    with pytest.raises(ShardingError, match="as many devices"):
        Mesh((("data", 4),), Placement((2, 4), (0, 1), (0,)))


def test_the_busier_axis_gets_the_faster_links():
    """Of a mesh that names it first, the axis whose activations are summed goes inside the hosts; its weights' gradients cross them."""

    def step(w1, w2, x):
        gradients = jax.grad(lambda w: ((jax.nn.relu(x @ w[0]) @ w[1]) ** 2).sum())((w1, w2))
        return w1 - gradients[0], w2 - gradients[1]

    arguments = [jax.ShapeDtypeStruct(shape, "float32") for shape in ((1024, 8192), (8192, 1024), (65536, 1024))]
    specs = PartitionSpec(None, "model"), PartitionSpec("model", None), PartitionSpec("data", None)
    mesh = {"model": 8, "data": 4}
    strategy = autoshard.evaluate(step, *arguments, cluster="h100:8x4", mesh=mesh, in_specs=specs)
    assert [link.kind for link in Cluster.parse("h100:8x4").links(strategy.record.mesh)] == ["switch", "network"]
    assert strategy.mesh_shape == mesh
