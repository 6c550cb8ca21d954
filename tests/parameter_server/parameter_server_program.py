"""A small regression for the tests of the parameter server: functions of a module that workers import by its name."""

import jax
import jax.numpy as jnp
import numpy as np
import optax

STEPS = 24
OPTIMIZER = optax.adam(1e-2)
TABLE_ROWS, WIDTH = 100_000, 64


def init_params():
    a, b = jax.random.split(jax.random.key(0))
    return {"a": jax.random.normal(a, (8, 32)), "b": jax.random.normal(b, (32, 3))}


def loss(params, batch):
    return jnp.mean((jnp.tanh(batch["x"] @ params["a"]) @ params["b"] - batch["y"]) ** 2)


def batches(worker, workers, step):
    x = np.random.default_rng(step).normal(size=(16, 8)).astype(np.float32)
    return {"x": x[worker::workers], "y": 2 * x[worker::workers, :3]}


def one_process(loss, params, optimizer, batches, steps):
    """Parameters and losses ``(steps,)`` of the same training in this process, with whole batches."""
    gradients_fn, update = jax.jit(jax.value_and_grad(loss)), jax.jit(optimizer.update)
    state, losses = optimizer.init(params), []
    for step in range(steps):
        value, gradients = gradients_fn(params, batches(0, 1, step))
        updates, state = update(gradients, state, params)
        params = optax.apply_updates(params, updates)
        losses.append(float(value))
    return params, np.array(losses)


# -- with a table of embeddings, some of whose rows are read and masked ----------------------------------------------------


def init_rows(ids):
    return np.sin(np.outer(ids, np.arange(1, WIDTH + 1))).astype(np.float32)


def sparse_batches(worker, workers, step):
    generator = np.random.default_rng(step)
    often = generator.integers(0, 200, (16, 4))  # ids that come again, and ids that do not
    seldom = generator.integers(0, TABLE_ROWS, (16, 30))
    ids = np.concatenate([often, seldom], axis=1)[worker::workers]
    mask = np.arange(ids.shape[1], dtype=np.float32)[:, None] > 1
    return {"ids": ids, "mask": mask.astype(np.float32), "y": np.ones((len(ids), 3), np.float32)}


def sparse_init():
    return {"w": jnp.linspace(-1.0, 1.0, WIDTH * 3).reshape(WIDTH, 3)}


def sparse_loss(params, rows, batch):
    return jnp.mean(((rows["words"] * batch["mask"]).sum(axis=1) @ params["w"] - batch["y"]) ** 2)
