"""Reshard paths: their laws, what each step does to the data, and the collectives that Shardy writes for the same layouts."""

import itertools
import re

import jax
import jax.numpy as jnp
import networkx as nx
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from jaxlib.mlir.passmanager import PassManager

from autoshard.cluster import Cluster
from autoshard.cost.collectives import Communication
from autoshard.cost.reshard import Reshards, _exchanging, path_seconds, reduction_steps
from autoshard.ir import Mesh, divides, layout_number, layout_to_spec, layouts, shard_counts, shards, spec_to_layout
from autoshard.verify import explicit_collectives

MESHES = (("v5e:2x4", (2, 4)), ("v5e:4x4", (4, 4)), ("h100:8x4", (4, 2, 4)), ("cpu:8", (2, 2, 2)), ("cpu:8", (8,)))


def parts(text, sizes):
    mesh = Mesh(tuple((name, size) for name, size in zip("abc", sizes, strict=False)))
    return mesh, Communication(Cluster.parse(text).links(mesh))


@st.composite
def cases(draw):
    """A mesh, a shape, and two layouts that divide it."""
    text, sizes = draw(st.sampled_from(MESHES))
    shape = tuple(draw(st.lists(st.sampled_from((1, 2, 8, 24, 64, 4096)), min_size=0, max_size=3)))
    valid = [layout for layout in layouts(len(shape), len(sizes)) if divides(layout, shape, sizes)]
    return text, sizes, shape, draw(st.sampled_from(valid)), draw(st.sampled_from(valid))


@settings(deadline=None, max_examples=80)
@given(cases(), st.sampled_from((0.0, 1e-9)))
def test_a_path_is_what_the_matrix_says(case, copying):
    """Steps lead from source to target through dividing layouts, and their seconds, copying included, add up to the matrix entry."""
    text, sizes, shape, source, target = case
    reshards = Reshards(*parts(text, sizes), copying)
    steps = reshards.path(shape, 2.0, source, target)
    at = source
    for step in steps:
        assert step.source == at != step.target and divides(step.target, shape, sizes)
        assert step.axes == tuple(sorted(step.axes))
        assert (step.kind == "slice") <= (step.seconds == 0.0)
        at = step.target
    assert at == target
    entry = reshards.matrix(shape, 2.0)[layout_number(source, len(shape)), layout_number(target, len(shape))]
    assert path_seconds(steps) == pytest.approx(entry, rel=1e-9, abs=1e-15)


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        ((64,), [((4, 1), 64.0), ((16, 4), 1024.0)]),
        ((16, 4), [(None, 64.0), (None, 1024.0)]),
    ],
)
def test_gathers_over_a_whole_torus_take_two_steps(sizes, expected):
    """Where the compiler has no such all_gather, one ring is gathered and then two, and the matrix charges both; elsewhere it is one."""
    shape, source, target = (512,), (0,) * len(sizes), (-1,) * len(sizes)
    reshards = Reshards(*parts("v5p:4x4x4", sizes), gathers_tori=False)
    steps = reshards.path(shape, 2.0, source, target)
    assert [(step.kind, step.groups, step.nbytes) for step in steps] == [("all_gather", *each) for each in expected]
    assert steps[0].source == source and steps[-1].target == target
    assert sum(step.seconds for step in steps) == reshards.matrix(shape, 2.0)[1:][-1, 0]
    whole = Reshards(*parts("v5p:4x4x4", sizes)).path(shape, 2.0, source, target)
    assert [(step.kind, step.groups, step.nbytes) for step in whole] == [("all_gather", None, 1024.0)]
    assert sum(step.seconds for step in steps) > whole[0].seconds


@pytest.mark.parametrize(
    ("text", "sizes", "source"), [("v5p:4x4x4", (32, 2), (0, -1)), ("v5p:2x4x4", (32,), (0,)), ("v5e:4x4", (16,), (0,))]
)
def test_gathers_over_less_than_a_torus_stay_one(text, sizes, source):
    """Over some chips of a torus, over slices without rings, and over two dimensions there is one all_gather for every compiler."""
    (step,) = Reshards(*parts(text, sizes), gathers_tori=False).path((512,), 2.0, source, (-1,) * len(sizes))
    assert step.groups is None


def used(layout):
    return {axis for axis, dim in enumerate(layout) if dim >= 0}


