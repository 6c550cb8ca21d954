"""The manual lowering: numbers as unsharded, the planned collectives and no others, and nothing for the partitioner to decide."""

from __future__ import annotations

import re
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import io_callback
from jax.extend.core import Primitive
from jax.interpreters import mlir
from jax.sharding import AxisType, PartitionSpec
from problems import eager_cluster
from programs import abstract, concrete, gpt_scan
from random_assignments import random_assignment
from test_constrain import MESH, MODEL, PROGRAMS, lowering, replicated
from test_exchange import PROGRAMS as EXCHANGING

import autoshard
from autoshard.analysis.stacks import merged_stacks
from autoshard.cluster import Cluster
from autoshard.compilers import TARGETS, compiler_of
from autoshard.compilers.program_facts import program_facts
from autoshard.cost.permute import exchange_axes
from autoshard.cost.reshard import Step, _moves, _permutes
from autoshard.errors import StrategyError
from autoshard.ir import Mesh, layout_to_spec, layouts
from autoshard.lower import jax_mesh, manual_program
from autoshard.lower.collectives import moved
from autoshard.problem import Problem
from autoshard.rules import rules_of, same_on_shards
from autoshard.trace import trace
from autoshard.verify import collectives_of, compare, explicit_collectives

EVERYTHING = {**PROGRAMS, **EXCHANGING}
P = PartitionSpec


def manual(traced, assignment, mesh=MESH, compiler=None):
    graph = traced.graph
    program = traced.jaxpr, graph, rules_of(graph), assignment
    return manual_program(*program, jax_mesh(mesh), MODEL.reshard_paths(graph.values), compiler=compiler)


def searched(fn, *args, mesh):
    return autoshard.search(fn, *args, cluster=eager_cluster("cpu:8"), searcher="recursive_programming", mesh=mesh)


@cache
def unsharded(name):
    """A program's trace, the shapes of its arguments, and its plain form, which is compiled once for all assignments."""
    fn, shapes = EVERYTHING[name]
    traced = trace(fn, *shapes)
    return traced, shapes, jax.jit(lowering(traced, replicated(traced)))


@pytest.mark.sample(2)
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", EVERYTHING)
def test_any_assignment_computes_the_unsharded_numbers(name, seed):
    """However ops and values are sharded, each device computing on its shards gives the results of the plain program."""
    traced, shapes, plain = unsharded(name)
    args = jax.tree.leaves(concrete(shapes, seed))
    sharded = jax.jit(manual(traced, random_assignment(traced.graph, rules_of(traced.graph), MESH, seed)))
    for got, wanted in zip(sharded(*args), plain(*args), strict=True):
        np.testing.assert_allclose(got, wanted, rtol=2e-4, atol=1e-5)


@pytest.mark.sample(4)
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", EVERYTHING)
def test_its_collectives_are_those_of_the_judge(name, seed):
    """Whatever is assigned, the program has the collectives that the judge charges: kind, axes, count and bytes."""
    traced, shapes, _ = unsharded(name)
    rules = rules_of(traced.graph)
    assignment = random_assignment(traced.graph, rules, MESH, seed)
    predicted = Problem(program_facts(traced.graph, rules, compiler_of(MODEL.cluster)), MODEL).evaluate(assignment).cost.collectives
    lowered = jax.jit(manual(traced, assignment)).lower(*jax.tree.leaves(concrete(shapes, seed)))
    rows = compare(predicted, explicit_collectives(lowered, MESH))
    assert [row for row in rows if not row.agrees or row.predicted_count != row.actual_count] == []


def test_the_partitioner_has_nothing_to_decide():
    """A train step is one manual computation over all axes, without a sharding constraint in or around it."""
    fn, args = gpt_scan()
    text = searched(fn, *args, mesh={"x": 2, "y": 4}).apply(fn).lower(*args).as_text()
    assert text.count("sdy.manual_computation") == 1 and "sdy.sharding_constraint" not in text


