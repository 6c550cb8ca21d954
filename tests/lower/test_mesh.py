from __future__ import annotations

import jax
import pytest
from jax.sharding import AxisType, PartitionSpec

from autoshard.errors import ClusterError
from autoshard.ir import Mesh
from autoshard.lower import jax_mesh, to_named_sharding


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


def test_a_layout_becomes_a_named_sharding():
    """Axes on one dimension keep mesh order."""
    mesh = Mesh.of({"data": 2, "model": 4})
    assert to_named_sharding((1, 1), 3, mesh.names, jax_mesh(mesh)).spec == PartitionSpec(None, ("data", "model"), None)
