from __future__ import annotations

import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import NamedSharding, PartitionSpec

from autoshard.errors import CompilerError
from autoshard.ir import Collective, Mesh, ServedOp
from autoshard.ir.naming import RARELY
from autoshard.lower import jax_mesh
from autoshard.verify import collectives_of
from autoshard.verify.groups import axes_of, parse_groups
from autoshard.verify.hlo import Module

MESH = Mesh.of({"x": 2, "y": 4})


def module(entry: str, *others: str) -> str:
    """An HLO text of an entry computation's lines and other computations."""
    return "HloModule m, num_partitions=8\n\n" + "\n\n".join(others) + "\n\nENTRY %main (p: f32[8]) -> f32[8] {\n" + entry + "\n}\n"


def shorthand(text: str) -> str:
    """A text whose operands are written as elements of tuples, ``%t#1``, as by jaxlib 0.12."""
    for line, name, whole, index in re.findall(r"(\n +(%[\w.]+) = .* get-tuple-element\((.*)\), index=(\d+))", text):
        text = text.replace(line, "").replace(f"{name})", f"{whole}#{index})").replace(f"{name},", f"{whole}#{index},")
    return text


@pytest.mark.parametrize(
    ("text", "axes"),
    [
        ("replica_groups={{0,1,2,3},{4,5,6,7}}", ("y",)),
        ("replica_groups={{0,4},{1,5},{2,6},{3,7}}", ("x",)),
        ("replica_groups={{0,1,2,3,4,5,6,7}}", ("x", "y")),
        ("replica_groups={}", ("x", "y")),
        ("replica_groups=[2,4]<=[8]", ("y",)),
        ("replica_groups=[4,2]<=[2,4]T(1,0)", ("x",)),
        ("replica_groups=mesh['a'=2,'b'=4] {'b'}", ("y",)),
        ("replica_groups=mesh['a'=8] {'a':(2)4}", ("y",)),
        ("replica_groups=mesh['a'=8] {'a':(1)2}", ("x",)),
        ("replica_groups=mesh['a'=4,'b'=2], device_ids=([2,4]T(1,0)) {'b'}", ("x",)),
        ("replica_groups={{0,2},{1,3},{4,6},{5,7}}", ("y",)),
        ("replica_groups={{0,5},{1,4},{2,7},{3,6}}", ("x", "y")),
        ("source_target_pairs={{0,1},{1,2},{2,3},{3,0},{4,5},{5,6},{6,7},{7,4}}", ("y",)),
        ("source_target_pairs={{0,7},{7,0}}", ("x", "y")),
    ],
)
def test_every_spelling_of_device_groups_is_read(text, axes):
    """Lists, iotas, meshes with sub-axes and permutes name the axes along which devices exchange data."""
    assert axes_of(text, MESH) == axes


@given(st.permutations(range(3)), st.sets(st.integers(0, 2), min_size=1))
@settings(max_examples=40, deadline=None)
def test_an_iota_says_what_its_list_says(order, grouped):
    """However the device numbers are transposed, the iota's groups are those of the numpy array it abbreviates."""
    ids = np.arange(24).reshape(2, 3, 4).transpose(order)
    width = int(np.prod([ids.shape[d] for d in range(3 - len(grouped), 3)]))
    rows = ids.reshape(-1, width)
    iota = f"replica_groups=[{rows.shape[0]},{width}]<=[2,3,4]T({','.join(map(str, order))})"
    listed = "replica_groups={" + ",".join("{" + ",".join(map(str, row)) + "}" for row in rows.tolist()) + "}"
    assert parse_groups(iota, 24) == parse_groups(listed, 24)


def test_axes_of_size_one_take_no_part():
    """Groups over an axis of one device are named without it."""
    assert axes_of("replica_groups={{0,1}}", Mesh.of({"x": 1, "y": 2})) == ("y",)


