"""A state that moves from one strategy's layout to another's, with the fewest bytes."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import permutations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from strategy_records import PIPELINED

import autoshard
from autoshard.checkpoint import reshard_plan
from autoshard.checkpoint.shards import Shards
from autoshard.cli.commands import run as main
from autoshard.errors import CheckpointError

SPECS = {
    "rows": {"state['w']": jax.P("a", "b"), "state['v']": jax.P("b")},
    "columns": {"state['w']": jax.P("b", "a"), "state['v']": jax.P(("b", "a"))},
    "whole": {},
}


def step(state, x):
    y = jnp.tanh(x @ state["w"])
    return {"w": state["w"] + x.T @ y, "v": state["v"] + y.sum(0)}


def state():
    return {"w": jnp.arange(64.0).reshape(8, 8), "v": jnp.arange(8.0)}


def strategy(specs, cluster="cpu:8", mesh=None):
    """The step with a sharding of its state."""
    mesh = {"a": 2, "b": 4} if mesh is None else mesh
    return autoshard.evaluate(step, state(), jnp.ones((4, 8)), cluster=cluster, mesh=mesh, in_specs=SPECS[specs])


def bytes_by_hand(before, after, order):
    """What is there, and what is not, where places of the new strategy are taken in an order; element by element, from JAX's shardings."""
    kept = wanted = 0
    for name, x in state().items():
        old, new = before.shardings(state())[name], after.shardings(state(), [jax.devices()[k] for k in order])[name]
        had = {device: np.zeros(x.shape, bool) for device in jax.devices()}
        for device, index in old.devices_indices_map(x.shape).items():
            had[device][index] = True
        for device, index in new.devices_indices_map(x.shape).items():
            kept += 4 * int(had[device][index].sum())
            wanted += 4 * had[device][index].size
    return kept, wanted - kept


