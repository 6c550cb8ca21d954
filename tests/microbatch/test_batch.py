"""The batch is found, and programs whose examples depend on each other are refused by operation and line."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import jaxpr_as_fun
from programs import concrete

from autoshard.errors import TraceError
from autoshard.ir.rewrites import Microbatches
from autoshard.microbatch import divisors, in_loop, loop_of_batch
from autoshard.microbatch.rules import batch_rules
from autoshard.rewrite import applied
from autoshard.trace import trace

W, X = jax.ShapeDtypeStruct((8, 8), jnp.float32), jax.ShapeDtypeStruct((12, 8), jnp.float32)


def split(traced, n=2):
    """What the note on microbatches says is split."""
    (note,) = [note for note in applied(Microbatches(n), traced).graph.assumptions if "microbatches" in note]
    return note.split("split: ")[1]


def test_the_batch_is_what_is_not_state():
    """State that is replaced is no batch, whatever its size; arrays of the batch's size are split together."""

    def step(weights, batch):
        return weights - jax.grad(lambda w: jnp.sum((batch["x"] @ w) ** 2 * batch["scale"][:, None]))(weights), batch["x"].sum()

    batch = {"scale": jax.ShapeDtypeStruct((12,), jnp.float32), "x": X}
    assert split(trace(step, W, batch)) == "batch['scale'] along dimension 0, batch['x'] along dimension 0"


def test_a_batch_of_which_a_result_has_the_shape():
    """A reconstruction makes no state of it; where a loop over examples leaves that open, the refusal says how to name the batch."""

    def step(weights, x, apply):
        loss = lambda w: (lambda y: (jnp.mean((y - x) ** 2), y))(apply(w, x))  # noqa: E731
        (value, y), gradient = jax.value_and_grad(loss, has_aux=True)(weights)
        return weights - gradient, y, value

    assert split(trace(lambda w, x: step(w, x, lambda w, x: jnp.tanh(x @ w)), W, X)) == "x along dimension 0"
    traced = trace(lambda w, x: step(w, x, lambda w, x: jax.lax.map(lambda row: jnp.tanh(row @ w), x)), W, X)
    with pytest.raises(TraceError, match=r"no argument holds examples. .* name it, as in batch='x', where it is taken for state"):
        applied(Microbatches(2), traced)


def test_a_batch_behind_other_dimensions():
    """Where a step goes through dimension 0 in order, the batch is dimension 1."""

    def step(weights, xs):
        return jax.lax.scan(lambda state, x: (jnp.tanh(state @ weights + x), None), jnp.zeros((12, 8)), xs)[0].sum()

    assert split(trace(step, W, jax.ShapeDtypeStruct((5, 12, 8), jnp.float32)), 3) == "xs along dimension 1"


def test_a_batch_on_which_few_products_depend():
    """As where a generator is trained by noise alone: features, which its critic's products wait for, are no batch."""

    def step(both, x, key):
        made, critic = both
        critic = critic - jax.grad(lambda critic: jnp.mean(jnp.tanh(x @ critic) ** 2))(critic)
        drawn = jax.random.normal(key, (12, 8))
        loss = lambda made: jnp.mean(jnp.tanh(jnp.tanh(drawn @ made) @ critic @ critic) ** 2)  # noqa: E731
        return made - jax.grad(loss)(made), critic

    traced = trace(step, (W, W), X, jax.eval_shape(lambda: jax.random.key(0)))
    assert split(traced) == "x along dimension 0"


def normalised(weights, x):
    x = x @ weights
    x = (x - x.mean(0)) / x.std(0)
    return ((x @ weights) ** 2).sum()


def contrasted(weights, x):
    pairs = x @ weights @ x.T
    return jax.nn.log_softmax(pairs @ pairs).trace()


def sorted_first(weights, x):
    return ((jnp.sort(x @ weights, 0) @ weights) ** 2).sum()


def printed(weights, x):
    y = x @ weights
    jax.debug.print("{}", y.sum(-1))
    return (y**2).sum()


def until_all_are_small(weights, x):
    fixed = jax.lax.stop_gradient(weights)
    x = jax.lax.while_loop(lambda x: jnp.any(x > 1e-3), lambda x: 0.5 * jnp.tanh(x @ fixed), jax.lax.stop_gradient(x))
    return ((x @ weights) ** 2).sum()


def scanned_over(weights, x):
    return (jax.lax.scan(lambda carry, row: (jnp.tanh(carry @ weights) + row, carry), x[0], x)[1] ** 2).sum()


@pytest.mark.parametrize(
    ("function", "remedy"),
    [
        (normalised, r"compute it of each example \(for batch normalisation: group or layer normalisation\)"),
        (until_all_are_small, r"ends when all examples say so.* Loop a number of times that does not depend on them"),
        (scanned_over, r"goes through the examples one after the other.* Loop over another dimension than that of the examples"),
        (sorted_first, r"Compute it of each example by itself"),
    ],
)
def test_refusals_say_what_to_write_instead(function, remedy):
    """The advice is for the operation that couples the examples: normalisations are advised for what reads all examples alone."""
    traced = trace(jax.grad(function), W, X)
    with pytest.raises(TraceError, match=f"{remedy}, or leave microbatches out; in stages such a step runs with microbatches=1.$") as error:
        loop_of_batch(traced, batch_rules(traced.graph), 2)
    assert ("normalisation" in str(error.value)) == (function is normalised)


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (normalised, r"sub at .*test_batch.py:\d+ \(normalised\) reads each example .* of \w+ at .*test_batch.py:\d+ \(normalised\)"),
        (contrasted, r"dot_general at .*test_batch.py:\d+ \(contrasted\) pairs each example with others"),
        (sorted_first, r"sort at .*test_batch.py:\d+ \(sorted_first\) needs all examples at once"),
    ],
)
def test_coupled_examples_are_refused(function, reason):
    """The message has the operation, its line, why, and how much waits for it."""
    with pytest.raises(TraceError, match=f"(?s)microbatches are computed one after the other, and {reason}; [0-9]+% of the products wait"):
        applied(Microbatches(2), trace(jax.grad(function), W, X))


