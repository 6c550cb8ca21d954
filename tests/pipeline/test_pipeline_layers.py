"""Scans over layers in parts compute what they compute in one, and their layers are on different stages."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.extend.core import jaxpr_as_fun

from autoshard.errors import PipelineError
from autoshard.pipeline.layers import with_divided_layers
from autoshard.pipeline.stages import stages_of
from autoshard.trace import trace
from tests import programs
from tests.pipelines import compared, pipelined
from tests.programs import abstract, concrete, train_step_of


def scanned(layers=4):
    """Layers of one width whose weights are stacked."""
    params = {"w": abstract((layers, 8, 16)), "v": abstract((layers, 16, 8))}

    def loss(params, x, y):
        x, _ = jax.lax.scan(lambda x, p: (x + jnp.tanh(x @ p["w"]) @ p["v"], None), x, params)
        return jnp.mean((x - y) ** 2)

    return train_step_of(loss, params, abstract((16, 8)), abstract((16, 8)))


@pytest.mark.sample(1)
@pytest.mark.parametrize("layers", [4, 5])
def test_parts_compute_the_same(layers):
    """Up to rounding, and each scan has a part of the layers."""
    fn, args = scanned(layers)
    traced = trace(fn, *args)
    divided = with_divided_layers(traced, 2, 4, rows=()).traced
    lengths = [op.params["length"] for op in divided.graph.ops if op.primitive == "scan"]
    assert lengths == ([2] * 4 if layers == 4 else [1] * 10)
    given = [jnp.asarray(x) for x in jax.tree.leaves(concrete(args))]
    for one, other in zip(*(jax.jit(jaxpr_as_fun(each.jaxpr))(*given) for each in (traced, divided)), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-6, atol=1e-9)


@pytest.mark.slow
def test_scanned_layers_on_stages():
    """A scanned stack runs as a pipeline, with one activation and one cotangent between two stages."""
    fn, args = scanned()
    run = pipelined(fn, args, 2, 4)
    compared(run, args)
    assert [message.backward for stage in run.staged.stages for message in stage.sends if message.kind == "loop"] == [False, True]


def test_each_stage_has_the_rows_of_its_own_layers():
    """Of weights and optimizer state, on its devices, and sends none of them to another stage; the step returns them where they were."""
    fn, args = scanned()
    staged = stages_of(trace(fn, *args), 2, 4)
    graph, divided = staged.traced.graph, staged.divided
    stacked = {k for k, value in enumerate(graph.arguments) if graph.values[value].shape[:1] == (4,)}
    assert set(divided.argument_dims) == stacked and not divided.whole
    for stage in staged.stages:
        own = [stage.traced.graph.values[value].shape for value in stage.traced.graph.arguments]
        assert sum(shape[:1] == (2,) and len(shape) == 3 for shape in own) == len(stacked)
        assert not any(message.shape for message in (*stage.sends, *stage.receives) if message.kind != "loop")
    assert [staged.argument_homes[part] for k in stacked for part in divided.arguments[k]] == [0, 1] * len(stacked)


@pytest.mark.parametrize("n_stages", [2, 4])
def test_stacked_state_that_is_whole_on_one_stage_stays_there(n_stages):
    """The other stages are sent their rows in each step, and what replaces it is where it was, be that the memory of hosts."""
    fn, args = programs.gpt_scan(n_layers=4)
    staged = stages_of(trace(fn, *args, donate_argnums=0), n_stages, 4, rows=())
    homes = {argument: staged.argument_homes[argument] for _, argument in staged.traced.graph.aliases}
    assert homes == {argument: staged.result_homes[result] for result, argument in staged.traced.graph.aliases}


@pytest.mark.slow
def test_stages_may_split_rows_otherwise_than_each_other():
    """Random shardings of each stage: to the user an array has the first stage's, and the results are those of one device."""
    fn, args = scanned()
    run = pipelined(fn, args, 2, 4, mesh={"data": 2, "model": 2}, searcher=3)
    rows = next(each for each in run._rows_in if each and each.wanted[0].spec != each.wanted[1].spec)
    assert rows.stages[0].spec == rows.stages[1].spec
    results = compared(run, args, steps=1)
    for result, argument in run.staged.traced.graph.aliases:
        assert results[result].sharding.device_set == run.in_shardings[argument].device_set
    assert all(rows.latest for rows in run._rows_in if rows)  # the next call takes the new rows as they are


@pytest.mark.parametrize("schedule", ["auto", pytest.param("interleaved", marks=pytest.mark.slow)])
def test_rows_are_sent_to_the_chunks_of_their_layers(schedule):
    """Between steps each part of the devices has neighbouring rows, whatever its chunks; the results are those of one device."""
    fn, args = scanned()
    run = pipelined(fn, args, 2, 4, schedule, n_chunks=2, donated=(0,))
    staged, results = run.staged, compared(run, args)
    assert len(staged.divided.argument_dims) == 6
    for k in staged.divided.argument_dims:
        assert [staged.argument_homes[part] for part in staged.divided.arguments[k]] == [0, 1, 2, 3]
        assert run.in_shardings[k].spec[0] == "stage"
    for result, argument in staged.traced.graph.aliases:
        assert run.in_shardings[argument] == run.out_shardings[result] == results[result].sharding