@pytest.mark.sample(4)
@pytest.mark.parametrize("after", ["cpu:8", "cpu:4", "cpu:2"])
@pytest.mark.parametrize("specs", [("rows", "columns"), ("columns", "rows"), ("rows", "whole"), ("whole", "rows")])
def test_bytes_are_those_of_shardings_and_least(specs, after):
    """Of all orders of the devices none keeps more; fewer devices, more of each."""
    n = int(after.partition(":")[2])
    old, new = strategy(specs[0]), strategy(specs[1], after, {"a": 2, "b": n // 2})
    plan = reshard_plan(old, new)
    assert (plan.kept_bytes, plan.moved_bytes) == bytes_by_hand(old, new, plan.order)
    if n <= 4:
        assert plan.kept_bytes == max(bytes_by_hand(old, new, order)[0] for order in permutations(range(n)))


def test_devices_take_the_places_whose_parts_they_have():
    """Nothing moves where meshes differ in the order of their devices alone."""
    old, new = strategy("rows"), strategy("rows", mesh={"b": 4, "a": 2})
    plan = reshard_plan(old, new)
    assert plan.moved_bytes == plan.seconds == 0 and plan.order != tuple(range(8))
    assert bytes_by_hand(old, new, range(8))[1] > 0


def test_the_state_moves_and_trains_on():
    """In memory, to fewer devices in the plan's order; results are those of before."""
    old, new = strategy("rows"), strategy("columns", "cpu:4", {"a": 2, "b": 2})
    plan, x = reshard_plan(old, new), jnp.ones((4, 8))
    (placed,) = old.shard(state())
    moved = plan.run(placed)
    devices = plan.devices()
    assert jax.tree.all(jax.tree.map(lambda x, s: x.sharding == s, moved, new.shardings(state(), devices)))
    after = new.apply(step, devices=devices)(moved, x)
    jax.tree.map(np.testing.assert_allclose, after, jax.tree.map(np.asarray, old.apply(step)(placed, x)))


def test_a_trainers_parameters_go_to_a_sampler():
    """By their path there, in another type."""
    old = strategy("rows")
    args = state()["w"].astype(jnp.bfloat16), jnp.ones((4, 8), jnp.bfloat16)
    sample = autoshard.evaluate(lambda w, x: x @ w, *args, cluster="cpu:8", mesh={"m": 8}, in_specs={"w": jax.P("m")})
    plan = reshard_plan(old, sample, part="state['w']")
    moved = plan.run(old.shard(state())[0]["w"])
    assert moved.dtype == jnp.bfloat16 and moved.sharding == sample.shardings(0, plan.devices())
    assert plan.kept_bytes + plan.moved_bytes == 64 * 2
    with pytest.raises(CheckpointError, match="path of the parameters"):
        reshard_plan(old, sample, part="state")


def test_links_and_lost_devices():
    """What differs in hosts goes over their network; what is on lost devices alone is said, and not run."""
    old, new = strategy("rows", "h100:4x2"), strategy("whole", "h100:4x2")
    plan = reshard_plan(old, new)
    sent = [(each.link, each.bytes) for each in plan.transfers if each.paths == ("state['w']",)]
    assert sorted(sent) == 8 * 3 * [("links", 32.0)] + 8 * 4 * [("network", 32.0)]
    assert plan.seconds == pytest.approx(plan.bytes_by_link["network"] / 8 / 48e9, rel=0.5)
    lost = reshard_plan(strategy("rows"), strategy("whole", "cpu:4", {"a": 4}), devices=[0, 1, 2, 3], lost=[4, 5, 6, 7])
    assert lost.missing == ("state['w']",) and "restored from a checkpoint" in str(lost)
    with pytest.raises(CheckpointError, match="from a checkpoint"):
        lost.run(state())
    with pytest.raises(CheckpointError, match="0 to 7"):
        reshard_plan(old, new, devices=[9] * 8)


def test_the_command_line_prints_the_plan(tmp_path, capsys):
    """Of saved strategies."""
    for name in ("rows", "columns"):
        strategy(name).save(tmp_path / f"{name}.json")
    assert main(["reshard", str(tmp_path / "rows.json"), str(tmp_path / "columns.json"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["moved_bytes"] == reshard_plan(strategy("rows"), strategy("columns")).moved_bytes


def stacked():
    """A state of which a pipeline's stages have rows, and a batch."""
    return {"layers": jnp.arange(4 * 64.0).reshape(4, 8, 8) / 256, "last": jnp.eye(8)}, jnp.ones((16, 8))


def deep_step(state, x):
    def loss(state):
        y, _ = jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, state["layers"])
        return jnp.mean((y @ state["last"]) ** 2)

    value, gradients = jax.value_and_grad(loss)(state)
    return jax.tree.map(lambda p, g: p - 0.1 * g, state, gradients), value


def test_stages_move_too():
    """To and from a pipeline, whose arrays are on a stage's devices, or some rows of each on all stages'."""
    options = {"cluster": "cpu:8", "searcher": "data_parallel", "confirm": False}
    flat = autoshard.search(deep_step, *stacked(), mesh={"data": 8}, microbatches=None, **options)
    staged = autoshard.search(deep_step, *stacked(), mesh={"data": 4}, stages=2, microbatches=2, **options)
    plan, back = reshard_plan(flat, staged), reshard_plan(staged, flat)
    before, after = flat.shard(*stacked())[0], staged.shard(*stacked())[0]
    moved = plan.run(before)
    jax.tree.map(np.testing.assert_array_equal, moved, after)
    shardings = staged.shardings(0, plan.devices())
    assert jax.tree.all(jax.tree.map(lambda x, s: x.sharding == s, moved, shardings))
    assert plan.moved_bytes == 0 and plan.kept_bytes == held(after)
    assert back.kept_bytes + back.moved_bytes == held(before)


@pytest.mark.parametrize(("placement", "devices"), [("loop", {4, 5, 6, 7}), ("v", {0, 1, 2, 3})])
def test_a_leaf_is_on_the_part_that_has_its_stage(placement, devices):
    """The last of four stages is on the second part of the devices, or on the first if chunks go back."""
    pipeline = PIPELINED.pipeline
    pipeline = replace(pipeline, chunks=2, cut=(1, 2, 3, 4), stages=pipeline.stages * 2, argument_stages=(3, 3), placement=placement)
    found = Shards.of(replace(PIPELINED, pipeline=pipeline), 0)
    assert {device for device, part in enumerate(found.chunks) if part >= 0} == devices


def held(tree) -> int:
    """The bytes that all devices hold of some arrays."""
    return sum(shard.data.nbytes for x in jax.tree.leaves(tree) for shard in x.addressable_shards)
