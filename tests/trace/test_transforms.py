"""Fourier transforms over several dimensions, traced as transforms of single ones."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import jaxpr_as_fun

from autoshard.trace import trace

fft = jnp.fft
RANDOM = np.random.default_rng(0)
COMPLEX = (RANDOM.standard_normal((4, 6, 5, 3)) + 1j * RANDOM.standard_normal((4, 6, 5, 3))).astype(np.complex64)

TRANSFORMS = {
    "all": (fft.fftn, COMPLEX, [3, 5, 6, 4]),
    "back": (fft.ifftn, COMPLEX[0], [3, 5, 6]),
    "from real numbers": (fft.rfftn, COMPLEX[0].real, [3, 5, 6]),
    "to real numbers": (fft.irfftn, COMPLEX[0], [6, 5, 4]),
    "to real numbers of odd length": (lambda x: fft.irfftn(x, (6, 5, 5)), COMPLEX[0], [6, 5, 5]),
    "of a batch": (fft.fft2, COMPLEX, [3, 5]),
    "mapped": (jax.vmap(jax.vmap(fft.rfft2)), COMPLEX.real, [3, 5]),
    "gradient": (jax.grad(lambda x: (fft.rfft2(x).real ** 3).sum()), COMPLEX[0, 0].real, [3, 5, 5, 3]),
    "in a loop": (lambda x: jax.lax.scan(lambda x, _: (fft.ifft2(x), None), x, None, 2)[0], COMPLEX[0, 0], [3, 5]),
}


@pytest.mark.parametrize("name", TRANSFORMS)
def test_each_dimension_is_transformed_by_itself_with_the_same_numbers(name):
    """The traced program has one transform of each dimension, in an order in which real numbers are first or last."""
    fn, x, lengths = TRANSFORMS[name]
    traced = trace(fn, x)
    transforms = [op.params["fft_lengths"] for op in traced.graph.walk() if op.primitive == "fft"]
    assert sorted(transforms) == sorted((length,) for length in lengths)
    (got,) = jaxpr_as_fun(traced.jaxpr)(x)
    np.testing.assert_allclose(got, fn(x), rtol=1e-5, atol=1e-4)