def factored(params):
    """A step with optimizer state of fewer dimensions than the weights; layers are the second dimension of one of them."""
    optimizer = optax.adafactor(1e-2, min_dim_size_to_factor=8)

    def step(state, x, y):
        def loss(params):
            layers = {"w": params["w"], "v": jnp.moveaxis(params["v"], 1, 0)}
            h, _ = jax.lax.scan(lambda x, p: (x + jnp.tanh(x @ p["w"]) @ p["v"], None), x, layers)
            return jnp.mean((h - y) ** 2)

        value, gradients = jax.value_and_grad(loss)(state[0])
        updates, memory = optimizer.update(gradients, state[1], state[0])
        return (optax.apply_updates(state[0], updates), memory), value

    return step, ((params, jax.eval_shape(optimizer.init, params)), abstract((16, 8)), abstract((16, 8)))


@pytest.mark.slow
def test_rows_are_followed_through_the_program():
    """Layers may be another dimension of a weight, and state may have fewer dimensions; the divided step computes what the step does."""
    fn, args = factored({"w": abstract((4, 8, 16)), "v": abstract((16, 4, 8))})
    traced = trace(fn, *args)
    divided = with_divided_layers(traced, 2, 4)
    dims = {traced.graph.argument_paths[k]: dim for k, dim in divided.argument_dims.items()}
    assert {path: dims.get(path) for path in ("state[0]['w']", "state[0]['v']")} == {"state[0]['w']": 0, "state[0]['v']": 1}
    assert dims["state[1][0].v_row['w']"] == 0 and dims["state[1][0].v_col['w']"] == 0 and len(dims) > 4
    given = [jnp.asarray(x) for x in jax.tree.leaves(concrete(args))]
    parts = [jnp.split(x, 2, divided.argument_dims[k]) if k in divided.argument_dims else [x] for k, x in enumerate(given)]
    found = jax.jit(jaxpr_as_fun(divided.traced.jaxpr))(*[x for each in parts for x in each])
    expected = jax.jit(jaxpr_as_fun(traced.jaxpr))(*given)
    for k, (parts, one) in enumerate(zip(divided.results, expected, strict=True)):
        other = jnp.concatenate([found[part] for part in parts], divided.result_dims[k]) if k in divided.result_dims else found[parts[0]]
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-7)


def test_a_stack_that_stages_cannot_have_in_equal_parts_is_whole():
    """Five layers on two stages; and two stacks of which each stage has one."""
    fn, args = scanned(5)
    staged = stages_of(trace(fn, *args), 2, 4)
    assert not staged.divided.argument_dims and staged.divided.whole

    def loss(params, x, y):
        for weights in params:
            x, _ = jax.lax.scan(lambda x, w: (x + jnp.tanh(x @ w), None), x, weights)
        return jnp.mean((x - y) ** 2)

    fn, args = train_step_of(loss, [abstract((4, 8, 8)), abstract((4, 8, 8))], abstract((16, 8)), abstract((16, 8)))
    staged = stages_of(trace(fn, *args), 2, 4)
    assert not staged.divided.argument_dims
    assert set(staged.argument_homes) == {0, 1}


@pytest.mark.parametrize("layers", [5, 6])
def test_stages_may_have_different_numbers_of_layers(layers):
    """Five and six equal layers on four stages: each has one or two."""
    fn, args = scanned(layers)
    stages = stages_of(trace(fn, *args), 4, 4).stages
    products = [sum(op.primitive == "dot_general" for op in stage.traced.graph.walk()) for stage in stages]
    assert max(products) <= 2 * min(products) and sum(products) == 6 * layers


@pytest.mark.slow
def test_unequal_stages_compute_what_the_step_computes():
    """Three layers on two stages."""
    fn, args = scanned(3)
    compared(pipelined(fn, args, 2, 4), args)


@pytest.mark.slow
@pytest.mark.parametrize("n_stages", [2, 4])
@pytest.mark.parametrize("remat", [False, True])
def test_scanned_transformers_on_stages(n_stages, remat):
    """A scanned GPT, also one that recomputes its blocks."""
    fn, args = programs.gpt_scan(n_layers=4, remat=remat)
    compared(pipelined(fn, args, n_stages, 4, "zero_bubble"), args)


def test_a_scan_over_time_is_not_cut():
    """Its steps share their weights: one such loop is one operation, and more stages than operations are refused with the numbers."""

    def loss(w, x, y):
        h, _ = jax.lax.scan(lambda h, x: (jnp.tanh(h @ w + x), None), jnp.zeros((16, 8)), jnp.moveaxis(x, 1, 0))
        return jnp.mean((h - y) ** 2)

    fn, args = train_step_of(loss, abstract((8, 8)), abstract((16, 5, 8)), abstract((16, 8)))
    with pytest.raises(PipelineError, match="got 2 stages for 1 operations with products"):
        stages_of(trace(fn, *args), 2, 4)
    with pytest.raises(PipelineError, match="got 0"):
        stages_of(trace(fn, *args), 0, 4)
