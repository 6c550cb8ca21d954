"""NumPyro: stochastic variational inference, data split over devices.

What changes for you: `svi.update` in `jax.jit` becomes `svi.update` in
`autoshard.parallelize`, whose arguments are the state and the data. A plate
over the data is a dimension as any other, so `chain_method="parallel"`, which
runs whole chains on devices, is not needed for it.
"""

import jax
import jax.numpy as jnp
import numpyro
import numpyro.distributions as dist
from numpyro.infer import SVI, Trace_ELBO
from numpyro.infer.autoguide import AutoNormal

import autoshard


def model(x, y):
    """Bayesian logistic regression with a scale for each weight."""
    with numpyro.plate("features", x.shape[1]):
        scale = numpyro.sample("scale", dist.HalfCauchy(1.0))
        weights = numpyro.sample("weights", dist.Normal(0.0, scale))
    bias = numpyro.sample("bias", dist.Normal(0.0, 1.0))
    with numpyro.plate("data", x.shape[0]):
        logits = x @ weights + bias
        numpyro.sample("y", dist.Bernoulli(logits=logits), obs=y)


guide = AutoNormal(model)
svi = SVI(model, guide, numpyro.optim.Adam(1e-2), Trace_ELBO())


def step(state, x, y):
    return svi.update(state, x, y)


def make():
    x = jax.random.normal(jax.random.key(0), (512, 16))
    y = (x[:, 0] - 2 * x[:, 1] > 0).astype(jnp.float32)
    return svi.init(jax.random.key(1), x, y), x, y


sharded = autoshard.parallelize(step, cluster="cpu:8", batch=("x", "y"))
state, x, y = make()
for _ in range(3):
    state, loss = sharded(state, x, y)
    print(loss)
print(guide.median(svi.get_params(state))["weights"][:3])