def normalised_layers(weights, x):
    def layer(x, _):
        x = jnp.tanh(x @ weights)
        return (x - x.mean(0)) / x.std(0), x.max(0)

    x, most = jax.lax.scan(jax.checkpoint(layer), x, None, 3)
    return ((x @ weights) ** 2).sum() + most.sum()


def chosen_by_the_batch(weights, x):
    x = jax.lax.cond(x.sum() > 0, lambda x: x @ weights, lambda x: x @ weights.T, x)
    fixed = jax.lax.stop_gradient(weights)
    x += jax.lax.while_loop(lambda x: jnp.abs(x).max() > 1e-3, lambda x: 0.5 * jnp.tanh(x @ fixed), jax.lax.stop_gradient(x))
    return ((x[jnp.argsort(x[:, 0])] @ weights) ** 2).sum()


@pytest.mark.sample(2)
@pytest.mark.parametrize("function", [normalised, contrasted, sorted_first, printed, normalised_layers, chosen_by_the_batch])
def test_one_microbatch_couples_nothing(function):
    """A loop of one trip has all examples: every product and effect of the step is in it, and what it makes is what the step makes."""

    def step(weights, momentum, x):
        value, gradient = jax.value_and_grad(function)(weights, x)
        momentum = 0.9 * momentum + gradient / jnp.linalg.norm(gradient)
        return weights - momentum, momentum, value

    given = concrete((W, W, X), scale=0.25)
    traced = trace(step, W, W, X)
    many = in_loop(traced, 1)
    assert [op for op in many.graph.ops if op.primitive in ("dot_general", "remat2", "while", "cond")] == []
    assert "sqrt" in [op.primitive for op in many.graph.ops], "the update is made after the loop"
    for one, other in zip(*(jax.jit(jaxpr_as_fun(each.jaxpr))(*given) for each in (traced, many)), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)


def test_effects_happen_once():
    """A print of all examples happens after the loop, where products do not wait for it."""
    many = applied(Microbatches(2), trace(printed, W, X))
    assert [op.primitive for op in many.graph.ops].index("debug_print" if "debug_print" in str(many.jaxpr) else "debug_callback") > 0


@pytest.mark.parametrize("n", [0, -2, True, 2.0, "2"])
def test_numbers_that_are_none(n):
    """Microbatches are counted."""
    with pytest.raises(TraceError, match=r"microbatches are a whole number, 1 or more, got"):
        applied(Microbatches(n), trace(normalised, W, X))


def test_numbers_that_do_not_divide():
    """The message has the sizes that there are."""
    with pytest.raises(TraceError, match=r"divides a batch among the arguments, got 5: .*x has 12 examples. Use 2, 3, 4, 6 or 12.$"):
        applied(Microbatches(5), trace(jax.grad(lambda w, x: ((x @ w) ** 2).sum()), W, X))


def test_features_are_no_batch():
    """A number that divides another dimension, but not the batch, is refused with the batch's size."""
    step = jax.grad(lambda w, x: (jnp.tanh(x @ w) ** 2).sum())
    wide = jnp.ones((128, 64)), jnp.ones((12, 128))
    with pytest.raises(TraceError, match=r"got 64: .*x has 12 examples"):
        applied(Microbatches(64), trace(step, *wide))


def shuffled(weights, x, key):
    return jnp.mean((x[jax.random.permutation(key, 12)] @ weights) ** 2)


def joined_inside(weights, x, y):
    return jnp.mean((jnp.concatenate([x[:3], y, x[3:]]) @ weights) ** 2)


KEY = jax.eval_shape(lambda: jax.random.key(0))


@pytest.mark.parametrize(
    ("function", "more", "why"),
    [
        (shuffled, KEY, "no product is computed of single examples of x"),
        (joined_inside, X, r"slice at .*test_batch.py:\d+ \(joined_inside\) takes the examples' dimension apart"),
    ],
)
def test_small_examples_that_are_rearranged_before_all_products(function, more, why):
    """The message says so, and the sizes of other dimensions only besides."""
    with pytest.raises(TraceError, match=f"(?s)and {why}; of what else could be a batch, .*x has 8.* examples, which 6 does not divide"):
        applied(Microbatches(6), trace(jax.grad(function), W, X, more))


def test_one_microbatch_is_the_program():
    """Nothing is rewritten for one."""
    traced = trace(normalised, W, X)
    assert applied(Microbatches(1), traced) is traced


def test_numbers_that_divide_a_batch():
    """Every number of microbatches that is offered is possible: it divides the size of what may be the batch."""
    assert divisors(trace(lambda w, x: w - jax.grad(lambda w: jnp.sum((x @ w) ** 2))(w), W, X)) == (1, 2, 3, 4, 6, 12)
