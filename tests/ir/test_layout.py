"""Layouts, meshes and their notation: laws over random meshes and shapes, with `PartitionSpec` and `NamedSharding` as referees."""

from __future__ import annotations

import doctest
import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec

from autoshard.errors import ShardingError
from autoshard.ir import (
    Mesh,
    Placement,
    check_divides,
    divides,
    layout,
    layout_dims,
    layout_number,
    layout_numbers,
    layout_of,
    layout_to_spec,
    layouts,
    local_shape,
    replicated,
    shard_counts,
    shards,
    shift_layout,
    spec_to_layout,
)

meshes = st.lists(st.integers(1, 4), min_size=1, max_size=3).map(lambda sizes: Mesh(tuple(zip("abc", sizes, strict=False))))
shapes = st.lists(st.sampled_from((1, 2, 3, 4, 8, 12, 24)), max_size=3).map(tuple)


@st.composite
def placed(draw):
    """A mesh, a shape and a layout of it, which may or may not divide it."""
    mesh, shape = draw(meshes), draw(shapes)
    return mesh, shape, draw(st.sampled_from(layouts(len(shape), len(mesh.axes))))


@pytest.mark.parametrize(("rank", "n_axes"), [*itertools.product(range(4), range(4))])
def test_every_layout_is_listed_once_in_the_order_of_numbers(rank, n_axes):
    """All ways to give each axis a dimension or none, no other and none twice; numbers, one by one and as arrays, are positions."""
    found = layouts(rank, n_axes)
    assert len(found) == len(set(found)) == (rank + 1) ** n_axes
    assert set(found) == set(itertools.product(range(-1, rank), repeat=n_axes))
    assert [layout_number(each, rank) for each in found] == list(range(len(found)))
    assert [layout_of(number, rank, n_axes) for number in range(len(found))] == list(found)
    dims = np.array(found, dtype=int).reshape(len(found), n_axes)
    assert layout_numbers(dims, rank).tolist() == list(range(len(found)))
    assert np.array_equal(layout_dims(np.arange(len(found)), rank, n_axes), dims)


@given(placed())
def test_parts_make_up_the_whole(case):
    """A part's size times the number of shards is the whole's, dimension by dimension; a layout that divides leaves whole numbers."""
    mesh, shape, where = case
    counts, local = shard_counts(where, len(shape), mesh.sizes), local_shape(shape, where, mesh.sizes)
    assert [n * count for n, count in zip(local, counts, strict=True)] == pytest.approx(list(shape))
    assert math.prod(counts) == shards(where, mesh.sizes) and mesh.size % shards(where, mesh.sizes) == 0
    assert divides(where, shape, mesh.sizes) == all(n == int(n) for n in local)
    assert shards(replicated(mesh), mesh.sizes) == 1 and local_shape(shape, replicated(mesh), mesh.sizes) == shape


@given(placed())
def test_parts_are_those_of_jax(case):
    """A device's part has the shape that a `NamedSharding` of the same spec gives it; a layout that does not divide is refused by both."""
    mesh, shape, where = case
    sharding = NamedSharding(AbstractMesh(mesh.sizes, mesh.names), PartitionSpec(*layout_to_spec(where, mesh.names, len(shape))))
    if divides(where, shape, mesh.sizes):
        check_divides(where, shape, mesh, "x")
        assert sharding.shard_shape(shape) == local_shape(shape, where, mesh.sizes)
    else:
        with pytest.raises(ValueError):
            sharding.shard_shape(shape)
        counts = shard_counts(where, len(shape), mesh.sizes)
        dim, n, count = next((dim, n, counts[dim]) for dim, n in enumerate(shape) if n % counts[dim])
        with pytest.raises(ShardingError, match=f"dim {dim} of x has size {n} and cannot be sharded over .* of size {count}"):
            check_divides(where, shape, mesh, "x")


