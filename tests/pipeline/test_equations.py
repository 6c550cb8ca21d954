"""What a program reads of an array is what it takes to hand it on."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import jaxpr_as_fun

from autoshard.pipeline.equations import as_they_are, handed_dtypes

BF16, F32 = jnp.bfloat16, jnp.float32


def layer(x, w):
    return jnp.tanh(x @ w.astype(BF16)), None


def branches(w):
    return jax.lax.cond(w[0, 0, 0] > 0, lambda w: w.astype(BF16), lambda w: -w.astype(BF16), w)


X = jnp.ones((4, 4), BF16)
CASES = {
    "a cast": (lambda w: w.astype(BF16) * 2, BF16),
    "rearranged and cast": (lambda w: jnp.swapaxes(w[1:], 1, 2).reshape(2, 16).astype(BF16), BF16),
    "cast in a loop": (lambda w: jax.lax.scan(layer, X, w)[0], BF16),
    "cast in a loop and recomputed": (lambda w: jax.lax.scan(jax.checkpoint(layer), X, w)[0], BF16),
    "cast and read": (lambda w: w.astype(BF16) * w.sum().astype(BF16), F32),
    "cast in one of two readers": (lambda w: (jax.lax.scan(layer, X, w)[0], w + 1), F32),
    "cast to two types": (lambda w: (w.astype(BF16), w.astype(jnp.float16)), F32),
    "a result": (lambda w: (w.astype(BF16), w), F32),
    "rearranged, a result": (lambda w: jnp.swapaxes(w, 0, 1), F32),
    "cast to integers": (lambda w: w.astype(jnp.int8), F32),
    "carried by a loop": (lambda w: jax.lax.fori_loop(0, 3, lambda _, w: w.astype(BF16).astype(F32) * 2, w).astype(BF16), F32),
    "a branch's choice and operand": (branches, F32),
    "both branches' operand": (lambda w: jax.lax.cond(X[0, 0] > 0, lambda w: w.astype(BF16), lambda w: -w.astype(BF16), w), BF16),
}


@pytest.mark.sample(3)
@pytest.mark.parametrize("name", CASES)
def test_arrays_are_handed_on_as_they_are_read(name):
    """In the narrower float that every reader casts them to, and then the program's numbers are the same to the last bit."""
    function, expected = CASES[name]
    w = jax.random.normal(jax.random.key(0), (3, 4, 4))
    closed = jax.make_jaxpr(function)(w)
    (dtype,) = handed_dtypes(closed.jaxpr.invars, closed.jaxpr.eqns, as_they_are(closed.jaxpr.outvars))
    assert dtype == expected
    run = jaxpr_as_fun(closed)
    for one, other in zip(run(w), run(w.astype(dtype).astype(F32)), strict=True):
        np.testing.assert_array_equal(np.asarray(one, np.float32), np.asarray(other, np.float32))
