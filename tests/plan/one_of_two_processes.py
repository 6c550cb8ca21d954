"""One of two processes with two CPU devices each: ``python one_of_two_processes.py PORT NUMBER``; see test_processes.py."""

import os
import sys

os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=2"

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import autoshard

number = int(sys.argv[2])
jax.config.update("jax_cpu_collectives_implementation", "gloo")
jax.distributed.initialize(f"localhost:{sys.argv[1]}", 2, number)
OPTIONS = {"cluster": "cpu:4", "mesh": {"data": 4}}


def train_step(w, x, rate, key):
    kept = jax.random.bernoulli(key, 0.5, x.shape)
    value, gradient = jax.value_and_grad(lambda w: jnp.mean(((x * kept) @ w - 1) ** 2))(w)
    return w - rate * gradient, value


def refused(call, *pieces):
    """Whether a call is refused with a message that has these pieces, in both processes."""
    try:
        call()
    except autoshard.StrategyError as error:
        assert all(piece in str(error) for piece in pieces), error
        return
    raise AssertionError(f"{pieces} was accepted")


w, x, key = np.full((8, 8), 0.1, np.float32), np.linspace(-1, 1, 128, dtype=np.float32).reshape(16, 8), jax.random.key(7)
wanted = jax.jit(train_step)(w, x, 0.1, key)
args = w, x, 0.1, key

# Typed keys, numbers and arrays of the host are put on all devices, whoever puts them.
for searcher in ("data_parallel", "fully_sharded"):
    strategy = autoshard.search(train_step, *args, searcher=searcher, **OPTIONS)
    step, state = strategy.apply(train_step), strategy.init(lambda key: jnp.full((8, 8), 0.1) + 0 * jax.random.normal(key), key)
    for given in (args, strategy.shard(*args), (state, x, 0.1, key)):
        for _ in range(2):
            np.testing.assert_allclose(step(*given)[1], wanted[1], rtol=1e-5)

# What differs between processes is refused, in the first call and later, and in `shard` and `init`; which argument it is is said.
own = x + number
refused(lambda: step(w, own, 0.1, key), "x differs", "process 1", "make_array_from_process_local_data")
refused(lambda: strategy.apply(train_step)(w, jnp.asarray(own), 0.1, key), "x differs")
refused(lambda: step(w, x, 0.1 + number, key), "rate differs")
refused(lambda: step(w, x, 0.1, jax.random.key(number)), "key differs")
refused(lambda: strategy.shard(w + number), "w differs")
refused(lambda: strategy.init(lambda key: jax.random.normal(key, (8, 8)), jax.random.key(number)), "args[0] differs")

# Each process's part makes a global array, whatever the strategy does with it.
half = x[8 * number : 8 * number + 8]
for sharding in (strategy.shardings(1), jax.NamedSharding(strategy.mesh, jax.P("data"))):
    if not sharding.is_fully_replicated:
        batch = jax.make_array_from_process_local_data(sharding, half, x.shape)
        np.testing.assert_allclose(step(w, batch, 0.1, key)[1], wanted[1], rtol=1e-5)


class Model(nnx.Module):
    def __init__(self):
        self.linear, self.dropout = nnx.Linear(8, 8, rngs=nnx.Rngs(0)), nnx.Dropout(0.5, rngs=nnx.Rngs(1))

    @autoshard.parallelize(progress=False, searcher="data_parallel", **OPTIONS)
    def __call__(self, x):
        return jnp.sum(self.dropout(self.linear(x)))


model, alike = Model(), Model()
plain = nnx.jit(lambda model, x: jnp.sum(model.dropout(model.linear(x))))
for _ in range(2):
    np.testing.assert_allclose(model(x), plain(alike, x), rtol=1e-4)
print("done")