@given(placed())
def test_specs_and_layouts_are_two_ways_to_say_the_same(case):
    """To a spec and back is the same layout; as `PartitionSpec`, without its last Nones, or with names as tuples, it still is."""
    mesh, shape, where = case
    spec = layout_to_spec(where, mesh.names, len(shape))
    assert len(spec) == len(shape)
    short = spec[: max((dim + 1 for dim, entry in enumerate(spec) if entry is not None), default=0)]
    tuples = tuple((entry,) if isinstance(entry, str) else entry for entry in spec)
    for same in (spec, short, tuples, PartitionSpec(*spec)):
        assert spec_to_layout(same, mesh, len(shape)) == where


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        (("a", "b", None), "at most one entry a dimension: w has rank 2, got .* with 3 entries. Use 2 at most"),
        (("z",), r"w: dim 0 names mesh axis 'z', and the mesh has a=2 x b=4"),
        (("a", "a"), "w: mesh axis 'a' shards both dim 0 and dim 1; .* Write None"),
        ((("a", "a"),), "w: dim 0 names mesh axis 'a' twice"),
        ((("b", "a"),), "w: axes .* on dim 0 are not in mesh order"),
    ],
)
def test_specs_that_no_layout_has_are_refused(spec, says):
    """Too long, of unknown or repeated axes, against mesh order: each is told by tensor, dimension and axis."""
    with pytest.raises(ShardingError, match=says):
        spec_to_layout(spec, Mesh.of({"a": 2, "b": 4}), 2, "w")


@given(placed(), st.integers(0, 3))
def test_shifting_a_layout_is_undone_by_shifting_it_back(case, by):
    """Dimensions put in front and taken away again change nothing; none that is sharded can be taken away."""
    _, _, where = case
    assert shift_layout(shift_layout(where, by), -by) == where
    moved = shift_layout(where, -by)
    assert (moved is None) == any(0 <= dim < by for dim in where)
    assert moved is None or shift_layout(moved, by) == where


@given(st.dictionaries(st.text("abx_1", min_size=1, max_size=3), st.integers(1, 5), max_size=4))
def test_a_mesh_is_its_axes(axes):
    """Names, sizes and number of devices are the mapping's; axes of size 1 split nothing; each axis stands in the words."""
    mesh = Mesh.of(axes)
    assert dict(mesh.shape) == axes and mesh.all_names == tuple(axes)
    assert mesh.axes == tuple((name, size) for name, size in axes.items() if size > 1)
    assert mesh.names == tuple(name for name, _ in mesh.axes) and mesh.sizes == tuple(size for _, size in mesh.axes)
    assert mesh.size == math.prod(axes.values())
    assert mesh == Mesh.of(axes) and hash(mesh) == hash(Mesh.of(axes))
    assert all(f"{name}={size}" in str(mesh) for name, size in axes.items())


@pytest.mark.parametrize("axes", [(("a", 2), ("a", 2)), (("", 2),), ((3, 2),), (("a", 0),), (("a", 2.0),), (("a", True),)])
def test_bad_axes_are_refused(axes):
    """Names are distinct, non-empty strings; sizes positive integers."""
    with pytest.raises(ShardingError, match="mesh axis"):
        Mesh(axes)


@pytest.mark.parametrize(
    ("topology", "dims", "axes"), [((2, 4), (0,), (0, 1)), ((2, 4), (0, 0), (0, 1)), ((2, 4), (0, 1), (1, 2)), ((8, 2), (0, 1), (0, 1))]
)
def test_bad_placements_are_refused(topology, dims, axes):
    """A placement orders all physical dimensions and all axes, each once, and has as many devices as its mesh."""
    with pytest.raises(ShardingError, match="placement"):
        Mesh((("a", 2), ("b", 4)), Placement(topology, dims, axes))


def test_examples_in_the_docstrings_hold():
    """The examples hold."""
    assert not doctest.testmod(layout).failed