@settings(deadline=None, max_examples=80)
@given(cases(), st.integers(0, 10**6))
def test_a_detour_is_never_cheaper(case, pick):
    """Among layouts of the same axes the matrix is a distance: zero on the diagonal, and no way round is shorter."""
    text, sizes, shape, source, target = case
    matrix = Reshards(*parts(text, sizes)).matrix(shape, 4.0)
    axes = used(source) | used(target)
    same = [via for via in layouts(len(shape), len(sizes)) if divides(via, shape, sizes) and used(via) == axes]
    if used(source) != axes or not same:
        return
    via = layout_number(same[pick % len(same)], len(shape))
    a, b = layout_number(source, len(shape)), layout_number(target, len(shape))
    assert matrix[a, a] == 0.0
    assert matrix[a, b] <= (matrix[a, via] + matrix[via, b]) * (1 + 1e-9) + 1e-11


@pytest.mark.parametrize(("text", "sizes"), MESHES)
def test_no_cheaper_sequence_of_single_moves(text, sizes):
    """Dijkstra over the single moves, through layouts of the source's and the target's axes, gives the same seconds."""
    shape, rank = (64, 32), 2
    reshards = Reshards(*parts(text, sizes))
    graph = nx.DiGraph()
    for source, target in itertools.permutations(layouts(rank, len(sizes)), 2):
        steps = reshards.path(shape, 4.0, source, target)
        if len(steps) == 1:
            graph.add_edge(source, target, seconds=steps[0].seconds)
    matrix = reshards.matrix(shape, 4.0)
    for source, target in itertools.permutations(layouts(rank, len(sizes)), 2):
        around = graph.subgraph(layout for layout in graph if used(layout) <= used(source) | used(target))
        seconds = nx.dijkstra_path_length(around, source, target, weight="seconds")
        assert matrix[layout_number(source, rank), layout_number(target, rank)] == pytest.approx(seconds, rel=1e-9, abs=1e-11)


