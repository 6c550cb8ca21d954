"""Diffrax: a neural differential equation, trained through its solver.

What changes for you: `eqx.filter_jit` becomes `autoshard.parallelize`. The
solver's loop and its adjoint are planned as any loop; with one adaptive step
size for each example (a `vmap` of the solve) the loop ends when the last does.
"""

import diffrax
import equinox as eqx
import jax
import jax.numpy as jnp
import optax

import autoshard

optimizer = optax.adam(3e-3)
TIMES = jnp.linspace(0.0, 1.0, 8)


class Field(eqx.Module):
    network: eqx.nn.MLP

    def __call__(self, t, y, args):
        return self.network(y)


def solve(field, start):
    return diffrax.diffeqsolve(
        diffrax.ODETerm(field),
        diffrax.Tsit5(),
        t0=0.0,
        t1=1.0,
        dt0=0.1,
        y0=start,
        saveat=diffrax.SaveAt(ts=TIMES),
        stepsize_controller=diffrax.PIDController(rtol=1e-3, atol=1e-5),
        max_steps=64,
    ).ys


def step(field, moments, paths):
    @eqx.filter_value_and_grad
    def loss(field):
        found = jax.vmap(lambda path: solve(field, path[0]))(paths)
        return jnp.mean((found - paths) ** 2)

    value, gradients = loss(field)
    updates, moments = optimizer.update(gradients, moments)
    return eqx.apply_updates(field, updates), moments, value


def make():
    key = jax.random.key(0)
    field = Field(eqx.nn.MLP(2, 2, 64, 2, activation=jnp.tanh, key=key))
    moments = optimizer.init(eqx.filter(field, eqx.is_inexact_array))
    angle = jnp.linspace(0, 6, 64)[:, None] + 2 * TIMES
    return field, moments, jnp.stack([jnp.cos(angle), jnp.sin(angle)], -1)


sharded = autoshard.parallelize(step, cluster="cpu:8")
field, moments, paths = make()
for _ in range(3):
    field, moments, loss = sharded(field, moments, paths)
    print(loss)