def test_attributes_over_several_lines_end_nothing():
    """Metadata of a kernel, which XLA writes in lines of their own, is no end of a computation."""
    kernel = '  %k = f32[8] custom-call(%p), frontend_attributes={kernel_metadata={\n"block":"8"\n}}, metadata={op_name="k"}\n'
    reduced = "  ROOT %r = f32[8] all-reduce(%k), replica_groups={{0,1,2,3},{4,5,6,7}}, to_apply=%add"
    assert [each.kind for each in collectives_of(module("  %p = f32[8] parameter(0)\n" + kernel + reduced), MESH)] == ["all_reduce"]


def test_loops_count_their_trips():
    """A body's collective runs as often as the loop's known trip count, or the bound in its condition, says; loops multiply."""
    inner = """%body (s: (f32[8])) -> (f32[8]) {
  %s = (f32[8]{0}) parameter(0)
  %g = f32[8]{0} get-tuple-element(%s), index=0
  %ar = f32[8]{0} all-reduce(%g), replica_groups={}, to_apply=%add, metadata={op_name="jit(f)/while/body/dot"}
  ROOT %t = (f32[8]{0}) tuple(%ar)
}"""
    condition = """%condition (s: (f32[8])) -> pred[] {
  %s = (f32[8]{0}) parameter(0)
  %n = s32[] constant(5)
  %i = s32[] constant(0)
  ROOT %lt = pred[] compare(%i, %n), direction=LT
}"""
    outer = """%outer (s: (f32[8])) -> (f32[8]) {
  %s = (f32[8]{0}) parameter(0)
  ROOT %w = (f32[8]{0}) while(%s), condition=%condition, body=%body
}"""
    entry = """  %p = f32[8]{0} parameter(0)
  %t = (f32[8]{0}) tuple(%p)
  ROOT %w = (f32[8]{0}) while(%t), condition=%condition, body=%outer, backend_config={"known_trip_count":{"n":"3"}}"""
    expected = Collective("all_reduce", ("x", "y"), 32.0, 15, ServedOp(name="jit(f)/while/body/dot"))
    assert collectives_of(module(entry, inner, condition, outer), MESH) == (expected,)


@pytest.mark.parametrize(
    ("start", "root", "trips"),
    [
        ("constant(3)", "compare(%i, %n), direction=LT", 4),
        ("copy(%given)", "compare(%i, %n), direction=LT", 1),
        ("constant(3)", "and(%lt, %far)", 1),
    ],
    ids=["counted", "from an argument", "until data are near"],
)
def test_loops_that_data_end_run_once(start, root, trips):
    """As predictions count them, though the condition has a bound: one trip where only a run shows how many, none of rare ones."""
    condition = f"""%condition (s: (s32[], f32[8])) -> pred[] {{
  %s = (s32[], f32[8]{{0}}) parameter(0)
  %i = s32[] get-tuple-element(%s), index=0
  %n = s32[] constant(7)
  %lt = pred[] compare(%i, %n), direction=LT
  %far = pred[] custom-call(%s), custom_call_target="far"
  ROOT %goes_on = pred[] {root}
}}"""
    body = """%body (s: (s32[], f32[8])) -> (s32[], f32[8]) {
  %s = (s32[], f32[8]{0}) parameter(0)
  %i = s32[] get-tuple-element(%s), index=0
  %one = s32[] constant(1)
  %next = s32[] add(%i, %one)
  %x = f32[8]{0} get-tuple-element(%s), index=1
  %ar = f32[8]{0} all-reduce(%x), replica_groups={}, to_apply=%add
  ROOT %t = (s32[], f32[8]{0}) tuple(%next, %ar)
}"""
    entry = f"""  %p = f32[8]{{0}} parameter(0)
  %given = s32[] parameter(1)
  %first = s32[] {start}
  %t = (s32[], f32[8]{{0}}) tuple(%first, %p)
  ROOT %w = (s32[], f32[8]{{0}}) while(%t), condition=%condition, body=%body"""
    (found,) = collectives_of(module(entry, condition, body), MESH)
    assert found.count == trips
    rare = f'{entry}, metadata={{op_name="jit(f)/{RARELY}/while"}}'
    assert not collectives_of(module(rare, condition, body), MESH)


