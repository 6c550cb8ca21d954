"""Collectives between slices in XLA:TPU's text, and the phases into which it divides planned ones."""

import numpy as np
import pytest

from autoshard.cluster import Cluster
from autoshard.errors import CompilerError
from autoshard.ir import Collective, Mesh, Placement
from autoshard.verify import collectives_of, in_phases

RUNTIME = 'is_host_transfer=true, frontend_attributes={_xla_host_transfer_handler_name="xla_megascale_runtime",'
TEXT = """HloModule jit_f, is_scheduled=true, num_partitions=8

ENTRY %main (p: f32[1024,1024]) -> f32[1024,1024] {{
  %p = f32[1024,1024]{{1,0}} parameter(0)
  %rs = f32[256,1024]{{1,0}} reduce-scatter(%p), channel_id=1, replica_groups={{{{0,2,4,6}},{{1,3,5,7}}}}, dimensions={{0}}, to_apply=%add
  %send = (f32[256,1024]{{1,0}}, u32[], token[]) send(%rs, %t), channel_id=2, {runtime}_xla_host_transfer_rendezvous="r_0",{what}}}
  %recv = (f32[128,1024]{{1,0}}, u32[], token[]) recv(%t), channel_id=3, {runtime}_xla_host_transfer_rendezvous="r_0",{what}}}
  ROOT %recv-done = (f32[128,1024]{{1,0}}, token[]) recv-done(%recv), channel_id=3, {runtime}_xla="x"}}
}}
"""
MESH = Mesh.of({"data": 4, "model": 4})
PLACED = Mesh(MESH.axes, Placement((2, 2, 4), (0, 2, 1), (1, 0)))  # 'model' is over both slices and half of each
SLICED = Mesh((("slice", 2), ("data", 8)), Placement((2, 2, 4), (0, 1, 2), (0, 1)))


def found(what, mesh):
    text = TEXT.format(runtime=RUNTIME, what=what)
    return [(each.kind, each.mesh_axes, each.bytes) for each in collectives_of(text, mesh)]


@pytest.mark.parametrize(
    ("what", "mesh", "kind", "axes"),
    [
        ('_xla_megascale_target="{1,2}x{0:7}",_xla_megascale_transfer_type="REDUCE_SCATTER"', PLACED, "reduce_scatter", ("model",)),
        ('_xla_megascale_target="{1,2}x{0:7}",_xla_megascale_transfer_type="ALL_GATHER"', SLICED, "all_gather", ("slice",)),
        ('_xla_megascale_target={{100000,200000}},_xla_megascale_transfer_type="ALL_TO_ALL"', SLICED, "all_to_all", ("slice",)),
        ('_xla_megascale_target={{100000->200004}},_xla_megascale_transfer_type="ONE_TO_ONE"', PLACED, "collective_permute", ("model",)),
        (
            '_xla_megascale_target={{100000->200003},{200003->100000}},_xla_megascale_transfer_type="ONE_TO_ONE"',
            SLICED,
            "collective_permute",
            ("slice", "data"),
        ),
    ],
)  # fmt: skip
def test_transfers_between_slices_are_collectives(what, mesh, kind, axes):
    """A send and its recv count once, with the larger array, over the axes along which their devices differ; groups are one slice's."""
    inside, across = found(what, mesh)
    assert across == (kind, axes, 256 * 1024 * 4)
    assert inside[:2] == ("reduce_scatter", ("data",))


def test_unknown_transfers_are_refused():
    """A kind that a later compiler may have is not left out."""
    with pytest.raises(CompilerError, match="is one of ALL_GATHER, ALL_REDUCE, REDUCE_SCATTER, ALL_TO_ALL and ONE_TO_ONE, and"):
        found('_xla_megascale_target="{1,2}x{0:7}",_xla_megascale_transfer_type="RAGGED"', SLICED)


def test_collectives_are_compiled_within_and_across_slices():
    """Sums are scattered within, combined across and gathered within; what an axis has in one slice alone is one collective."""
    cluster = Cluster.parse("2*v5e:2x4")

    def phases(kind, *axes, nbytes=2.0**20, mesh=SLICED):
        return [(each.kind, each.mesh_axes, each.bytes) for each in in_phases([Collective(kind, axes, nbytes, 1)], mesh, cluster)]

    whole, part = 2.0**20, 2.0**17
    reduced = {("all_reduce", ("slice",), part), ("reduce_scatter", ("data",), whole), ("all_gather", ("data",), whole)}
    assert set(phases("all_reduce", "slice", "data")) == reduced
    assert set(phases("all_reduce", "slice", "data", nbytes=4.0)) == {("all_reduce", ("slice",), 4.0), ("all_reduce", ("data",), 4.0)}
    assert set(phases("all_gather", "slice", "data")) == {("all_gather", ("slice",), part), ("all_gather", ("data",), whole)}
    assert set(phases("reduce_scatter", "slice", "data")) == {("reduce_scatter", ("slice",), part), ("all_reduce", ("data",), whole)}
    assert phases("all_reduce", "slice") == [("all_reduce", ("slice",), whole)]
    assert phases("all_reduce", "data") == [("all_reduce", ("data",), whole)]
    assert set(phases("all_gather", "model", mesh=PLACED)) == {("all_gather", ("model",), whole / 2), ("all_gather", ("model",), whole)}


def test_devices_are_those_of_their_slice():
    """Rows of a mesh that is placed on several slices have the devices that JAX's mesh has there."""
    from autoshard.lower import jax_mesh
    from autoshard.verify.slices import _places

    class Device:
        def __init__(self, slice_index, *coords):
            self.slice_index, self.coords = slice_index, coords

    devices = [Device(s, x, y) for s in range(2) for y in range(4) for x in range(2)]
    of_mesh = jax_mesh(PLACED, devices[::-1]).devices.reshape(-1)
    expected = [[(s, x, y) for x in range(2) for y in range(4)] for s in range(2)]
    assert [[(of_mesh[k].slice_index, *of_mesh[k].coords) for k in row] for row in _places(PLACED)] == expected
    assert np.array_equal(np.sort(_places(SLICED)[0]), np.arange(8))