def test_compiled_it_sends_what_was_planned():
    """XLA:CPU, which partitions nothing any more, has the planned reduce_scatters and all_gathers."""

    def step(w, x):
        return w - 0.1 * jax.grad(lambda w: jnp.square(x @ w).mean())(w)

    args = abstract((64, 64)), abstract((256, 64))
    strategy = autoshard.search(step, *args, cluster="cpu:8", searcher="fully_sharded", mesh={"x": 8})
    found = collectives_of(strategy.apply(step).lower(*args).compile().as_text(), Mesh.of({"x": 8}))
    kinds = {each.kind for each in strategy.cost.collectives}
    assert "reduce_scatter" in kinds
    assert {(each.kind, each.bytes) for each in found} == {(each.kind, each.bytes) for each in strategy.cost.collectives}


SMALL = Mesh.of({"x": 2, "y": 2, "z": 2})


@pytest.mark.sample(2)
@pytest.mark.parametrize("kind", ["all_gather", "all_to_all", "collective_permute", "slice"])
def test_a_step_gives_each_device_its_part(kind):
    """Every move of a reshard that there is between two layouts of a matrix on three axes brings each device the part of the target."""
    whole = np.arange(16.0 * 8).reshape(16, 8)
    everything = layouts(2, 3)
    ends = [(everything[a], everything[b]) for (a, b), (move, _) in _moves(2, 3).items() if move == kind]
    if kind == "collective_permute":
        numbers = [(a, b) for _, sources, targets in _permutes(2, SMALL.sizes) for a, b in zip(sources, targets, strict=True)]
        ends = [(everything[a], everything[b]) for a, b in numbers]
    axes = {(everything[a], everything[b]): axes for (a, b), (_, axes) in _moves(2, 3).items()}
    mesh, steps = jax_mesh(SMALL), [Step(kind, axes.get(end) or exchange_axes(*end, 2, SMALL.sizes), *end, 1.0, 0.0) for end in ends]

    def spec(layout):
        return P(*layout_to_spec(layout, SMALL.names, 2))

    def every(arrays):
        return [moved(x, step, SMALL) for x, step in zip(arrays, steps, strict=True)]

    specs = ([spec(step.source) for step in steps],), [spec(step.target) for step in steps]
    mapped = jax.jit(jax.shard_map(every, mesh=mesh, in_specs=specs[0], out_specs=specs[1], check_vma=False))
    found = mapped([whole] * len(steps))
    assert len(found) >= 12
    for x in found:
        for shard in x.addressable_shards:
            np.testing.assert_array_equal(shard.data, whole[shard.index])


def test_partial_products_are_combined_after_their_transpose():
    """A gradient is transposed before it is sent, so that XLA makes one product of the two and the state keeps its order in memory."""

    def step(w, x):
        return w - 0.1 * jax.grad(lambda w: jnp.square(x @ w).mean())(w)

    args = abstract((64, 32)), abstract((256, 64))
    for searcher in ("data_parallel", "fully_sharded"):
        strategy = autoshard.search(step, *args, cluster="cpu:8", searcher=searcher, mesh={"x": 8})
        lowered = strategy.apply(step).lower(*args).as_text()
        sent = re.search(r'"stablehlo\.(all_reduce|reduce_scatter)"\(%(\d+)\)', lowered)
        assert sent is not None and re.search(rf"%{sent[2]} = stablehlo\.transpose", lowered), searcher


# --- what is special ---------------------------------------------------------------------------------------------------


@jax.custom_vjp
def doubled(x):
    return jnp.sin(x).mean()


doubled.defvjp(lambda x: (jnp.sin(x).mean(), x), lambda x, g: (2 * g * jnp.cos(x) / x.size,))


def test_derivatives_of_the_sharded_step_are_those_of_the_function():
    """A step that is differentiated, mapped or jitted once more keeps its custom derivatives, which read whole arrays."""
    x = jnp.asarray(np.random.default_rng(0).normal(size=(16, 8)), jnp.float32)
    step = searched(doubled, x, mesh={"x": 8}).apply(doubled)
    for transform in (jax.jit, jax.grad, lambda f: jax.jit(jax.grad(f)), lambda f: jax.grad(jax.jit(f))):
        np.testing.assert_allclose(transform(step)(x), transform(doubled)(x), rtol=1e-5)
    np.testing.assert_allclose(jax.vmap(step)(jnp.stack([x, 2 * x])), jax.vmap(doubled)(jnp.stack([x, 2 * x])), rtol=1e-5)