@pytest.mark.parametrize("written", [str, shorthand])
def test_combined_collectives_are_one_record_a_tensor(written):
    """A tuple all_reduce moves each of its tensors; one whose readers slice it is a reduce_scatter."""
    entry = """  %p = f32[8]{0} parameter(0)
  %q = bf16[4]{0} parameter(1)
  %i = s32[] parameter(2)
  %ar = (f32[8]{0}, bf16[4]{0}) all-reduce(%p, %q), replica_groups=[4,2]<=[2,4]T(1,0), to_apply=%add
  %a = f32[8]{0} get-tuple-element(%ar), index=0
  %b = bf16[4]{0} get-tuple-element(%ar), index=1
  %s = f32[4]{0} dynamic-slice(%a, %i), dynamic_slice_sizes={4}
  ROOT %t = (f32[4]{0}, bf16[4]{0}) tuple(%s, %b)"""
    expected = (Collective("reduce_scatter", ("x",), 32.0), Collective("all_reduce", ("x",), 8.0))
    assert collectives_of(module(written(entry)), MESH) == expected


def test_chunks_of_an_all_to_all_are_one_tensor():
    """XLA:CPU passes the pieces of one tensor as a tuple; they count together."""
    entry = """  %p = f32[2,4]{1,0} parameter(0)
  %q = f32[2,4]{1,0} parameter(1)
  ROOT %a = (f32[2,4]{1,0}, f32[2,4]{1,0}) all-to-all(%p, %q), replica_groups=[4,2]<=[2,4]T(1,0)"""
    assert collectives_of(module(entry), MESH) == (Collective("all_to_all", ("x",), 64.0),)


def test_asynchronous_pairs_count_once():
    """A start and its done are one collective, of the size of what it delivers."""
    entry = """  %p = f32[2]{0} parameter(0)
  %s = (f32[2]{0}, f32[8]{0}) all-gather-start(%p), replica_groups=[2,4]<=[8], dimensions={0}
  %d = f32[8]{0} all-gather-done(%s)
  %c = (f32[8]{0}, f32[8]{0}, u32[], u32[]) collective-permute-start(%d), source_target_pairs={{0,4},{4,0}}
  %e = f32[8]{0} collective-permute-done(%c)
  %r = f32[8]{0} all-reduce-start(%e), replica_groups=[2,4]<=[8], to_apply=%add
  ROOT %f = f32[8]{0} all-reduce-done(%r)"""
    assert [(c.kind, c.mesh_axes, c.bytes) for c in collectives_of(module(entry), MESH)] == [
        ("all_gather", ("y",), 32.0),
        ("collective_permute", ("x",), 32.0),
        ("all_reduce", ("y",), 32.0),
    ]


def test_collectives_on_sparse_cores_count():
    """TPU7x leaves collectives to its SparseCores: a custom call, whose computation has the collective, in an asynchronous one."""
    text = """HloModule m, num_partitions=4

%called (p.1: f32[4]) -> f32[16] {
  %p.1 = f32[4]{0} parameter(0)
  ROOT %gather = f32[16]{0} all-gather(%p.1), channel_id=1, replica_groups={{0,1,2,3}}, dimensions={0}
}, execution_thread="sparsecore"

%async (p.2: f32[4]) -> f32[16] {
  %p.2 = f32[4]{0} parameter(0)
  ROOT %custom-call = f32[16]{0} custom-call(%p.2), custom_call_target="x", called_computations={%called}
}, execution_thread="sparsecore"

ENTRY %main (p: f32[4]) -> f32[16] {
  %p = f32[4]{0} parameter(0)
  %start = ((f32[4]), f32[16]{0}, s32[]) async-start(%p), async_execution_thread="sparsecore", calls=%async
  ROOT %done = f32[16]{0} async-done(%start), calls=%async
}
"""
    (found,) = collectives_of(text, Mesh.of({"x": 4}))
    assert (found.kind, found.mesh_axes, found.bytes, found.count) == ("all_gather", ("x",), 64.0, 1)


