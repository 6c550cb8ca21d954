"""Brax: PPO, environments and learner in one step.

What changes for you: the `jax.pmap` of Brax's training loop, and its `pmean`s,
become one `autoshard.parallelize`. States of environments are examples, not
parameters: `batch=` says so, and they are split as a batch is.
"""

import functools

import jax
import optax
from brax import envs
from brax.training import acting
from brax.training.agents.ppo import losses, networks

import autoshard

ENVIRONMENTS, LENGTH = 64, 5
env = envs.training.wrap(envs.get_environment("fast"), episode_length=100)
nets = networks.make_ppo_networks(env.observation_size, env.action_size)
policy = networks.make_inference_fn(nets)
optimizer = optax.adam(1e-3)
ppo = functools.partial(
    losses.compute_ppo_loss,
    ppo_network=nets,
    normalize_advantage=False,
    entropy_cost=1e-2,
)


def step(state, environments, key):
    params, moments = state
    act, learn = jax.random.split(key)
    chosen = policy((None, params.policy, params.value))
    environments, data = acting.generate_unroll(
        env, environments, chosen, act, LENGTH, extra_fields=("truncation",)
    )
    data = jax.tree.map(lambda x: x.swapaxes(0, 1), data)  # examples first

    def loss(params):
        return ppo(params, None, data, learn)[0]

    value, gradients = jax.value_and_grad(loss)(params)
    updates, moments = optimizer.update(gradients, moments)
    return (optax.apply_updates(params, updates), moments), environments, value


def make():
    one, two, three = jax.random.split(jax.random.PRNGKey(0), 3)
    params = losses.PPONetworkParams(
        policy=nets.policy_network.init(one), value=nets.value_network.init(two)
    )
    environments = jax.jit(env.reset)(jax.random.split(three, ENVIRONMENTS))
    # Numbers without weak types, as the step returns them: one search.
    environments = jax.tree.map(lambda x: x.astype(x.dtype), environments)
    return (params, optimizer.init(params)), environments, jax.random.PRNGKey(1)


sharded = autoshard.parallelize(step, cluster="cpu:8", batch="environments*")
state, environments, key = make()
for _ in range(3):
    key, now = jax.random.split(key)
    state, environments, loss = sharded(state, environments, now)
    print(loss)
