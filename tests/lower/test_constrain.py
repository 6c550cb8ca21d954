from __future__ import annotations

import re
from dataclasses import replace
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec
from programs import abstract, concrete, gpt, gpt_scan
from random_assignments import random_assignment

from autoshard.cluster import Cluster
from autoshard.ir import Assignment, Mesh
from autoshard.judge.model import CostModel
from autoshard.lower import constrained, jax_mesh
from autoshard.lower.interpret import opened, subjaxprs
from autoshard.rules import rules_of
from autoshard.trace import trace
from autoshard.verify import explicit_collectives

MESH = Mesh.of({"x": 2, "y": 4})
MODEL = CostModel(Cluster.parse("cpu:8"), MESH)
WHOLE = (-1, -1)


def lowering(traced, assignment, path=None):
    """The constrained flat function of a traced program."""
    graph = traced.graph
    return constrained(traced.jaxpr, graph, rules_of(graph), assignment, jax_mesh(MESH), path or MODEL.reshard_paths(graph.values))


def replicated(_):
    """The assignment that shards nothing."""
    return Assignment(MESH, {}, {})


def constraints(function, *args) -> int:
    return jax.jit(function).lower(*args).as_text().count("sdy.sharding_constraint")


# --- programs ----------------------------------------------------------------------------------------------------------


def mlp(x, w1, w2):
    def loss(w1, w2):
        return jnp.mean(jax.nn.gelu(x @ w1) @ w2)

    return jax.value_and_grad(loss, (0, 1))(w1, w2)


@jax.custom_vjp
def doubled_gradient(x):
    return jnp.sin(x)


doubled_gradient.defvjp(lambda x: (jnp.sin(x), x), lambda x, g: (2 * g * jnp.cos(x),))


def control_flow(x, w, xs):
    def body(carry, row):
        return jax.nn.silu(carry @ w) * 0.1 + row, carry.sum(0)

    carry, stacked = jax.lax.scan(body, x, xs)
    policy = jax.checkpoint_policies.dots_saveable
    carry = jax.checkpoint(lambda c: jax.nn.relu(doubled_gradient(c) @ w), policy=policy)(carry)
    carry, _ = jax.lax.while_loop(lambda state: state[1] < 3, lambda state: (state[0] * 2, state[1] + 1), (carry, 0))
    return jax.lax.cond(carry.sum() > 1, lambda c: c + 1, lambda c: c @ w.T, carry), stacked


