"""A program in microbatches computes what it computes of the whole batch."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.extend.core import jaxpr_as_fun
from programs import concrete

from autoshard.ir.rewrites import Microbatches
from autoshard.rewrite import applied
from autoshard.trace import trace
from benchmarks import models, other_models

B, D = 16, 12
F32 = jnp.float32


def compared(fn, args, n, tolerance=2e-6):
    """Runs a function on the whole batch and in microbatches, and compares all results; gives the trace in microbatches."""
    traced = trace(fn, *args)
    many = applied(Microbatches(n), traced)
    assert many.microbatches == n and many.graph.argument_paths == traced.graph.argument_paths
    inputs = jax.tree.leaves(concrete(args, below=8, scale=0.3))
    expected = jax.jit(jaxpr_as_fun(traced.jaxpr))(*inputs)
    found = jax.jit(jaxpr_as_fun(many.jaxpr))(*inputs)
    for path, one, other in zip(traced.graph.result_paths, expected, found, strict=True):
        assert one.dtype == other.dtype and one.shape == other.shape
        one, other = (np.asarray(x, np.float64) for x in (one, other))
        assert np.abs(one - other).max(initial=0.0) <= tolerance * (np.abs(one).max(initial=0.0) + 1e-8), path
    return many


def in_the_loop(many):
    """How many products run in the loop over microbatches, and how many around it."""
    loops = [op for op in many.graph.ops if op.primitive == "scan" and op.bodies[0].trips == many.microbatches]
    inside = {op.index for loop in loops for body in loop.bodies for op in walk(body.ops)}
    products = [op.index for op in many.graph.walk() if op.primitive in ("dot_general", "conv_general_dilated")]
    return sum(op in inside for op in products), sum(op not in inside for op in products)


def walk(ops):
    """All ops, bodies included."""
    for op in ops:
        yield op
        for body in op.bodies:
            yield from walk(body.ops)


def trained(loss, weights, optimizer=None):
    """A train step of a loss of weights and a batch."""
    optimizer = optimizer or optax.adam(1e-2)
    state = weights, jax.eval_shape(optimizer.init, weights)

    def step(state, *batch):
        weights, memory = state
        value, gradients = jax.value_and_grad(loss)(weights, *batch)
        updates, memory = optimizer.update(gradients, memory, weights)
        return (optax.apply_updates(weights, updates), memory), value

    return step, state


def leaf(*shape, dtype=F32):
    """An abstract array."""
    return jax.ShapeDtypeStruct(shape, dtype)


WEIGHTS = {"up": leaf(D, 32), "down": leaf(32, D)}


def layers(weights, x):
    """Two layers."""
    return jnp.tanh(x @ weights["up"]) @ weights["down"]


def squared(weights, x, y):
    return jnp.mean((layers(weights, x) - y) ** 2)


def summed(weights, x, y):
    return jnp.sum((layers(weights, x) - y) ** 2)


def masked(weights, x, y, mask):
    """Divides by how many examples count: of all of them, in each microbatch."""
    return jnp.sum(jnp.where(mask[:, None], (layers(weights, x) - y) ** 2, 0.0)) / jnp.maximum(mask.sum(), 1)


def dropped(weights, x, y, key):
    """Drops what it would drop of the whole batch."""
    hidden = jnp.tanh(x @ weights["up"])
    kept = jax.random.bernoulli(key, 0.8, hidden.shape)
    return jnp.mean((jnp.where(kept, hidden / 0.8, 0.0) @ weights["down"] - y) ** 2)


def placed(weights, x, y):
    """Weighs each example by its position in the batch."""
    return jnp.mean(jnp.arange(B, dtype=F32)[:, None] * (layers(weights, x) - y) ** 2)


def standardised(weights, x, y):
    """Normalises its inputs over the batch, and pairs them with sorted ones: cheap, and done before the loop."""
    x = (x - x.mean(0)) / (x.std(0) + 1e-3)
    return jnp.mean((layers(weights, x + jnp.sort(y, 0)) - y) ** 2)


def checkpointed(weights, x, y):
    return jnp.mean((jax.checkpoint(layers)(weights, x) - y) ** 2)


def scanned(weights, x, y):
    """Goes through layers, and adds up a penalty on the way."""

    def layer(carry, scale):
        x, penalty = carry
        return (x + layers(weights, x) * scale, penalty + jnp.mean(x**2)), jnp.max(jnp.abs(x))

    (x, penalty), largest = lax.scan(jax.checkpoint(layer), (x, 0.0), jnp.linspace(0.1, 0.3, 3))
    return jnp.mean((x - y) ** 2) + 0.1 * penalty + 0.0 * lax.stop_gradient(largest.sum())


def branched(weights, x, y):
    """Takes a branch by the weights alone, and repeats a layer."""
    x = lax.cond(weights["up"][0, 0] > 0, lambda x: layers(weights, x), lambda x: x * 2, x)
    return jnp.mean((lax.fori_loop(0, 3, lambda _, x: x + 0.1 * layers(weights, x), x) - y) ** 2)


def looked_up(weights, tokens, y):
    """Reads rows of a table, to which gradients are scattered."""
    return jnp.mean((layers(weights, weights["table"][tokens]) - y) ** 2)


def accumulated(weights, xs, ys):
    """Is a loop over microbatches already."""
    return lax.scan(lambda total, both: (total + squared(weights, *both), None), 0.0, (xs, ys))[0] / 4


def paired(weights, x, y):
    """Computes of two batches at once, as preferences are trained, the second one padded, and compares them."""
    both = layers(weights, jnp.concatenate([x, jnp.pad(y[: B // 2], ((B // 2, 0), (0, 0))), jnp.zeros_like(x)]))
    first, second, _ = jnp.split(both, 3)
    return jnp.mean(jax.nn.softplus(first - second).sum(-1) * jnp.arange(B))


def compared_by_labels(weights, x, y):
    """Weighs each example by how alike its labels are to those of all others: every pair, small, of which each microbatch reads rows."""
    labels = y.sum(-1)
    alike = jnp.exp(-((labels[:, None] - labels[None, :]) ** 2))
    return jnp.mean(alike * layers(weights, x)[:, :1])


def staged(weights, x, y):
    """Writes what its stages make, as solvers of Runge and Kutta do, into rows of an array that is not zero, and one of each example's."""

    def stage(made, k):
        return made.at[k].set(0.1 * layers(weights, x + made.sum(0))), None

    made, _ = lax.scan(stage, jnp.full((3, *x.shape), 0.1), jnp.arange(3))
    chosen = jnp.ones((B, D)).at[jnp.arange(B), jnp.arange(B) % D].set(made[0, :, 0])
    return jnp.mean((made.sum(0) * chosen - y) ** 2)


