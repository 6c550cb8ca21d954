from __future__ import annotations

import itertools

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, PartitionSpec

from autoshard.cluster import Cluster
from autoshard.errors import ClusterError
from autoshard.ir import Mesh, Placement, Value, layouts
from autoshard.judge.model import CostModel
from autoshard.lower import jax_mesh, to_named_sharding, to_partition_spec
from autoshard.lower.collectives import moved


def test_a_mesh_has_auto_axes_in_order():
    """Names and sizes are the mesh's, and the partitioner may act on every axis."""
    mesh = jax_mesh(Mesh.of({"data": 2, "model": 4}))
    assert dict(mesh.shape) == {"data": 2, "model": 4} and mesh.axis_names == ("data", "model")
    assert mesh.axis_types == (AxisType.Auto, AxisType.Auto)


def test_given_devices_are_used():
    """Explicit devices stand in the mesh in their order, and no others do."""
    devices = jax.devices()[::-1]
    assert list(jax_mesh(Mesh.of({"data": 4}), devices).devices.flat) == devices[:4]


def test_too_few_devices_are_refused():
    """The message says how many are needed and how to get them."""
    with pytest.raises(ClusterError, match=r"data=16 has 16, got 8.*device_count=16"):
        jax_mesh(Mesh.of({"data": 16}))


def test_devices_are_a_list():
    """A number of devices is refused with what to write."""
    with pytest.raises(ClusterError, match=r"list of devices, got 4.*jax.devices\(\)\[:8\]"):
        jax_mesh(Mesh.of({"data": 8}), 4)


class Tpu:
    def __init__(self, slice_index, *coords):
        self.slice_index, self.coords = slice_index, coords


def test_the_first_axis_is_across_slices_as_jax_has_hybrid_meshes():
    """Devices of several slices are those of one after the other, row-major in each, whatever their order."""
    devices = [Tpu(s, x, y, 0) for s in range(2) for y in range(4) for x in range(2)]
    for mesh in (Mesh.of({"slice": 2, "data": 8}), Mesh((("slice", 2), ("data", 8)), Placement((2, 2, 4), (0, 1, 2), (0, 1)))):
        found = jax_mesh(mesh, devices[::-1]).devices
        assert [device.slice_index for device in found.flat] == [0] * 8 + [1] * 8
        assert [device.coords[:2] for device in found[1]] == [(x, y) for x in range(2) for y in range(4)]


def test_slices_of_a_mesh_are_equal():
    """A mesh that would have more devices of one slice than of another is refused with what to do."""
    devices = [Tpu(0, x, 0) for x in range(8)] + [Tpu(1, x, 0) for x in range(4)]
    with pytest.raises(ClusterError, match=r"data=12 gets 8 of slice 0, 4 of slice 1\. Pass devices=.*2\*v5e"):
        jax_mesh(Mesh.of({"data": 12}), devices)


def test_a_layout_becomes_a_named_sharding():
    """Axes on one dimension keep mesh order."""
    mesh = Mesh.of({"data": 2, "model": 4})
    assert to_named_sharding((1, 1), 3, mesh.names, jax_mesh(mesh)).spec == PartitionSpec(None, ("data", "model"), None)


def test_layouts_may_number_axes_otherwise_than_the_mesh_of_devices():
    """Every reshard of a matrix gives each device its part, also by permutes over several axes, whose devices JAX numbers itself."""
    mesh = Mesh.of({"x": 2, "y": 2, "z": 2}).ordered(("y", "z", "x"))
    devices, model = jax_mesh(mesh), CostModel(Cluster.parse("cpu:8"), mesh)
    whole, value = np.arange(64.0, dtype=np.float32).reshape(8, 8), Value((8, 8), "float32", 4)
    pairs = [(source, target) for source, target in itertools.permutations(layouts(2, 3), 2)]
    pairs = [pair for pair in pairs if any(step.kind == "collective_permute" for step in model.reshard_path(value, *pair))][::3]

    def resharded(x, source, target):
        def one_device(x):
            for step in model.reshard_path(value, source, target):
                x = moved(x, step, mesh)
            return x

        before, after = (to_partition_spec(layout, 2, mesh.names) for layout in (source, target))
        return jax.shard_map(one_device, mesh=devices, in_specs=before, out_specs=after, check_vma=False)(x)

    assert len(pairs) > 15
    for found in jax.jit(lambda x: [resharded(x, *pair) for pair in pairs])(whole):
        np.testing.assert_array_equal(found, whole)
