"""The mesh that `jax.set_mesh` has in force, whose axes are Explicit unless somebody says otherwise."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import autoshard


def train_step(params, x):
    value, gradients = jax.value_and_grad(lambda params: jnp.mean(jnp.tanh(x @ params["w"]) ** 2))(params)
    return jax.tree.map(lambda p, g: p - g, params, gradients), value


@pytest.fixture(params=[AxisType.Explicit, AxisType.Auto], ids=str)
def mesh(request):
    return jax.make_mesh((8,), ("data",), axis_types=(request.param,))


OPTIONS = {"cluster": "cpu:8", "mesh": {"x": 4, "y": 2}, "searcher": "fully_sharded"}


def test_a_step_runs_under_any_mesh(mesh):
    """Searched, decorated, applied, lowered and verified as without the mesh; a loss can be added up under it."""
    rng = np.random.default_rng(0)
    params, x = {"w": rng.normal(size=(16, 16)).astype(np.float32)}, rng.normal(size=(32, 16)).astype(np.float32)
    wanted, losses = params, []
    for _ in range(3):
        wanted, loss = jax.jit(train_step)(wanted, x)
        losses.append(loss)
    with jax.set_mesh(mesh):
        here, batch = jax.tree.map(jnp.asarray, params), jnp.asarray(x)
        strategy = autoshard.search(train_step, here, batch, **OPTIONS)
        assert autoshard.verify(strategy, train_step, here, batch).exact
        applied = strategy.apply(train_step)
        applied.lower(here, batch).compile()
        decorated = autoshard.parallelize(train_step, progress=False, **OPTIONS)
        for step in (applied, decorated):
            state = strategy.init(lambda: jax.tree.map(jnp.asarray, params))
            total = jnp.zeros(())
            for _ in range(3):
                state, loss = step(state, batch)
                total = total + loss
            np.testing.assert_allclose(total, sum(losses), rtol=1e-5)
            np.testing.assert_allclose(state["w"], wanted["w"], rtol=1e-5, atol=1e-6)
    (_, x_there), outside = strategy.shard(params, x), applied(*strategy.shard(params, x))[1]
    assert outside.sharding.mesh == x_there.sharding.mesh  # the mesh in force is looked for in each call


def test_a_step_is_looked_through_once_under_a_mesh(mesh, monkeypatch):
    """From the second call on it is the jitted function."""
    seen = []
    anew = autoshard.run.step.Step.anew
    monkeypatch.setattr(autoshard.run.step.Step, "anew", lambda *args: seen.append(0) or anew(*args))
    with jax.set_mesh(mesh):
        state, x = {"w": jnp.ones((16, 16))}, jnp.ones((32, 16))
        step = autoshard.search(train_step, state, x, **OPTIONS).apply(train_step)
        for _ in range(3):
            state, _ = step(state, x)
    assert len(seen) == 1


def test_constraints_are_of_the_mesh_in_force(mesh):
    """A bare spec names axes of the user's mesh, which is then the strategy's."""
    with jax.set_mesh(mesh):
        strategy = autoshard.search(lambda x: jax.lax.with_sharding_constraint(x + 1, P("data")), jnp.ones((16, 4)), cluster="cpu:8")
    assert strategy.mesh_shape == {"data": 8}