def counted(weights, x, y):
    """Carries a count of layers beside the examples, and scales the loss by it."""

    def layer(carry, w):
        x, n = carry
        return (jnp.tanh(x @ w["up"]) @ w["down"], n + 1), None

    (h, n), _ = lax.scan(layer, (x, jnp.zeros(())), jax.tree.map(lambda w: jnp.stack([w, 2 * w]), weights))
    return jnp.mean((h - y) ** 2) / n + n


def half(weights, x, y):
    """Computes in bfloat16."""
    narrow = jax.tree.map(lambda w: w.astype(jnp.bfloat16), weights)
    return jnp.mean((layers(narrow, x.astype(jnp.bfloat16)) - y).astype(F32) ** 2)


X, Y = leaf(B, D), leaf(B, D)
LOSSES = {
    "squared": (squared, WEIGHTS, (X, Y)),
    "summed": (summed, WEIGHTS, (X, Y)),
    "masked": (masked, WEIGHTS, (X, Y, leaf(B, dtype=jnp.bool_))),
    "dropped": (dropped, WEIGHTS, (X, Y, jax.eval_shape(lambda: jax.random.key(0)))),
    "placed": (placed, WEIGHTS, (X, Y)),
    "standardised": (standardised, WEIGHTS, (X, Y)),
    "checkpointed": (checkpointed, WEIGHTS, (X, Y)),
    "scanned": (scanned, WEIGHTS, (X, Y)),
    "branched": (branched, WEIGHTS, (X, Y)),
    "looked_up": (looked_up, {**WEIGHTS, "table": leaf(8, D)}, (leaf(B, dtype=jnp.int32), Y)),
    "compared_by_labels": (compared_by_labels, WEIGHTS, (X, Y)),
    "counted": (counted, WEIGHTS, (X, Y)),
    "staged": (staged, WEIGHTS, (X, Y)),
    "paired": (paired, WEIGHTS, (X, Y)),
    "accumulated": (accumulated, WEIGHTS, (leaf(4, B, D), leaf(4, B, D))),
}


