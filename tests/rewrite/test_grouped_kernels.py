"""Megablox's grouped products are packed as those of `jax.lax.ragged_dot` are, with equal results whatever the loads."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas.ops.tpu.megablox import gmm
from jax.extend.core import jaxpr_as_fun
from programs import abstract, concrete

from autoshard.ir.rewrites import Microbatches, PackedExperts
from autoshard.rewrite import applied, rewritten
from autoshard.rewrite.grouped_kernels import with_grouped_products
from autoshard.trace import trace

EXPERTS, ROWS, WIDTH, HIDDEN, TILE = 4, 16, 8, 24, 8
product = partial(gmm, preferred_element_type=jnp.float32, tiling=(TILE, TILE, TILE), interpret=True)


def layer(p, x, expert, up=product):
    order, sizes = jnp.argsort(expert), jnp.bincount(expert, length=EXPERTS).astype(jnp.int32)
    hidden = jax.nn.gelu(up(x[order], p["up"], sizes))
    return x + jnp.zeros_like(x).at[order].set(product(hidden, p["down"], sizes))


def scanned(p, x, expert, layer=layer):
    """Layers of a scan, in which what is constant is computed before the loop."""
    return jax.lax.scan(lambda x, k: (layer(p, x, (expert + k) % EXPERTS), None), x, jnp.arange(2))[0]


def computed_again(p, x, expert):
    return scanned(p, x, expert, jax.checkpoint(layer))


def step_of(function):
    def step(p, x, expert):
        return jax.value_and_grad(lambda p, x: jnp.sum(jnp.sin(function(p, x, expert))), argnums=(0, 1))(p, x)

    shapes = (EXPERTS, WIDTH, HIDDEN), (EXPERTS, HIDDEN, WIDTH), (ROWS, WIDTH)
    up, down, x = concrete([abstract(shape) for shape in shapes], scale=1.0)
    return step, ({"up": up, "down": down}, x, jnp.arange(ROWS) % EXPERTS)


def primitives(traced):
    return {op.primitive for op in traced.graph.walk()}


@pytest.mark.sample(1)
@pytest.mark.parametrize("function", (layer, scanned, computed_again), ids=lambda function: function.__name__)
def test_products_of_kernels_are_packed(function):
    step, args = step_of(function)
    traced = trace(step, *args)
    assert "pallas_call" in primitives(traced)
    assert not {"pallas_call", "ragged_dot_general"} & primitives(applied(PackedExperts(1.0), traced))


@pytest.mark.sample(1)
@pytest.mark.parametrize("flipped", (False, True))
def test_products_and_gradients_are_those_of_the_kernels(flipped):
    """Also of weights whose rows are outputs, and of another type than rows."""

    def step(weights, x, sizes):
        weights = weights.swapaxes(1, 2).astype(jnp.bfloat16) if flipped else weights
        return jax.value_and_grad(lambda w, x: jnp.sum(jnp.sin(product(x, w, sizes, transpose_rhs=flipped))), argnums=(0, 1))(weights, x)

    _, (p, x, _) = step_of(layer)
    args = p["up"], x, jnp.array([0, 11, 1, 4], jnp.int32)
    traced = trace(step, *args)
    was, now = (jax.jit(jaxpr_as_fun(each.jaxpr))(*args) for each in (traced, with_grouped_products(traced)))
    for one, other in zip(was, now, strict=True):
        assert one.dtype == other.dtype
        one, other = np.asarray(one, np.float32), np.asarray(other, np.float32)
        np.testing.assert_allclose(one, other, atol=(0.02 if flipped else 1e-5) * np.abs(one).max())


@pytest.mark.slow
def test_kernels_are_of_the_rows_of_each_microbatch():
    """Of a program that is packed, each microbatch has products of its own rows; as they are written, they are of all rows."""

    def loss(p, x, expert):
        return jax.value_and_grad(lambda p: jnp.mean(layer(p, x, expert) ** 2))(p)

    _, args = step_of(layer)
    traced = trace(loss, *args)
    assert "pallas_call" in primitives(applied(Microbatches(2), traced))
    halves = rewritten(traced, (PackedExperts(1.0), Microbatches(2)))
    assert "pallas_call" not in primitives(halves)
    assert "experts: rows of 4 experts packed to 8 each (balance 1); a fuller expert takes another round" in halves.graph.assumptions


def test_products_with_a_part_of_the_groups_stay_kernels():
    """Groups that begin elsewhere, or are more than the weights', are not what `jax.lax.ragged_dot` computes."""

    def function(x, weights, sizes, first):
        return product(x, weights[:2], sizes, group_offset=first), product(x, weights[:2], sizes)

    types = ((ROWS, WIDTH), "float32"), ((EXPERTS, WIDTH, HIDDEN), "float32"), ((EXPERTS,), "int32"), ((), "int32")
    traced = trace(function, *(jax.ShapeDtypeStruct(*each) for each in types))
    assert with_grouped_products(traced) is traced