def held(layout, shape, sizes):
    """Per device the elements it holds."""
    whole = np.arange(np.prod(shape)).reshape(shape)
    counts = shard_counts(layout, len(shape), sizes)
    for device in itertools.product(*map(range, sizes)):
        block = [0] * len(shape)
        for axis, dim in enumerate(layout):
            if dim >= 0:
                block[dim] = block[dim] * sizes[axis] + device[axis]
        size = [n // count for n, count in zip(shape, counts, strict=True)]
        yield device, set(whole[tuple(slice(b * s, (b + 1) * s) for b, s in zip(block, size, strict=True))].ravel().tolist())


@settings(deadline=None, max_examples=80)
@given(cases())
@example(("h100:8x4", (4, 2, 4), (8,), (-1, -1, 0), (-1, 0, 0)))  # axis b comes before c, so c's devices exchange too
def test_each_step_moves_data_between_its_axes_only(case):
    """What a device gets, one in its group has; slices need nobody, a permute's piece comes from a single device."""
    text, sizes, shape, source, target = case
    shape = tuple(min(size, 24) for size in shape)
    if not all(divides(layout, shape, sizes) for layout in (source, target)):
        return
    for step in Reshards(*parts(text, sizes)).path(shape, 4.0, source, target):
        before = dict(held(step.source, shape, sizes))
        for device, wanted in held(step.target, shape, sizes):
            group = [other for other in before if all(other[a] == device[a] for a in range(len(sizes)) if a not in step.axes)]
            if step.kind == "slice":
                assert wanted <= before[device]
            elif step.kind == "collective_permute":
                assert any(wanted <= before[other] for other in group)
            else:
                assert wanted <= set().union(*(before[other] for other in group))
        nbytes = 4.0 * np.prod(shape) / np.array([shards(step.source, sizes), shards(step.target, sizes)])
        assert step.nbytes == (min(nbytes) if step.kind == "collective_permute" else max(nbytes))


def test_layouts_that_do_not_divide_are_left_out():
    """Their rows and columns are infinite, all others finite, and a path to them is refused."""
    mesh, communication = parts("v5e:2x4", (2, 4))
    reshards = Reshards(mesh, communication)
    matrix = reshards.matrix((6, 4), 4.0)
    valid = np.array([divides(layout, (6, 4), mesh.sizes) for layout in layouts(2, 2)])
    assert np.isfinite(matrix[np.ix_(valid, valid)]).all()
    assert np.isinf(matrix[~valid]).all() and np.isinf(matrix[:, ~valid]).all()
    with pytest.raises(ValueError, match="divide"):
        reshards.path((6, 4), 4.0, (-1, -1), (-1, 0))


def test_a_matrix_is_shared_and_read_only():
    """Shapes with equal bytes and divisibility share one table, which nobody can change."""
    reshards = Reshards(*parts("v5e:2x4", (2, 4)))
    matrix = reshards.matrix((64, 128), 4.0)
    assert reshards.matrix((128, 64), 4.0) is matrix
    with pytest.raises(ValueError, match="read-only"):
        matrix[0, 0] = 1.0


def test_partial_results_are_scattered_and_then_reduced():
    """One reduce_scatter for each dimension that axes scatter onto, then one all_reduce over the others, of what is left."""
    mesh, communication = parts("cpu:8", (2, 2, 2))

    def steps(computed, *left):
        found = reduction_steps(mesh, communication, (16, 8), 4.0, computed, left)
        assert all(step.seconds == communication.seconds(step.kind, step.nbytes, step.axes) for step in found)
        return [(step.kind, step.axes, step.target, step.nbytes) for step in found]

    assert steps((0, -1, -1), (1, "sum", -1), (2, "sum", -1)) == [("all_reduce", (1, 2), (0, -1, -1), 256.0)]
    assert steps((-1, -1, -1), (0, "sum", -1), (2, "sum", 1)) == [
        ("reduce_scatter", (2,), (-1, -1, 1), 512.0),
        ("all_reduce", (0,), (-1, -1, 1), 256.0),
    ]
    assert steps((0, -1, -1), (1, "sum", 0), (2, "sum", 0)) == [("reduce_scatter", (1, 2), (0, 0, 0), 256.0)]
    assert steps((0, -1, -1), (1, "sum", 0), (2, "sum", 1)) == [
        ("reduce_scatter", (1,), (0, 0, -1), 256.0),
        ("reduce_scatter", (2,), (0, 0, 1), 128.0),
    ]
    assert [step[:2] for step in steps((-1, -1, -1), (0, "sum", -1), (1, "max", -1))] == [("all_reduce", (1,)), ("all_reduce", (0,))]
    assert steps((0, -1, -1), (1, "prod", -1), (2, "prod", -1)) == [("all_gather", (1, 2), (0, -1, -1), 1024.0)]
    assert steps((0, 1, -1)) == []


SHARDY = "builtin.module(func.func(sdy-insert-explicit-reshards{enable-full-version=true},sdy-reshard-to-collectives))"
NAMES = ("a", "b")


@pytest.fixture(scope="module")
def shardy():
    """What Shardy writes for a reshard on a 2 x 4 mesh: kinds and axes, slices left out; None where it splits an axis."""
    mesh = jax.make_mesh((2, 4), NAMES, axis_types=(AxisType.Auto,) * 2)

    def collectives(shape, source, target):
        def sharding(layout):
            return NamedSharding(mesh, PartitionSpec(*layout_to_spec(layout, NAMES, len(shape))))

        def constrained(x):
            return jax.lax.with_sharding_constraint(x, sharding(target))

        lowered = jax.jit(constrained, in_shardings=sharding(source), out_shardings=sharding(target))
        module = lowered.lower(jax.ShapeDtypeStruct(shape, jnp.float32)).compiler_ir("stablehlo")
        with module.context:
            PassManager.parse(SHARDY).run(module.operation)
        lines = re.findall(r"sdy\.(all_gather|all_to_all|all_slice|collective_permute)(.*?)%", str(module))
        if any(":(" in axes for _, axes in lines):
            return None
        return [(kind, tuple(map(NAMES.index, sorted(re.findall(r'"(\w+)"', axes))))) for kind, axes in lines if kind != "all_slice"]

    return collectives


def test_permutes_send_along_shardys_axes():
    """Of three axes on one dimension those send whose place changes; what is only added behind is sliced."""
    names, sizes = ("a", "b", "c"), (2, 2, 2)
    mesh = jax.make_mesh(sizes, names, axis_types=(AxisType.Auto,) * 3)
    permuted = 0
    for source, target in itertools.permutations(layouts(1, 3), 2):
        ends = [NamedSharding(mesh, PartitionSpec(*layout_to_spec(layout, names, 1))) for layout in (source, target)]
        lowered = jax.jit(lambda x: x, in_shardings=ends[0], out_shardings=ends[1]).lower(jax.ShapeDtypeStruct((64,), jnp.float32))
        sent = explicit_collectives(lowered, Mesh(tuple(zip(names, sizes, strict=True))))
        if [collective.kind for collective in sent] == ["collective_permute"]:
            sending = np.flatnonzero(_exchanging(np.array(source), np.array(target), sizes))
            assert tuple(names[axis] for axis in sending) == sent[0].mesh_axes, (source, target)
            permuted += 1
    assert permuted >= 12


@pytest.mark.sample(1)
@pytest.mark.parametrize("shape", [(2**22,), (4096, 4096), (1024, 1024, 16)])
def test_single_collectives_are_shardys(shape, shardy):
    """Where one collective does it, Shardy writes the same one for tensors large enough that bytes decide, not latency.

    Not compared, since Shardy takes another sequence:

    - It gathers several dimensions in one operation, ``[{"a"}, {"b"}]``; XLA makes one all_gather per dimension of it, as we do.
    - It splits an axis (``"b":(1)2``) to permute between axes of different size; we gather, exchange and slice whole axes.
    - To add an axis it may slice first and exchange both: ``('a', None)`` to ``(None, ('a', 'b'))`` is an all_to_all over both
      axes, where we exchange one and slice after it.
    """
    mesh, communication = parts("v5e:2x4", (2, 4))
    reshards = Reshards(mesh, communication)
    compared = 0
    for source, target in itertools.permutations(layouts(len(shape), 2), 2):
        steps = [step for step in reshards.path(shape, 4.0, source, target) if step.kind != "slice"]
        theirs = shardy(shape, source, target)
        if theirs is None or len(steps) > 1 or len(theirs) != 1:
            continue
        ours = [(step.kind, step.axes) for step in steps]
        if theirs == [("all_to_all", (0, 1))] and ours == [("all_to_all", (0,))]:
            continue
        compared += 1
        if theirs[0][0] == "collective_permute":  # no axes stand there
            assert [kind for kind, _ in ours] == ["collective_permute"], (source, target)
        else:
            assert ours == theirs, (source, target)
    assert compared >= 6 * len(shape) - 2


# What libtpu 0.0.42 compiles an array of float32[1024, 2048] into that is constrained to each layout of the path, on a mesh x, y:
# kind, axes and bytes. Constrained to the last layout only it took, on 2 x 4, an all_to_all over parts of an axis and a permute for the
# second, and gathers of all 8 MiB for the third and the fourth; on 4 x 4 the fourth was an all_to_all and a permute.
COMPILED = (
    (("x", None), (None, "x"), {(2, 4): [("all_to_all", "x", 4194304)], (4, 4): [("all_to_all", "x", 2097152)]}),
    (
        ("x", "y"),
        ("y", "x"),
        {(2, 4): [("all_gather", "x", 2097152), ("all_to_all", "y", 2097152)], (4, 4): [("collective_permute", "xy", 524288)]},
    ),
    (
        (("x", "y"), None),
        (None, "y"),
        {
            (2, 4): [("all_to_all", "y", 1048576), ("all_gather", "x", 2097152)],
            (4, 4): [("all_to_all", "y", 524288), ("all_gather", "x", 2097152)],
        },
    ),
    ((None, "y"), ("x", None), {(2, 4): [("all_gather", "y", 4194304)], (4, 4): [("all_gather", "y", 2097152)]}),
    (("x", "y"), ("x", None), {(2, 4): [("all_gather", "y", 4194304)], (4, 4): [("all_gather", "y", 2097152)]}),
    ((("x", "y"), None), (None, ("x", "y")), {(2, 4): [("all_to_all", "xy", 1048576)], (4, 4): [("all_to_all", "xy", 524288)]}),
    (("x", None), ("y", None), {(2, 4): [("collective_permute", "xy", 2097152)], (4, 4): [("collective_permute", "xy", 2097152)]}),
    ((("x", "y"), None), ("x", "y"), {(2, 4): [("all_to_all", "y", 1048576)], (4, 4): [("all_to_all", "y", 524288)]}),
    (("x", None), ("y", "x"), {(2, 4): [("collective_permute", "xy", 1048576)], (4, 4): [("collective_permute", "xy", 524288)]}),
    (
        ("x", "y"),
        ("y", None),
        {
            (2, 4): [("all_gather", "x", 2097152), ("all_to_all", "y", 2097152)],
            (4, 4): [("collective_permute", "xy", 524288), ("all_gather", "x", 2097152)],
        },
    ),
)


@pytest.mark.sample(4)
@pytest.mark.parametrize(("source", "target", "compiled"), COMPILED)
@pytest.mark.parametrize("sizes", [(2, 4), (4, 4)])
def test_the_tpu_compiler_takes_the_predicted_collectives(source, target, compiled, sizes):
    """Paths have the collectives that the TPU compiler makes of their steps, by kind, axes and bytes."""
    mesh = Mesh((("x", sizes[0]), ("y", sizes[1])))
    reshards = Reshards(mesh, Communication(Cluster.parse(f"v5e:{sizes[0]}x{sizes[1]}").links(mesh)))
    path = reshards.path((1024, 2048), 4.0, spec_to_layout(source, mesh, 2), spec_to_layout(target, mesh, 2))
    found = [(step.kind, "".join("xy"[axis] for axis in step.axes), step.nbytes) for step in path if step.kind != "slice"]
    assert found == compiled[sizes]