@pytest.mark.sample(3)
@pytest.mark.parametrize("n", [2, 8])
@pytest.mark.parametrize("name", LOSSES)
def test_losses_and_updates_are_those_of_the_whole_batch(name, n):
    """All products run in the loop, and results are equal."""
    loss, weights, batch = LOSSES[name]
    step, state = trained(loss, weights, optax.chain(optax.clip_by_global_norm(0.5), optax.sgd(0.1, momentum=0.9)))
    inside, around = in_the_loop(compared(step, (state, *batch), n))
    assert inside > 3 and around == 0


def looked_up_in_bags(table, ids, y):
    """A bag of embeddings."""
    return jnp.mean((table[ids].sum(1) - y) ** 2)


def scaled(scale, x, mask):
    """Elementwise, divided by what is counted over all examples."""
    return jnp.sum(jnp.tanh(x * scale).sum(-1) * mask) / jnp.maximum(jnp.sum(mask), 1.0)


def spectral(scale, x):
    """Filters spectra."""
    return jnp.mean(jnp.fft.irfft(jnp.fft.rfft(x) * scale) ** 2)


NO_PRODUCTS = {
    "bags": (looked_up_in_bags, leaf(8, D), (leaf(B, 3, dtype=jnp.int32), Y)),
    "scaled": (scaled, leaf(D), (X, leaf(B))),
    "spectral": (spectral, leaf(D // 2 + 1), (X,)),
}


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", NO_PRODUCTS)
def test_steps_without_products_are_sums_over_examples(name):
    """What is computed of examples runs in the loop, and nothing of it before or after."""
    loss, weights, batch = NO_PRODUCTS[name]
    step, state = trained(loss, weights, optax.sgd(0.1))
    many = compared(step, (state, *batch), 4)
    (loop,) = [op for op in many.graph.ops if op.primitive == "scan"]
    around = [op for op in many.graph.ops if op is not loop and any(B in many.graph.values[value].shape for value in op.results)]
    assert {op.primitive for op in around} <= {"reshape", "iota", "broadcast_in_dim"}, [op.primitive for op in around]


def clipped(weights, x):
    """Clips the gradient of a convolution for each example, as differential privacy does."""

    def loss(weights, x):
        return jnp.mean(jnp.tanh(lax.conv(x[None], weights, (1, 1), "SAME")) ** 2)

    gradients = jax.vmap(jax.grad(loss), (None, 0))(weights, x)
    norms = jnp.sqrt(jnp.sum(gradients**2, (1, 2, 3, 4)))
    return weights - 0.1 * jnp.mean(gradients / jnp.maximum(1.0, norms)[:, None, None, None, None], 0)


def with_kernels_of_their_own(weights, x, kernels):
    """Convolves each example with a kernel of its own, and takes the gradient."""
    apply = jax.vmap(lambda x, kernel: lax.conv(x[None], kernel * weights, (1, 1), "VALID"))
    return weights - 0.1 * jax.grad(lambda weights: jnp.mean(apply(x, kernels * weights) ** 2))(weights)


def solved(weights, matrices, b):
    """Solves a system of each example, and one of all of them."""

    def loss(weights):
        found = jnp.linalg.solve(4 * jnp.eye(D) + weights * matrices, b[..., None])[..., 0]
        return jnp.mean(jnp.linalg.solve(4 * jnp.eye(D) + weights, found.T) ** 2)

    return weights - jax.grad(loss)(weights)


def solved_by_iteration(weights, matrices, b):
    """Solves a system of each example by conjugate gradients, which end for each when its residual is small."""

    def one(matrix, b):
        return jax.scipy.sparse.linalg.cg(lambda v: 4 * v + (matrix * weights) @ ((matrix * weights).T @ v), b, maxiter=9)[0]

    return jax.vmap(one)(matrices, b)


OF_EACH = {
    "per-example gradients": (clipped, (leaf(6, 4, 3, 3), leaf(B, 4, 5, 5))),
    "per-example kernels": (with_kernels_of_their_own, (leaf(6, 4, 3, 3), leaf(B, 4, 5, 5), leaf(B, 6, 4, 3, 3))),
    "linear solves": (solved, (leaf(D, D), leaf(B, D, D), X)),
    "conjugate gradients": (solved_by_iteration, (leaf(D, D), leaf(B, D, D), X)),
}


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", OF_EACH)
def test_operations_that_hold_examples_apart(name):
    """Groups of a convolution, systems and their right-hand sides, and loops that go on for some examples are split like batches."""
    fn, args = OF_EACH[name]
    inside, around = in_the_loop(compared(fn, args, 4, 1e-5))
    assert inside and not around


SLOW = [pytest.param(name, marks=pytest.mark.slow) for name in ("gpt", "resnet", "state space")]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama scanned", "moe", "unet", *SLOW])
def test_models(name):
    """Train steps of whole models, with Adam."""
    small = {"dtype": F32}
    programs = {
        "gpt": lambda: models.gpt(1, 32, 4, 64, batch=8, length=8, **small),
        "llama scanned": lambda: models.llama(2, 32, 4, 2, 64, 64, batch=8, length=8, scan=True, **small),
        "moe": lambda: models.moe(1, 32, 4, 4, 64, batch=8, length=8, **small),
        "resnet": lambda: models.resnet((1,), 8, 16, 8, 32, groups=4, **small),
        "unet": lambda: models.unet(1, 8, 8, 16, 4, **small),
        "state space": lambda: other_models.state_space(1, 16, 4, 8, 16, **small),
    }
    fn, args = programs[name]()
    inside, around = in_the_loop(compared(fn, args, 4))
    assert inside > 3 and around == 0


def test_sums_of_narrow_numbers_are_accumulated_wide():
    """In bfloat16 the gradients of 16 microbatches are as near to those in float32 as the whole batch's."""
    exact, state = trained(lambda weights, x, y: squared(weights, x, y), WEIGHTS, optax.sgd(1.0))
    narrow, _ = trained(half, WEIGHTS, optax.sgd(1.0))
    many = applied(Microbatches(16), trace(narrow, state, X, Y))
    args = concrete((state, X, Y), scale=1.0)
    wanted, whole = jax.tree.leaves(jax.jit(exact)(*args)), jax.tree.leaves(jax.jit(narrow)(*args))
    found = jax.jit(jaxpr_as_fun(many.jaxpr))(*jax.tree.leaves(args))
    for one, other, each in zip(wanted, whole, found, strict=True):
        assert np.abs(each - one).max() <= 1.5 * np.abs(other - one).max() + 1e-5


def test_what_is_returned_of_each_example_is_in_its_order():
    """Predictions are put together as the batch has them; a statistic of them is computed after the loop."""

    def evaluated(weights, x):
        scores = layers(weights, x)
        best = jnp.argmax(scores, -1)
        return scores, best, jnp.sort(scores[:, 0]), jnp.max(scores), (scores > 0).all()

    inside, around = in_the_loop(compared(evaluated, (WEIGHTS, X), 4))
    assert (inside, around) == (2, 0)


def test_random_masks_are_drawn_inside():
    """No array of the whole batch's size is drawn before the loop: bits of a microbatch are, and they are the same ones."""
    step, state = trained(dropped, WEIGHTS)
    many = compared(step, (state, *LOSSES["dropped"][2]), 4)
    drawn = [many.graph.values[op.results[0]].shape for op in many.graph.walk() if op.primitive in ("random_bits", "threefry2x32")]
    assert drawn and all(shape[:1] == (B // 4,) for shape in drawn)


@pytest.mark.slow
@pytest.mark.parametrize("remat", [False, True])
def test_masks_of_scanned_layers_are_broadcast_inside(remat):
    """Layers in a loop of their own read a microbatch's masks and zeros: none is as wide as the scores of the whole batch."""
    program, args = models.llama(2, 32, 4, 2, 64, 64, batch=8, length=16, scan=True, remat=remat, dtype=F32)
    many = compared(program, args, 4, tolerance=2e-5)
    wide = [op for op in many.graph.walk() if any(many.graph.values[value].shape == (8, 2, 2, 16, 16) for value in op.results)]
    narrow = [op for op in many.graph.walk() if any(many.graph.values[value].shape == (2, 2, 2, 16, 16) for value in op.results)]
    assert narrow and not wide


def test_gradients_are_rounded_and_combined_once():
    """One accumulator a weight and the loss; what is done with whole gradients is done after the loop."""
    step, state = trained(squared, WEIGHTS)
    many = applied(Microbatches(4), trace(step, state, X, Y))
    (loop,) = [op for op in many.graph.ops if op.primitive == "scan"]
    totals = [many.graph.values[value].shape for value in loop.results if many.graph.values[value].dtype == "float32"]
    assert sorted(totals) == [(), (D, 32), (32, D)]