def test_a_collective_carried_by_fusions_moves_once():
    """TPU fusions that start, carry and end a collective all contain its text (libtpu 0.0.42, shortened)."""
    gather = "all-gather(%p), channel_id=7, replica_groups=mesh['axis_0'=2,'axis_1'=4] {'axis_1'}, dimensions={0}"
    config = 'backend_config={"async_collective_fusion_config":{"flag_start":"-1","flag_end":"-1"}}'
    start = f"""%start (p: f32[2]) -> (f32[2], f32[8]) {{
  %p = f32[2]{{0}} parameter(0)
  %g = f32[8]{{0}} {gather}, {config}
  ROOT %c = (f32[2]{{0}}, f32[8]{{0}}) custom-call(%g), custom_call_target="AsyncCollectiveStart"
}}"""
    carry = f"""%async_collective_fusion.4 (p: f32[2], q: f32[8]) -> (f32[4], f32[8]) {{
  %p = f32[2]{{0}} parameter(0)
  %q = f32[4]{{0}} parameter(1)
  %g = f32[8]{{0}} {gather}, {config}
  ROOT %t = (f32[4]{{0}}, f32[8]{{0}}) tuple(%q, %g)
}}"""
    done = f"""%done (p: f32[2]) -> f32[8] {{
  %p = f32[2]{{0}} parameter(0)
  %g = f32[8]{{0}} {gather}, {config}
  ROOT %c = f32[8]{{0}} custom-call(%p, %g), custom_call_target="AsyncCollectiveDone"
}}"""
    entry = """  %p = f32[2]{0} parameter(0)
  %a = (f32[2]{0}, f32[8]{0}) fusion(%p), kind=kCustom, calls=%start
  %b = (f32[4]{0}, f32[8]{0}) fusion(%p), kind=kOutput, calls=%async_collective_fusion.4
  ROOT %d = f32[8]{0} fusion(%p), kind=kCustom, calls=%done"""
    assert collectives_of(module(entry, start, carry, done), MESH) == (Collective("all_gather", ("y",), 32.0),)


def test_equal_channels_of_two_collectives_both_count():
    """XLA:TPU forms reduce_scatters as fusions of an all_reduce and a slice; a cloned one keeps its channel and moves data again."""
    scatter = """%all-reduce-scatter{n} (input: f32[32]) -> f32[8] {
  %input = f32[32]{0} parameter(0)
  %r = f32[32]{0} all-reduce(%input), channel_id=45, replica_groups={{0,1,2,3},{4,5,6,7}}, use_global_device_ids=true, to_apply=%add
  %i = u32[] partition-id()
  ROOT %s = f32[8]{0} dynamic-slice(%r, %i), dynamic_slice_sizes={8}
}"""
    entry = """  %p = f32[32]{0} parameter(0)
  %a = f32[8]{0} fusion(%p), kind=kCustom, calls=%all-reduce-scatter1
  ROOT %b = f32[8]{0} fusion(%p), kind=kCustom, calls=%all-reduce-scatter2"""
    text = module(entry, scatter.replace("{n}", "1"), scatter.replace("{n}", "2"))
    assert collectives_of(text, MESH) == (Collective("reduce_scatter", ("y",), 128.0),) * 2


def test_a_sum_that_is_rounded_on_its_way_is_a_reduce_scatter_if_it_is_sliced():
    """XLA:TPU joins a cast with the all_reduce before it: what is sliced has the type of the result, what is sent that of the operand."""
    entry = """  %p = f32[32]{0} parameter(0)
  %i = u32[] partition-id()
  %r = bf16[32]{0} all-reduce(%p), channel_id=1, replica_groups={{0,1,2,3},{4,5,6,7}}, use_global_device_ids=true, to_apply=%add
  ROOT %s = bf16[8]{0} dynamic-slice(%r, %i), dynamic_slice_sizes={8}"""
    assert collectives_of(module(entry), MESH) == (Collective("reduce_scatter", ("y",), 128.0),)