def test_a_jitted_loop_over_steps_stays_manual():
    """A step inside `jax.jit` is lowered manually too; only its derivatives are not."""

    def step(x):
        return jnp.tanh(x @ x.T) @ x * 0.1

    x = jnp.ones((16, 8))
    sharded = searched(step, x, mesh={"x": 8}).apply(step)
    loop = jax.jit(lambda x: jax.lax.fori_loop(0, 3, lambda _, x: sharded(x), x))
    assert "sdy.manual_computation" in loop.lower(x).as_text()
    np.testing.assert_allclose(loop(x), jax.lax.fori_loop(0, 3, lambda _, x: step(x), x), rtol=1e-5)


def test_callbacks_with_effects_are_called_once():
    """What is done to the outside world is done by the first device alone; all have its results."""
    calls = []

    def program(x):
        y = jnp.tanh(x @ x.T @ x)
        jax.debug.callback(lambda total: calls.append(("debug", float(total))), y.sum())
        seen = io_callback(lambda total: calls.append(("io", float(total))) or np.float32(3), jax.ShapeDtypeStruct((), np.float32), y.sum())
        return y * seen

    x = jnp.asarray(np.random.default_rng(0).normal(size=(16, 8)), jnp.float32)
    got = searched(program, x, mesh={"x": 4, "y": 2}).apply(program)(x)
    jax.effects_barrier()
    assert sorted(name for name, _ in calls) == ["debug", "io"]
    np.testing.assert_allclose(got, 3 * jnp.tanh(x @ x.T @ x), rtol=1e-5)


def collectives_inside(x):
    """A shard_map over one axis that has each kind of collective, in and outside a loop."""
    mesh = jax.make_mesh((8,), ("i",), axis_types=(AxisType.Auto,))

    def body(x):
        total, rows = jax.lax.psum(x.sum(0), "i"), jax.lax.all_gather(x, "i", tiled=True)
        turned = jax.lax.ppermute(x, "i", [(k, (k + 1) % 8) for k in range(8)])
        looped, _ = jax.lax.scan(lambda c, _: (c + jax.lax.pmean(c, "i"), None), x, None, length=2)
        return total, rows.sum() + turned + looped + jax.lax.axis_index("i"), jax.lax.psum_scatter(rows, "i", tiled=True)

    return jax.shard_map(body, mesh=mesh, in_specs=P("i"), out_specs=(P(), P("i"), P("i")))(x * 2)


def test_a_shard_map_inside_becomes_part_of_the_program():
    """A shard_map of the user's own runs inside the manual computation, over axes of the strategy's own names."""
    x = jnp.asarray(np.random.default_rng(0).normal(size=(16, 8)), jnp.float32)
    step = searched(collectives_inside, x, mesh={"a": 4, "b": 2}).apply(collectives_inside)
    assert step.lower(x).as_text().count("sdy.manual_computation") == 1
    for got, wanted in zip(step(x), jax.jit(collectives_inside)(x), strict=True):
        np.testing.assert_allclose(got, wanted, rtol=1e-5)


def test_a_shard_map_over_another_mesh_stands_in_the_way():
    """Where a shard_map's mesh does not fit the strategy's, the step is lowered by constraints, and a note says so and where."""
    mesh = jax.make_mesh((2, 4), ("a", "b"), axis_types=(AxisType.Auto,) * 2)

    def program(x):
        return jax.shard_map(lambda x: x + jax.lax.axis_index("b"), mesh=mesh, in_specs=P("b"), out_specs=P("b"))(x)

    x = jnp.zeros((16, 8))
    strategy = searched(program, x, mesh={"i": 8})
    assert "sdy.sharding_constraint" in strategy.apply(program).lower(x).as_text()
    assert any("the one at" in note and "test_manual.py" in note and "lowered by sharding constraints" in note for note in strategy.notes)
    np.testing.assert_allclose(strategy.apply(program)(x), program(x))


