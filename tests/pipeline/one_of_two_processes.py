"""One of two processes: ``python one_of_two_processes.py PORT STAGES NUMBER``; see test_sending.py."""

import os
import sys

os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={3 if sys.argv[2] == '3' else 2}"

import jax
import jax.numpy as jnp
import numpy as np

import autoshard

stages, number = int(sys.argv[2]), int(sys.argv[3])
n_devices = 3 if stages == 3 else 2
autoshard.distributed.initialize(f"localhost:{sys.argv[1]}", 2, number)
WIDTH, LAYERS = 12, 2 * n_devices


def init(key):
    keys = jax.random.split(key, LAYERS)
    return {"w": [jax.random.normal(k, (WIDTH, WIDTH)) / 4 for k in keys], "m": [jnp.zeros((WIDTH, WIDTH))] * LAYERS, "step": jnp.int32(0)}


def train_step(state, batch, key):
    """Layers with dropout, momentum and clipping by the norm of all gradients, which all stages have a part of."""

    def loss(layers):
        x = batch["x"]
        for k, w in enumerate(layers):
            kept = jax.random.bernoulli(jax.random.fold_in(key, k), 0.9, x.shape)
            x = x + jnp.tanh(jnp.where(kept, x, 0.0) @ w)
        return jnp.mean((x - batch.get("y", jnp.roll(batch["x"], 1, -1))) ** 2)

    value, gradients = jax.value_and_grad(loss)(state["w"])
    norm = jnp.sqrt(sum(jnp.sum(g**2) for g in gradients))
    moments = [0.9 * m + g / jnp.maximum(norm, 0.1) for m, g in zip(state["m"], gradients, strict=True)]
    weights = [w - 0.01 * m for w, m in zip(state["w"], moments, strict=True)]
    return {"w": weights, "m": moments, "step": state["step"] + 1}, {"loss": value, "norm": norm}


def stacked_init(key):
    w = jax.random.normal(key, (LAYERS, WIDTH, WIDTH)) / 4
    return {"w": w, "m": jnp.zeros_like(w), "step": jnp.int32(0)}


def scanned_step(state, batch, key):
    """The same with its layers scanned: each stage has the rows of its own layers."""

    def layer(x, given):
        k, w = given
        kept = jax.random.bernoulli(jax.random.fold_in(key, k), 0.9, x.shape)
        return x + jnp.tanh(jnp.where(kept, x, 0.0) @ w), None

    def loss(layers):
        x, _ = jax.lax.scan(layer, batch["x"], (jnp.arange(LAYERS), layers))
        return jnp.mean((x - batch["y"]) ** 2)

    value, gradients = jax.value_and_grad(loss)(state["w"])
    norm = jnp.sqrt(jnp.sum(gradients**2))
    moments = 0.9 * state["m"] + gradients / jnp.maximum(norm, 0.1)
    return {"w": state["w"] - 0.01 * moments, "m": moments, "step": state["step"] + 1}, {"loss": value, "norm": norm}


def sharp_step(state, batch, key):
    """Two passes: the gradient where the normalised first one leads."""

    def loss(layers):
        x = batch["x"]
        for w in layers:
            x = x + jnp.tanh(x @ w)
        return jnp.mean((x - batch["y"]) ** 2)

    first = jax.grad(loss)(state["w"])
    norm = jnp.sqrt(sum(jnp.sum(g**2) for g in first))
    value, gradients = jax.value_and_grad(loss)([w + 0.05 * g / norm for w, g in zip(state["w"], first, strict=True)])
    weights = [w - 0.1 * g for w, g in zip(state["w"], gradients, strict=True)]
    return {"w": weights, "m": state["m"], "step": state["step"] + 1}, {"loss": value}


def compared(stages, microbatches, schedule, mesh, order=None, has_labels=True, train_step=train_step, init=init):
    """A pipeline's state and losses of two steps are those of one device; each process starts the tasks of its own stages alone.

    Batches come from `Strategy.data`: the first stage reads some arrays of it, the last one others, and a process perhaps none.
    """
    devices = jax.devices() if order is None else [jax.devices()[k] for k in order]
    options = {"cluster": f"cpu:{2 * n_devices}", "stages": stages, "microbatches": microbatches, "schedule": schedule, "mesh": mesh}
    key = jax.random.key(0)
    xs = np.random.default_rng(0).normal(size=(2, 24, WIDTH)).astype(np.float32)
    batches = [{"x": x} | ({"y": 1 - x[::-1]} if has_labels else {}) for x in xs]
    batch = batches[0]
    abstract = jax.eval_shape(init, key)
    strategy = autoshard.search(train_step, abstract, batch, key, donate_argnums=0, searcher="data_parallel", **options)
    step, one = strategy.apply(train_step, devices), jax.jit(train_step)
    state, expected = strategy.init(init, key, devices=devices), init(key)
    for given, batch in zip(strategy.data(batches, devices=devices), batches, strict=True):
        state, metrics = step(state, given, key)
        expected, wanted = one(expected, batch, key)
        for name in wanted:
            np.testing.assert_allclose(metrics[name], wanted[name], rtol=2e-5)
    for here, there in zip(jax.tree.leaves(state), jax.tree.leaves(expected), strict=True):
        assert here.shape == there.shape
        for shard in here.addressable_shards:
            np.testing.assert_allclose(shard.data, np.asarray(there)[shard.index], atol=2e-5)
    size = len(devices) // stages
    own = {stage for stage in range(stages) if any(d.process_index == number for d in devices[stage * size : (stage + 1) * size])}
    assert {stage for stage, _ in step.executed} == own
    print(schedule, stages, "as on one device", flush=True)


if stages == 2:
    compared(2, 2, "1f1b", {"data": 2})
    compared(2, 2, "1f1b", {"data": 2}, order=(0, 2, 1, 3))  # both stages have devices of both processes
    compared(2, 2, "gpipe", {"data": 2}, has_labels=False)
    for order in (None, (0, 2, 1, 3)):
        compared(2, 2, "1f1b", {"data": 2}, order, train_step=scanned_step, init=stacked_init)
        compared(2, 2, "1f1b", {"data": 2}, order, train_step=sharp_step)
elif stages == 4:
    compared(4, 4, "zero_bubble", {"data": 1})
else:
    compared(3, 3, "1f1b", {"data": 2})  # the second stage has
    compared(3, 3, "interleaved", {"data": 1, "model": 2})
print("done")