def test_unknown_collectives_are_an_error():
    """What moves data in a form nobody described is not passed over."""
    for call in ('custom-call(%p), custom_call_target="MegaCollective"', "ragged-all-to-all(%p), replica_groups={{0,1}}"):
        with pytest.raises(CompilerError, match="unknown form"):
            collectives_of(module("  %p = f32[32]{0} parameter(0)\n  ROOT %a = f32[8]{0} " + call), MESH)


@pytest.mark.parametrize("written", [str, shorthand])
def test_loops_that_count_by_two_run_half_as_often(written):
    """XLA:TPU writes no trip count: the bound stands in the condition, the step in the body."""
    condition = """%cond (c: (s32[], f32[8])) -> pred[] {
  %c = (s32[], f32[8]{0}) parameter(0)
  %n = s32[] constant(7)
  %i = s32[] get-tuple-element(%c), index=0
  ROOT %lt = pred[] compare(%i, %n), direction=LT
}"""
    body = """%body (c: (s32[], f32[8])) -> (s32[], f32[8]) {
  %c = (s32[], f32[8]{0}) parameter(0)
  %two = s32[] constant(2)
  %i = s32[] get-tuple-element(%c), index=0
  %x = f32[8]{0} get-tuple-element(%c), index=1
  %next = s32[] add(%i, %two)
  %r = f32[8]{0} all-reduce(%x), replica_groups=[2,4]<=[8], to_apply=%add
  ROOT %t = (s32[], f32[8]{0}) tuple(%next, %r)
}"""
    entry = """  %p = (s32[], f32[8]{0}) parameter(0)
  ROOT %w = (s32[], f32[8]{0}) while(%p), condition=%cond, body=%body"""
    assert collectives_of(module(entry, written(condition), written(body)), MESH) == (Collective("all_reduce", ("y",), 32.0, 4),)


def test_elements_of_nested_tuples_are_operands():
    """An element of an element of a tuple has its own type; it is read under one name."""
    entry = """  %p = (f32[4]{0}, (s32[], bf16[16]{0}), /*index=2*/f32[2]{0}) parameter(0)
  %a = bf16[16]{0} all-reduce(%p#1#1), replica_groups=[2,4]<=[8], to_apply=%add
  ROOT %t = (bf16[16]{0}, f32[2]{0}) tuple(%a, %p#2)"""
    computation = Module(module(entry)).computations["main"]
    assert [computation[name].type for name in ("p#1", "p#1#1", "p#2")] == ["(s32[], bf16[16]{0})", "bf16[16]{0}", "f32[2]{0}"]
    assert collectives_of(module(entry), MESH) == (Collective("all_reduce", ("y",), 32.0),)


@pytest.mark.parametrize(("dtype", "itemsize"), [(jnp.float32, 4), (jnp.int8, 1), (jnp.bool_, 1), (jnp.complex64, 8)])
def test_bytes_of_a_compiled_gather(dtype, itemsize):
    """A gather's bytes are those of its result, whatever the type."""
    mesh = jax_mesh(MESH)
    sharding, whole = (NamedSharding(mesh, PartitionSpec(spec)) for spec in ("y", None))
    x = jax.ShapeDtypeStruct((16, 4), dtype, sharding=sharding)
    text = jax.jit(lambda x: jax.lax.with_sharding_constraint(x, whole)).lower(x).compile().as_text()
    assert [(c.kind, c.mesh_axes, c.bytes) for c in collectives_of(text, MESH)] == [("all_gather", ("y",), 64.0 * itemsize)]


@pytest.mark.sample(3)
@pytest.mark.parametrize("axes", [axes for n in (1, 2, 3) for axes in itertools.combinations("abc", n)])
def test_axes_of_a_compiled_sum(axes):
    """Whatever axes a contraction is split over, its all_reduce is found to run over just these."""
    mesh = Mesh.of({"a": 2, "b": 2, "c": 2})
    sharding = NamedSharding(jax_mesh(mesh), PartitionSpec(axes))
    x = jax.ShapeDtypeStruct((8,), jnp.float32, sharding=sharding)
    text = jax.jit(lambda x: x @ x).lower(x).compile().as_text()
    assert [(c.kind, c.mesh_axes) for c in collectives_of(text, mesh)] == [("all_reduce", axes)]