def primitive(name, function):
    """A primitive of the user's own, which has neither a rule nor an implementation that could be traced."""
    made = Primitive(name)
    made.def_abstract_eval(lambda x, **_: jax.core.ShapedArray(x.shape, x.dtype))
    mlir.register_lowering(made, mlir.lower_fun(function, multiple_results=False))
    return made


def test_a_primitive_that_knows_a_size_runs_whole():
    """What a primitive without a rule lowers to for shards tells whether it may run on them; else each device runs it whole."""
    scaled = primitive("scaled", lambda x, by: jnp.tanh(x) * by)
    divided = primitive("divided", lambda x: jnp.tanh(x) / x.shape[0])
    x = jnp.asarray(np.random.default_rng(0).normal(size=(16, 8)), jnp.float32)
    for made, params, on_shards in ((scaled, {"by": 3.0}, True), (divided, {}, False)):
        program = partial(made.bind, **params)
        (eqn,) = jax.make_jaxpr(program)(x).eqns
        assert same_on_shards(eqn, [(8, 8)]) == on_shards
        np.testing.assert_allclose(searched(program, x, mesh={"x": 8}).apply(program)(x), jax.jit(program)(x), rtol=1e-5)


def test_an_unknown_lowering_is_refused():
    """The two lowerings are named."""
    strategy = searched(jnp.sin, jnp.ones(8), mesh={"x": 8})
    with pytest.raises(StrategyError, match="one of \\['constraints', 'manual'\\], got 'gspmd'"):
        strategy.apply(jnp.sin, lowering="gspmd")
    assert "sdy.manual_computation" not in strategy.apply(jnp.sin, lowering="constraints").lower(jnp.ones(8)).as_text()


@pytest.mark.parametrize(("rounds", "barriers"), [(1, 0), (2, 1)])
def test_a_barrier_stands_before_what_is_computed_again_in_the_same_loop_alone(rounds, barriers):
    """Slices of stacks are copied before a barrier. Where a body computes twice again, barriers keep the second part from coming early."""

    def layer(x, w):
        for _ in range(rounds):
            x = jax.checkpoint(lambda x: jnp.tanh(x @ w))(x)
        return x, None

    def step(weights, x):
        return jax.grad(lambda weights: (jax.lax.scan(layer, x, weights)[0] ** 2).mean())(weights)

    args = abstract((3, 8, 8)), abstract((16, 8))
    strategy = autoshard.search(step, *args, cluster="cpu:4")
    given = concrete(args)
    text = strategy.apply(step).lower(*given).as_text()
    assert ("optimization_barrier" in text) == bool(barriers)
    np.testing.assert_allclose(strategy.apply(step)(*given), jax.jit(step)(*given), rtol=2e-5, atol=1e-6)


@pytest.mark.parametrize("seed", range(4))
def test_any_assignment_of_a_recurrence_computes_the_unsharded_numbers(seed, monkeypatch):
    """States of matrices that are stored as rows, of lanes of four, are split by any of their dimensions."""
    monkeypatch.setattr(TARGETS["cpu"], "stack_lanes", 4)

    def loss(weights, x):
        def step(state, row):
            state = 0.9 * state + jnp.einsum("bhk,bhl->bhkl", row * weights, row)
            return state, jnp.einsum("bhk,bhkl->bhl", row, state)

        return (jax.lax.scan(step, jnp.zeros((2, 6, 2, 2)), x)[1] ** 2).mean()

    args = concrete((abstract((6, 2)), abstract((16, 2, 6, 2))), seed)
    gradients = jax.grad(loss, argnums=(0, 1))
    traced = trace(gradients, *args)
    assignment = random_assignment(traced.graph, rules_of(traced.graph), MESH, seed)
    assert merged_stacks(traced.graph, assignment, 4)
    found = jax.jit(manual(traced, assignment, compiler=compiler_of(Cluster.parse("cpu:8"))))(*args)
    for one, other in zip(found, jax.jit(gradients)(*args), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-7)