def convolution(x, kernel, w):
    def loss(kernel, w):
        y = jax.lax.conv_general_dilated(x, kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
        return jax.nn.log_softmax(jax.nn.relu(y).reshape(y.shape[0], -1) @ w)[:, 0].mean()

    return jax.grad(loss, (0, 1))(kernel, w)


def indexing(table, tokens, key):
    rows = jax.lax.with_sharding_constraint(table[tokens], PartitionSpec("x", None, "y"))
    best, places = jax.lax.top_k(rows.mean(1), 2)
    noise = jax.random.normal(key, rows.shape) + jnp.arange(rows.shape[-1])
    return jnp.sort(rows + noise, axis=-1), best, places, table.at[tokens[0]].add(1.0)


PROGRAMS = {
    "mlp": (mlp, (abstract((16, 32)), abstract((32, 64)), abstract((64, 8)))),
    "control_flow": (control_flow, (abstract((8, 16)), abstract((16, 16)), abstract((3, 8, 16)))),
    "convolution": (convolution, (abstract((8, 4, 4, 8)), abstract((3, 3, 8, 16)), abstract((256, 8)))),
    "indexing": (indexing, (abstract((16, 8)), abstract((8, 4), jnp.int32), jax.eval_shape(lambda: jax.random.key(0)))),
}


@cache
def unsharded(name):
    """A program's trace, the shapes of its arguments, and its plain form, which is compiled once for all assignments."""
    fn, shapes = PROGRAMS[name]
    traced = trace(fn, *shapes)
    return traced, shapes, jax.jit(lowering(traced, replicated(traced)))


@pytest.mark.sample(2)
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", PROGRAMS)
def test_any_assignment_computes_the_unsharded_numbers(name, seed):
    """However ops and values are sharded, the results are those of the plain program."""
    traced, shapes, plain = unsharded(name)
    args = jax.tree.leaves(concrete(shapes, seed))
    sharded = jax.jit(lowering(traced, random_assignment(traced.graph, rules_of(traced.graph), MESH, seed)))
    for got, wanted in zip(sharded(*args), plain(*args), strict=True):
        np.testing.assert_allclose(got, wanted, rtol=2e-4, atol=1e-5)


def test_the_replicated_lowering_computes_what_the_function_does():
    """What the other tests compare with is the function itself."""
    fn, shapes = PROGRAMS["control_flow"]
    args = concrete(shapes)
    got = jax.jit(lowering(trace(fn, *shapes), replicated(None)))(*args)
    for a, b in zip(got, fn(*args), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5)


# --- what is constrained ----------------------------------------------------------------------------------------------


def test_results_arrive_in_their_layouts():
    """An argument's and a result's layout are those of the assignment, compiled."""
    traced = trace(lambda x: x * 2, abstract((8, 8)))
    (value,), (result,) = traced.graph.arguments, traced.graph.results
    assignment = Assignment(MESH, {0: ((0, -1), (1, -1))}, {value: (0, 1), result: (0, 1)})
    (out,) = jax.jit(lowering(traced, assignment))(jnp.ones((8, 8)))
    assert out.sharding.shard_shape(out.shape) == (4, 2)


def test_readers_in_one_layout_share_one_copy():
    """Two matrix products that read a sharded weight whole gather it once."""
    traced = trace(lambda w, x, y: (x @ w, y @ w), abstract((8, 8)), abstract((4, 8)), abstract((4, 8)))
    weight = traced.graph.arguments[0]
    lowered = jax.jit(lowering(traced, Assignment(MESH, {}, {weight: (0, -1)}))).lower(*map(jnp.ones, ((8, 8), (4, 8), (4, 8))))
    assert [c.kind for c in explicit_collectives(lowered, MESH)] == ["all_gather"]


def test_a_shared_copy_serves_the_readers_it_is_cheaper_for():
    """With a copy gathered over one axis, a reader of the whole gathers the other axis from the copy."""
    traced = trace(lambda w, x, y: (w * 2, x @ w), abstract((8, 8)), abstract((4, 8)), abstract((4, 8)))
    weight, doubled = traced.graph.arguments[0], traced.graph.results[0]
    layouts = {weight: (0, 0), doubled: (0, -1)}
    assignment = Assignment(MESH, {0: ((0, -1), (-1, -1))}, layouts, {weight: (0, -1)})
    args = tuple(map(jnp.ones, ((8, 8), (4, 8), (4, 8))))

    def axes(assignment):
        lowered = jax.jit(lowering(traced, assignment)).lower(*args)
        return sorted(c.mesh_axes for c in explicit_collectives(lowered, MESH))

    assert axes(assignment) == [("x",), ("y",)]
    assert axes(replace(assignment, copies={})) == [("x", "y"), ("y",)]


def test_a_reshard_goes_through_the_planned_layouts():
    """The steps of a path stand in the program one by one, where a constraint to its end alone is left to the partitioner."""
    traced = trace(lambda x, w: x @ w, abstract((16, 8)), abstract((8, 4)))
    x, _ = traced.graph.arguments
    rows = rules_of(traced.graph)[0].operands[0][0][0]
    assignment = Assignment(MESH, {0: ((-1, -1), (rows, -1))}, {x: (0, 0), traced.graph.results[0]: (-1, 0)})
    steps = MODEL.reshard_path(traced.graph.values[x], (0, 0), (-1, 0))

    def moves(path):
        lowered = jax.jit(lowering(traced, assignment, path)).lower(jnp.ones((16, 8)), jnp.ones((8, 4)))
        return [(c.kind, c.mesh_axes) for c in explicit_collectives(lowered, MESH)]

    planned = [(step.kind, tuple(MESH.names[axis] for axis in step.axes)) for step in steps if step.kind != "slice"]
    assert len(steps) > 1
    assert moves(None) == planned
    assert moves(lambda *_: steps[-1:]) != planned


def test_a_result_that_replaces_an_argument_leaves_in_its_layout():
    """New state comes out as the old state goes in, wherever the last op left it."""
    traced = trace(lambda state: state * 2, abstract((8, 8)))
    assert traced.graph.aliases == ((0, 0),)
    assignment = Assignment(MESH, {}, {traced.graph.arguments[0]: (1, 0)})
    run = jax.jit(lowering(traced, assignment))
    (out,) = run(*run(jnp.ones((8, 8))))
    assert out.sharding.shard_shape(out.shape) == (2, 4)


@pytest.mark.parametrize(("scatter", "kind"), [(-1, "all_reduce"), (0, "reduce_scatter")])
def test_a_reduction_is_combined_as_chosen(scatter, kind):
    """Partial sums of a contraction are all-reduced, or reduce-scattered where the choice says so."""
    traced = trace(lambda x, w: x @ w, abstract((8, 16)), abstract((16, 8)))
    x, w = traced.graph.arguments
    contracted = rules_of(traced.graph)[0].operands[0][1][0]
    layouts = {x: (-1, 1), w: (-1, 0), traced.graph.results[0]: (-1, scatter)}
    assignment = Assignment(MESH, {0: ((-1, -1), (contracted, scatter))}, layouts)
    lowered = jax.jit(lowering(traced, assignment)).lower(jnp.ones((8, 16)), jnp.ones((16, 8)))
    assert [(c.kind, c.mesh_axes, c.bytes) for c in explicit_collectives(lowered, MESH)] == [(kind, ("y",), 256.0)]


def test_elementwise_chains_need_no_constraints_of_their_own():
    """In a chain in one layout only what enters is constrained; scalars and constants never are."""
    traced = trace(lambda x: jnp.exp(jnp.sin(x) * 2 + jnp.arange(8.0)).sum(), abstract((8, 8)))
    assert constraints(lowering(traced, replicated(traced)), jnp.ones((8, 8))) == 1


@pytest.mark.parametrize(("row", "constrained"), [((), True), ((8,), False), ((1, 8), False)], ids=str)
def test_results_of_stretched_scalars_are_constrained(row, constrained):
    """XLA:TPU makes one of equal broadcasts before it propagates: what is made of a scalar could spread to all that read it; rows are told
    apart."""
    traced = trace(lambda x, row: jnp.exp(x * row) * x, abstract((16, 8)), abstract(row))
    text = jax.jit(lowering(traced, replicated(traced))).lower(jnp.ones((16, 8)), jnp.ones(row)).as_text()
    stretched, _ = re.findall(r"(%\d+) = stablehlo.multiply", text)
    assert (f"sdy.sharding_constraint {stretched} " in text) == constrained
    exponential = re.search(r"(%\d+) = stablehlo.exponential", text)
    assert exponential and f"sdy.sharding_constraint {exponential[1]} " not in text


def test_what_group_norms_and_rotations_are_made_of_is_not_constrained():
    """A constraint between a reshape, a slice or a convolution and its reader stands in XLA's way: a U-Net took twice as long."""

    def program(kernel, x):
        y = jax.lax.conv_general_dilated(x, kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
        groups = y.reshape(8, 4, 4, 2, 4)
        y = (groups - groups.mean((1, 2, 4), keepdims=True)).reshape(y.shape)
        first, second = jnp.split(y, 2, axis=-1)
        return jnp.concatenate([-second, first[..., ::-1]], axis=-1)[..., 1:]

    shapes = (3, 3, 8, 8), (8, 4, 4, 8)
    traced = trace(program, *map(abstract, shapes))
    _, images = traced.graph.arguments
    batch = {images: (0, -1)}
    choices = {}
    for op, rule in zip(traced.graph.walk(), rules_of(traced.graph), strict=True):
        dims = [(k, value) for k, value in enumerate(op.operands) if value in batch]
        factor = rule.operands[dims[0][0]][0][0] if dims else -1
        choices[op.index] = ((factor, -1), (-1, -1))
        batch.update(dict.fromkeys(op.results if dims else (), (0, -1)))
    assignment = Assignment(MESH, choices, batch)
    assert constraints(lowering(traced, assignment), *map(jnp.ones, shapes)) == 3  # the two arguments, and the result


@pytest.mark.parametrize("scatter", [-1, 0])
def test_a_sum_waits_for_the_transposes_that_alone_read_it(scatter):
    """XLA turns products around before it partitions: between a gradient's product and its transpose nothing is constrained."""
    traced = trace(lambda x, y: (x.T @ y).T.T.T, abstract((16, 8)), abstract((16, 12)))
    x, y = traced.graph.arguments
    turned, product, *transposes = traced.graph.walk()
    assert [op.primitive for op in transposes] == ["transpose"] * 3
    (contracted,) = rules_of(traced.graph)[product.index].operands[1][0]
    (rows,) = rules_of(traced.graph)[turned.index].operands[0][0]
    layouts = {x: (-1, 0), y: (-1, 0), turned.results[0]: (-1, 1), product.results[0]: (-1, scatter)}
    choices = {turned.index: ((-1, -1), (rows, -1)), product.index: ((-1, -1), (contracted, scatter))}
    for op in transposes:
        layout = layouts[op.operands[0]]
        factor = rules_of(traced.graph)[op.index].operands[0][layout[1]][0] if layout[1] >= 0 else -1
        choices[op.index] = ((-1, -1), (factor, -1))
        layouts[op.results[0]] = (-1, 1 - layout[1] if layout[1] >= 0 else -1)
    lowered = jax.jit(lowering(traced, Assignment(MESH, choices, layouts))).lower(jnp.ones((16, 8)), jnp.ones((16, 12)))
    text = lowered.as_text()
    assert text.count("stablehlo.dot_general") == text.count("stablehlo.transpose") == 1
    kind = "reduce_scatter" if scatter >= 0 else "all_reduce"
    assert [(c.kind, c.mesh_axes, c.bytes) for c in explicit_collectives(lowered, MESH)] == [(kind, ("y",), 384.0)]
    run = jax.jit(lowering(traced, Assignment(MESH, choices, layouts)))
    x, y = np.arange(128.0, dtype=np.float32).reshape(16, 8), np.arange(192.0, dtype=np.float32).reshape(16, 12)
    np.testing.assert_allclose(run(x, y)[0], (x.T @ y).T, rtol=1e-6)


@pytest.mark.parametrize("shared", [True, False])
def test_what_is_stretched_in_two_ways_is_two_arrays(shared):
    """XLA makes one of equal broadcasts: a column that one product wants whole and another sharded is stretched from arrays of its own."""
    traced = trace(lambda a, b, column: (a * column, b * column), abstract((16, 8)), abstract((16, 8)), abstract((16, 1)))
    graph = traced.graph
    second, other = graph.walk()[-1], graph.arguments[1]
    columns = rules_of(graph)[second.index].results[0][1][0]
    choice = ((-1, -1), (-1, -1)) if shared else ((columns, -1), (-1, -1))
    layouts = {} if shared else {value: (1, -1) for value in (other, second.results[0])}
    text = (
        jax.jit(lowering(traced, Assignment(MESH, {second.index: choice}, layouts)))
        .lower(*(jnp.ones(graph.values[value].shape) for value in graph.arguments))
        .as_text()
    )
    assert len(set(re.findall(r"broadcast_in_dim (%\w+), dims = \[0, 1\]", text))) == (1 if shared else 2)


def test_captured_arrays_are_replicated():
    """An array that the function captured is constrained like any other value."""
    weight = np.ones((8, 8), np.float32)
    traced = trace(lambda x: x @ weight, abstract((8, 8)))
    assert constraints(lowering(traced, replicated(traced)), jnp.ones((8, 8))) == 3


# --- what survives ------------------------------------------------------------------------------------------------------


def counts(function, *args) -> tuple[int, int]:
    """Optimization barriers and matrix products in the lowered program."""
    text = jax.jit(function).lower(*args).as_text()
    return text.count("stablehlo.optimization_barrier"), text.count("stablehlo.dot_general")


@pytest.mark.sample(1)
@pytest.mark.parametrize(("program", "options"), [(gpt, {"remat": True}), (gpt, {}), (gpt_scan, {"remat": True})])
def test_rematerialisation_survives(program, options):
    """The constrained program recomputes what the plain one does, behind as many barriers."""
    fn, args = program(**options)
    traced = trace(fn, *args)
    leaves, tree = jax.tree.flatten(args)
    plain = counts(lambda *flat: fn(*tree.unflatten(flat)), *leaves)
    assert counts(lowering(traced, replicated(traced)), *leaves) == plain
    assert (plain[0] > 0) == bool(options)


def test_donation_survives():
    """A donated argument's buffer is the result's."""
    traced = trace(lambda x, y: x + y, abstract((8, 8)), abstract((8, 8)), donate_argnums=0)
    lowered = jax.jit(lowering(traced, replicated(traced)), donate_argnums=0).lower(jnp.ones((8, 8)), jnp.ones((8, 8)))
    assert re.search(r"tf.aliasing_output|jax.buffer_donor", lowered.as_text())


@pytest.mark.parametrize("inside", [lambda f: f, jax.jit, jax.checkpoint, lambda f: lambda x: jax.lax.map(f, x)])
def test_custom_gradients_survive(inside):
    """Differentiating the constrained program uses the derivative rule that the function came with."""
    traced = trace(inside(doubled_gradient), abstract((8, 8)))
    x = jnp.linspace(0, 1, 64).reshape(8, 8)
    run = lowering(traced, random_assignment(traced.graph, rules_of(traced.graph), MESH, 1))
    gradient = jax.jit(jax.grad(lambda x: run(x)[0].sum()))(x)
    np.testing.assert_allclose(gradient, 2 * jnp.cos(x), rtol=1e-5)


def test_types_of_bodies_survive():
    """Every rebuilt body has the types of the one it replaces, weak ones included."""
    fn, shapes = PROGRAMS["control_flow"]
    traced = trace(fn, *shapes)
    new = jax.make_jaxpr(lowering(traced, random_assignment(traced.graph, rules_of(traced.graph), MESH, 0)))(*shapes)

    def types(jaxpr):
        for eqn in jaxpr.eqns:
            if eqn.primitive.name == "jit":
                yield from types(opened(eqn.params["jaxpr"])[0])
            elif eqn.primitive.name != "sharding_constraint":
                for body in subjaxprs(eqn):
                    inner, _ = opened(body)
                    yield eqn.primitive.name, [(v.aval.str_short(), v.aval.weak_type) for v in (*inner.invars, *inner.outvars)]
                    yield from types(inner)

    assert list(types(new.jaxpr)) == list(types(traced.jaxpr.jaxpr))


def test_a_checkpoint_may_capture_arrays():
    """A constant inside a checkpointed, jitted function reaches the rebuilt body."""
    weight = np.arange(64, dtype=np.float32).reshape(8, 8)
    fn = jax.checkpoint(jax.jit(lambda x: jnp.sin(x @ weight)))
    traced = trace(lambda x: jax.grad(lambda x: fn(x).sum())(x), abstract((8, 8)))
    x = jnp.ones((8, 8)) / 100
    (got,) = jax.jit(lowering(traced, random_assignment(traced.graph, rules_of(traced.graph), MESH, 2)))(x)
    np.testing.assert_allclose(got, jax.grad(lambda x: fn(x).sum())(x), rtol=1e-4)


def test_names_survive():
    """An op keeps the name stack under which the user wrote it."""

    def f(x):
        with jax.named_scope("attention"):
            return jax.jit(jnp.sin)(x)

    traced = trace(f, abstract((8, 8)))
    text = jax.jit(lowering(traced, replicated(traced))).lower(jnp.ones((8, 8))).as_text(debug_info=True)
    assert re.search(r"attention/.*sin", text)
