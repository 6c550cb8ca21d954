"""Steps with a `jax.shard_map` of their own run in microbatches where their examples are apart from what devices exchange."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.extend.core import jaxpr_as_fun
from jax.sharding import PartitionSpec as P
from programs import abstract, concrete

import autoshard
from autoshard.errors import TraceError
from autoshard.ir.rewrites import Microbatches
from autoshard.rewrite import applied
from autoshard.trace import trace
from tests.test_shard_maps import GRID, attended, mapped, ring, routed, stepped

D, BATCH, LENGTH = 16, 16, 32


def long_attention(w, x):
    """Ring attention of sequences that are split over all devices."""
    q, k, v = (x @ w[n] for n in range(3))
    return jnp.mean((mapped(jax.vmap(ring), P(None, "i"), P(None, "i"))(q, k, v) @ w[3]) ** 2)


def dispatched(x, w):
    """Tokens of each sequence sent to the devices of their experts, and back."""
    sent = lax.all_to_all(x.reshape(len(x), 8, -1, D), "i", 1, 1)
    return lax.all_to_all(jax.nn.relu(sent @ w[0]), "i", 1, 1).reshape(x.shape)


def experts(w, x):
    """Sequences and experts are split over the same devices."""
    return jnp.mean((mapped(dispatched, (P("i"), P("i")), P("i"))(x @ w[0], w) @ w[1]) ** 2)


def centred(w, x):
    """Products in one shard_map, whose weights its gradient reads as well, and a mean over all examples in the next."""
    products = mapped(lambda w, x: jax.nn.gelu(x @ w[0]) @ w[1], (P(), P("i")), P("i"))
    centre = mapped(lambda x: x - lax.pmean(x.mean(0, keepdims=True), "i"), P("i"), P("i"))
    return jnp.mean(centre(products(w, x)) ** 2)


def layers(w, x):
    """Layers in a scan whose weights are split over one axis, and sequences over the other, checkpointed; weights of all devices' sums."""

    def block(x, w):
        hidden = jnp.tanh(lax.all_gather(x, "b", axis=1, tiled=True) @ w)
        return x + lax.psum_scatter(hidden @ w.T, "b", scatter_dimension=1, tiled=True) + lax.pmean(x, "b")

    layer = jax.checkpoint(mapped(block, (P("a", "b"), P(None, "b")), P("a", "b"), GRID))
    return jnp.mean(lax.scan(lambda x, w: (layer(x, w), None), x, w)[0] ** 2)


PROGRAMS = {"long_attention": (long_attention, 3), "experts": (experts, 3), "layers": (layers, 3), "routed": (routed, 2)}


def arguments(rank):
    shape = (BATCH, LENGTH, D) if rank == 3 else (8 * BATCH, D)
    return concrete(abstract((8, D, D)), scale=0.25), concrete(abstract(shape), scale=1.0)


@pytest.mark.sample(1)
@pytest.mark.parametrize("name, n", [("long_attention", 4), ("experts", 2), ("layers", 2), ("routed", 2)])
def test_results_are_those_of_the_whole_batch(name, n):
    """Ring attention, experts on the devices that have the examples, layers of one axis in a scan, rows that are exchanged themselves."""
    loss, rank = PROGRAMS[name]
    args = arguments(rank)
    traced = trace(stepped(loss), *args)
    made = applied(Microbatches(n), traced)
    for here, there in zip(jax.jit(jaxpr_as_fun(made.jaxpr))(*args), jax.jit(jaxpr_as_fun(traced.jaxpr))(*args), strict=True):
        np.testing.assert_allclose(here, there, atol=1e-6 * float(jnp.abs(there).max()))
    assert any(op.primitive == "scan" and op.equation.params["length"] == n for op in made.graph.ops), "the products are in the loop"


@pytest.mark.slow
def test_a_search_takes_microbatches():
    """What is found runs on eight devices, with the planned collectives."""
    loss, rank = PROGRAMS["experts"]
    step, args = stepped(loss), arguments(rank)
    strategy = autoshard.search(step, *args, cluster="cpu:8", microbatches=2, searcher="dynamic_programming")
    assert strategy.microbatches == 2 and autoshard.verify(strategy, step, *args, target="cpu").exact
    for here, there in zip(jax.tree.leaves(strategy.apply(step)(*strategy.shard(*args))), jax.tree.leaves(step(*args)), strict=True):
        np.testing.assert_allclose(here, there, atol=1e-5)


@pytest.mark.parametrize(
    "loss, rank, n, words",
    [
        (attended, 2, 2, r"dot_general at .*test_shard_maps.py.* pairs each example with others"),
        (routed, 2, 4, r"reshape at .*test_shard_maps.py.* takes the examples' dimension apart"),
        (centred, 2, 2, r"sub at .*test_mapped.py.* reads a sum over the examples"),
        (experts, 3, 8, r"at .*test_mapped.py.* takes the examples' dimension apart"),
    ],
)
def test_what_needs_other_examples_is_refused(loss, rank, n, words):
    """With operation and line: attention of all examples to each other, a mean over them, too few on a device to divide them."""
    with pytest.raises(TraceError, match=words):
        applied(Microbatches(n), trace(stepped(loss), *arguments(rank)))
