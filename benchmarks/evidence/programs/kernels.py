"""Programs that show what XLA:TPU fuses and keeps, and what a kernel takes."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax

from benchmarks.evidence.measures import COPYING, CYCLES, FILLING, counted, near, read, rows_of_blocks, stored, times_the_rows, together
from benchmarks.evidence.program import BF16, F32, Program, leaf, named, program

LARGE = leaf(64, 1024, 1024)
LARGE_F32 = leaf(64, 1024, 1024, dtype=F32)
ACTIVATIONS = leaf(8192, 1024)


def polynomial(x, terms):
    """A chain of as many products, and sums."""
    y = x
    for _ in range(terms):
        y = y * x + 1.5
    return y


def maxima(x, terms):
    """A chain of products, differences and maxima, as many of each."""
    y = x
    for _ in range(terms):
        y = jnp.maximum(y * x, x - y)
    return y


def selections(x, terms):
    """A chain of comparisons, sums and choices, as many of each."""
    y = x
    for _ in range(terms):
        y = jnp.where(y > x, y + 1.5, x * y)
    return y


# -- cycles ----------------------------------------------------------------------------------------------------------------

for chain, terms in ((polynomial, 60), (maxima, 40), (selections, 40)):
    wide = Program(lambda x, chain=chain, terms=terms: chain(x, terms), (LARGE_F32,), CYCLES)
    named(f"{chain.__name__} in bfloat16 over float32", Program(wide.function, (LARGE,), CYCLES, over=wide))

for title, function, n in (
    ("a scaled rectifier", lambda x: jax.nn.relu(x) * 2, 1),
    ("a sum of three", lambda x, y, z: x + y + z, 3),
    ("a gated product", lambda x, y: jax.nn.sigmoid(x) * y, 2),
):
    named(f"{title} in bfloat16 over float32", Program(function, (LARGE,) * n, CYCLES, over=Program(function, (LARGE_F32,) * n, CYCLES)))

for kind in ("v5e:1x1", "v5p:1x1x1", "v6e:1x1"):
    smallest = Program(jax.nn.relu, (leaf(8, 1024, dtype=F32),), CYCLES, kind)
    product = Program(jnp.matmul, (leaf(128, 128), leaf(128, 128)), CYCLES, kind, over=smallest)
    named(f"the smallest product over the smallest kernel on {kind[:3]}", product)


@program(FILLING, leaf(1 << 20))
def zeros_of_a_stack_that_is_filled_backward(x):
    return lax.scan(lambda x, _: (x * 2, x * 3), x, None, length=64, reverse=True)


@program(FILLING, leaf(128, 1024), leaf(128, dtype=jnp.int32))
def zeros_that_rows_are_added_to(rows, places):
    return jnp.zeros((65536, 1024), BF16).at[places].add(rows)


@program(COPYING, leaf(8192, 8192))
def a_transposition(x):
    return x.T


@program(COPYING, leaf(64, 1024, 1024))
def a_transposition_of_each_matrix(x):
    return x.swapaxes(1, 2)


@program(FILLING, leaf(1 << 20, dtype=F32))
def float32_zeros_of_a_stack_that_is_filled_backward(x):
    return lax.scan(lambda x, _: (x * 2, x * 3), x, None, length=64, reverse=True)


# -- what is kept, and what is computed again --------------------------------------------------------------------------------

KEPT = stored("bf16[8192,1024]")


def for_two_products(chain, terms):
    """A chain that two products read."""

    def function(x, w, v):
        a = chain(x, terms)
        return a @ w, a @ v

    return function


for chain, few, some, many in ((polynomial, 14, 20, 40), (maxima, 8, 14, 28), (selections, 8, 14, 28)):
    for beside, columns, lengths in (("little", 128, (few, some)), ("as much", 1152, (some, many))):
        weights = leaf(1024, columns), leaf(1024, columns + 128)
        for terms in lengths:
            named(
                f"{terms} terms of {chain.__name__} and {beside} beside",
                Program(for_two_products(chain, terms), (ACTIVATIONS, *weights), KEPT),
            )


# -- epilogues -------------------------------------------------------------------------------------------------------------


def after_a_product(chain, terms):
    return lambda x, w: chain(x @ w, terms)


for chain, terms in ((polynomial, 15), (polynomial, 30), (polynomial, 60), (maxima, 20), (selections, 20)):
    named(
        f"a product and {terms} terms of {chain.__name__}",
        Program(after_a_product(chain, terms), (leaf(8192, 512), leaf(512, 1024)), KEPT),
    )


@program(KEPT, leaf(8192, 512), leaf(512, 1024), ACTIVATIONS)
def a_product_and_the_derivative_of_gelu(x, w, y):
    return jax.vjp(jax.nn.gelu, y)[1](x @ w)[0]


def sum_of(n):
    """A product of a sum of so many."""

    def function(w, *xs):
        return sum(xs[1:], xs[0]) @ w

    return function


for n in (2, 8, 24, 48):
    named(f"a product of a sum of {n}", Program(sum_of(n), (leaf(1024, 256), *[ACTIVATIONS] * n), KEPT))
    named(f"a product of {n} factors", Program(lambda w, *xs: math.prod(xs) @ w, (leaf(1024, 256), *[ACTIVATIONS] * n), KEPT))
    named(
        f"a sum of rows of the largest of {n}",
        Program(lambda w, *xs: jax.tree.reduce(jnp.maximum, xs).astype(F32).sum(-1), (leaf(8, 8), *[ACTIVATIONS] * n), KEPT),
    )


def for_products(x, y, *weights):
    """A sum that every product reads."""
    return [(x + y) @ weight for weight in weights]


for n in (2, 3, 6, 12):
    weights = [leaf(1024, 128 * (k + 1)) for k in range(n)]
    named(f"a sum that {n} products read", Program(for_products, (ACTIVATIONS, ACTIVATIONS, *weights), KEPT))

# -- products without their ends -------------------------------------------------------------------------------------------


def padded(rows):
    """A product of an exponential with as many rows of zeros below it."""
    return lambda x, w: jnp.pad(jnp.exp(x), ((0, rows), (0, 0))) @ w


for cut in (1, 64, 128):
    named(
        f"{1024 - cut} of 1024 rows of a product",
        Program(lambda x, w, cut=cut: jnp.exp((x @ w)[:-cut]), (leaf(1024, 512), leaf(512, 2048)), stored("bf16[1024,2048]")),
    )
    named(
        f"{1024 - cut} of 1024 positions of a batch's products",
        Program(lambda x, w, cut=cut: jnp.exp((x @ w)[:, :-cut]), (leaf(8, 1024, 512), leaf(512, 2048)), stored("bf16[8,1024,2048]")),
    )
    named(
        f"a product of {1024 - cut} rows padded to 1024",
        Program(padded(cut), (leaf(1024 - cut, 512), leaf(512, 2048)), stored("bf16[1024,512]")),
    )


# -- slices ----------------------------------------------------------------------------------------------------------------


@program(KEPT, ACTIVATIONS)
def one_half_of_exponentials(x):
    return jnp.exp(x)[:, :512] * 2


@program(KEPT, ACTIVATIONS)
def two_halves_of_exponentials(x):
    y = jnp.exp(x)
    return y[:, :512] * y[:, 512:]


@program(KEPT, ACTIVATIONS)
def three_windows_of_sines(x):
    y = jnp.sin(x)
    return y[:-2] + y[1:-1] * y[2:]


@program(KEPT, ACTIVATIONS)
def every_second_column_of_logistics(x):
    return jax.nn.sigmoid(x)[:, ::2] + 1


# -- strided slices and pads between elements ---------------------------------------------------------------------------------


@program(stored("bf16[8192,512]"), ACTIVATIONS)
def every_second_column_scaled(x):
    return x[:, ::2] * 2


@program(stored("bf16[4096,1024]"), ACTIVATIONS)
def every_second_row_scaled(x):
    return x[::2] * 2


@program(stored("bf16[8,1024,1024]"), leaf(16, 1024, 1024))
def every_second_matrix_scaled(x):
    return x[::2] * 2


@program(stored("bf16[8192,2047]"), ACTIVATIONS)
def zeros_between_columns(x):
    return lax.pad(x, jnp.asarray(0, x.dtype), ((0, 0, 0), (0, 0, 1))) * 2 + 1


# -- scores of queries that share keys --------------------------------------------------------------------------------------

QUERIES, GROUPED, KEYS = leaf(8, 512, 4, 64), leaf(8, 512, 4, 4, 64), leaf(8, 512, 4, 64)


def masked(scores):
    positions = jnp.arange(512)
    return jnp.where(positions[:, None] >= positions, scores, -1e9)


def attention(queries, keys, values, mask):
    """Of queries in groups where they have five dimensions."""
    if queries.ndim == 5:
        scores = jnp.einsum("bqhgd,bkhd->bhgqk", queries, keys).astype(F32) * 0.125
        return jnp.einsum("bhgqk,bkhd->bqhgd", jax.nn.softmax(mask(scores)).astype(BF16), values)
    scores = jnp.einsum("bqhd,bkhd->bhqk", queries, keys).astype(F32) * 0.125
    return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(mask(scores)).astype(BF16), values)


def gradients(mask):
    return jax.grad(lambda queries, keys, values: attention(queries, keys, values, mask).astype(F32).sum(), (0, 1, 2))


def capped(scores):
    return 30 * jnp.tanh(scores / 30)


for how in (lambda scores: scores, masked, capped):
    kind = {"masked": "masked ", "capped": "capped "}.get(how.__name__, "")
    named(f"gradients of {kind}attention", Program(gradients(how), (QUERIES, KEYS, KEYS), stored("f32[8,4,512,512]")))
    named(f"gradients of {kind}grouped attention", Program(gradients(how), (GROUPED, KEYS, KEYS), stored("bf16[8,4,512,512,4]")))


CHANGES = {"biased": lambda logits, bias: logits + bias, "scaled": lambda logits, _: logits / 8, "capped": lambda logits, _: capped(logits)}

for kind, changed in CHANGES.items():

    def mean_loss(weights, x, labels, bias, changed=changed):
        logits = changed((x @ weights).astype(F32), bias)
        return -jnp.take_along_axis(jax.nn.log_softmax(logits), labels[:, None], 1).mean()

    args = leaf(1024, 4096), leaf(8192, 1024), leaf(8192, dtype=jnp.int32), leaf(4096, dtype=F32)
    named(f"gradients of {kind} logits", Program(jax.grad(mean_loss, (0, 1)), args, stored("bf16[8192,4096]")))


@program(stored("bf16[4096,4096]"), leaf(4096, 64), leaf(4096, 64), leaf(4096, 64))
def gradients_of_attention_of_one_head(queries, keys, values):
    def one(queries, keys, values):
        scores = (queries @ keys.T).astype(F32) * 0.125
        return (jax.nn.softmax(scores).astype(BF16) @ values).astype(F32).sum()

    return jax.grad(one, (0, 1, 2))(queries, keys, values)


IMAGES = leaf(64, 64, 64, 128)


@program(stored("f32[64,64,64,128]"), IMAGES, leaf(3, 3, 128, 128), leaf(64, 1, 1, 128, dtype=F32), IMAGES)
def a_convolution_and_the_gradient_of_its_normalisation(images, kernel, mean, gradient):
    x = lax.conv_general_dilated(images, kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
    x, gradient = x.astype(F32) - mean, gradient.astype(F32)
    return (gradient * (x * x).sum((1, 2), keepdims=True) - x * (x * gradient).sum((1, 2), keepdims=True)).astype(BF16)


# -- operands in the core's own memory --------------------------------------------------------------------------------------


def trained(depth):
    def loss(weights, x):
        y = x
        for weight in weights:
            y = jax.nn.gelu(y @ weight)
        return y.astype(F32).sum()

    return jax.grad(loss)


for rows, width, depth in ((8192, 1024, 6), (8192, 2048, 6), (16384, 2048, 6), (32768, 1024, 12), (24576, 2048, 4)):
    named(
        f"a perceptron of {depth} layers of {rows} x {width}",
        Program(trained(depth), ([leaf(width, width)] * depth, leaf(rows, width)), near()),
    )


# -- values that are handed to gathers, and to other kernels outside of fusions -------------------------------------------

LOGITS, LOGITS_F32, TARGETS = leaf(4096, 16384), leaf(4096, 16384, dtype=F32), leaf(4096, dtype=jnp.int32)


def capped(x):
    """A softcap in float32."""
    return 30 * jnp.tanh(x.astype(F32) / 30)


def twelve_tanhs(x):
    """A chain that takes longer than any memory traffic."""
    x = x.astype(F32)
    for k in range(12):
        x = jnp.tanh(x * (1 + k / 10))
    return x


def looked_up(values, targets):
    """One of each row."""
    return jnp.take_along_axis(values, targets[:, None], -1)


def handed(make, hand):
    """A program that hands what is made of arrays to an operation, and takes each row's logsumexp: two kernels read the value then."""

    def program(targets, *arrays):
        made = make(*arrays)
        return hand(made, targets), jax.nn.logsumexp(made.astype(F32), -1)

    return program


READ, READ_F32 = read("bf16[4096,16384]"), read("f32[4096,16384]")
for title, make, hand in [
    ("capped logits looked up", capped, looked_up),
    ("logits after twelve tanhs looked up", twelve_tanhs, looked_up),
    ("capped logits sorted", capped, lambda made, _: jnp.sort(made, -1)),
    ("every third capped logit", capped, lambda made, _: jnp.cos(made[:, ::3]).sum(-1)),
    ("capped logits scattered into", capped, lambda made, targets: made.at[targets].add(1.0)[:, 0]),
]:
    named(title, Program(handed(make, hand), (TARGETS, LOGITS), READ))
for n, of_many in ((2, lambda x, y: capped(x) * y), (3, lambda x, y, z: capped(x) * y + z)):
    named(f"capped logits of {n} arrays looked up", Program(handed(of_many, looked_up), (TARGETS, *[LOGITS] * n), READ))
for title, n, make in [
    ("capped logits of 2 wide arrays looked up", 2, lambda x, y: capped(x) * y),
    ("rounded capped logits looked up", 1, lambda x: capped(x).astype(BF16)),
]:
    named(title, Program(handed(make, looked_up), (TARGETS, *[LOGITS_F32] * n), READ_F32))


def loss_of_capped_logits(x, w, targets):
    """A loss over a product's logits."""
    made = capped(x @ w)
    return jnp.mean(jax.nn.logsumexp(made, -1) - looked_up(made, targets)[:, 0])


named(
    "a loss of capped logits of a product",  # read by the logsumexp, and by both gradients
    Program(jax.value_and_grad(loss_of_capped_logits, (0, 1)), (leaf(4096, 1024), leaf(1024, 16384), TARGETS), READ),
)

SQUARE, WIDE = leaf(8192, 8192), "f32[8192,8192]"


def by_rows_and_columns(make):
    """What is made of arrays, looked up in each row and in each column, with the sum of exponentials of each row."""

    def program(targets, *arrays):
        made = make(*arrays)
        return looked_up(made, targets) + looked_up(made.T, targets), jax.nn.logsumexp(made, -1)

    return program


def multiplied(x, w):
    """A product in float32."""
    return jnp.dot(x, w, preferred_element_type=F32)


for title, make, arrays in [
    ("scaled logits", lambda x: 3 * x.astype(F32), (SQUARE,)),
    ("capped logits", capped, (SQUARE,)),
    ("sums of two arrays", lambda x, y: jnp.sin(x.astype(F32)) + y.astype(F32), (SQUARE, SQUARE)),
    ("scaled logits of a product", lambda x, w: 3 * (x @ w).astype(F32), (leaf(8192, 512), leaf(512, 8192))),
    ("a product in float32", multiplied, (leaf(8192, 512), leaf(512, 8192))),
]:
    rows = leaf(8192, dtype=jnp.int32)
    named(f"{title} looked up by rows and columns", Program(by_rows_and_columns(make), (rows, *arrays), stored(WIDE)))
for title, make, arrays in [
    ("scaled logits", lambda x, s: x.astype(F32) * s, (LOGITS, leaf(dtype=F32))),
    ("biased logits", lambda x, b: x.astype(F32) + b, (LOGITS, leaf(16384, dtype=F32))),
    ("capped logits", capped, (LOGITS,)),
    ("scaled logits of a product", lambda x, w, s: (x @ w).astype(F32) * s, (leaf(4096, 512), leaf(512, 16384), leaf(dtype=F32))),
]:
    named(
        f"{title} looked up beside their maxima",
        Program(handed(make, looked_up), (TARGETS, *arrays), together("f32[4096,16384]", "f32[4096]")),
    )

# -- products of groups ------------------------------------------------------------------------------------------------------

MULTIPLIED = lax.RaggedDotDimensionNumbers((((1,), (2,)), ((), ())), (0,), (0,))
SUMMED = lax.RaggedDotDimensionNumbers((((0,), (0,)), ((), ())), (0,), ())


def of_groups(x, weights, sizes):
    """Each row with its group's matrix."""
    return lax.ragged_dot(x, weights, sizes)


def of_groups_transposed(y, weights, sizes):
    """The gradient of rows."""
    return lax.ragged_dot_general(y, weights, sizes, MULTIPLIED)


def summed_by_group(x, y, sizes):
    """The gradient of matrices."""
    return lax.ragged_dot_general(x, y, sizes, SUMMED)


def grouped_programs(rows, groups, width=1024, hidden=2048, dtype=BF16):
    """The three products of a layer, each with its operands."""
    x, y, weights = leaf(rows, width, dtype=dtype), leaf(rows, hidden, dtype=dtype), leaf(groups, width, hidden, dtype=dtype)
    sizes = leaf(groups, dtype=jnp.int32)
    return (
        ("products of {} groups", of_groups, (x, weights, sizes)),
        ("gradients of rows of {} groups", of_groups_transposed, (y, weights, sizes)),
        ("gradients of {} groups", summed_by_group, (x, y, sizes)),
    )


TIMES = times_the_rows(2 * 4096 * 1024 * 2048)
for device, target in (("v5e", "v5e:1x1"), ("v6e", "v6e:1x1"), ("v5p", "v5p:1x1x1"), ("v4", "v4:1x1x1")):
    for title, function, args in grouped_programs(4096, 8):
        named(f"{title.format(8)} on {device}", Program(function, args, TIMES, target))
for rows, groups in ((4096, 8), (4096, 64), (16384, 64)):
    (_, function, args), *_ = grouped_programs(rows, groups)
    named(f"blocks of {rows} rows of {groups} groups", Program(function, args, rows_of_blocks(rows)))


def of_wide_weights(x, weights, sizes):
    return lax.ragged_dot(x, weights.astype(BF16), sizes)


def before_gelu(x, weights, sizes):
    return jax.nn.gelu(lax.ragged_dot(x, weights, sizes))


def after_gelu(x, weights, sizes):
    return lax.ragged_dot(jax.nn.gelu(x), weights, sizes)


GROUPED_ROWS, SIZES = leaf(16384, 1024), leaf(8, dtype=jnp.int32)
GROUPED_WEIGHTS, GROUPED_WEIGHTS_F32 = leaf(8, 1024, 2048), leaf(8, 1024, 2048, dtype=F32)
for title, function, weights, kept in (
    ("products of groups of wide weights", of_wide_weights, GROUPED_WEIGHTS_F32, "bf16[8,1024,2048]"),
    ("products of groups before a gelu", before_gelu, GROUPED_WEIGHTS, "bf16[16384,2048]"),
    ("products of groups after a gelu", after_gelu, GROUPED_WEIGHTS, "bf16[16384,1024]"),
):
    named(title, Program(function, (GROUPED_ROWS, weights, SIZES), stored(kept)))

# -- reductions of products ------------------------------------------------------------------------------------------------


def reduced(*how):
    def program(x, w):
        made = jnp.tanh(x @ w.T)
        return tuple(reduce(made, axis) for reduce, axis in how)

    return program


for title, how in (
    ("minima and their places", ((jnp.argmin, -1), (jnp.min, -1))),
    ("minima, maxima and sums", ((jnp.min, -1), (jnp.max, -1), (jnp.sum, -1))),
    ("sums of rows and of columns", ((jnp.sum, 0), (jnp.sum, 1))),
    ("places of maxima and sums", ((jnp.argmax, -1), (jnp.sum, -1))),
    ("places of maxima of rows and of columns", ((jnp.argmax, 0), (jnp.argmax, 1))),
):
    args = leaf(65536, 256, dtype=F32), leaf(4096, 256, dtype=F32)
    named(f"{title} of a product", Program(reduced(*how), args, stored("f32[65536,4096]")))

# -- products with vectors -------------------------------------------------------------------------------------------------


def in_a_loop(spec):
    """A batch of products with vectors in each trip of a loop, whose carry is a batch of matrices."""

    def program(state, vectors):
        return lax.scan(lambda state, each: (state * 0.9, jnp.einsum(spec, each, state)), state, vectors)

    return program


def a_readout_in_a_loop(state, vectors):
    """A recurrent state that an outer product is added to and that is read, as in linear attention."""

    def trip(state, each):
        state = state + jnp.einsum("bk,bv->bkv", each, each)
        return state, jnp.einsum("bk,bkv->bv", each, state)

    return lax.scan(trip, state, vectors)


for title, function, args in (
    ("a matrix times a vector", lambda x, v: jnp.tanh(x) @ v, (leaf(4096, 2048, dtype=F32), leaf(2048, dtype=F32))),
    ("a row times a matrix", lambda x, v: v @ jnp.tanh(x), (leaf(2048, 4096), leaf(1, 2048))),
    ("rows times matrices in a loop", in_a_loop("bk,bkv->bv"), (leaf(64, 128, 128, dtype=F32), leaf(32, 64, 128, dtype=F32))),
    ("matrices times columns in a loop", in_a_loop("bk,bvk->bv"), (leaf(64, 128, 128), leaf(32, 64, 128))),
    ("outer products and readouts in a loop", a_readout_in_a_loop, (leaf(64, 128, 128, dtype=F32), leaf(32, 64, 128, dtype=F32))),
    ("rows times matrices of a batch", lambda s, r: jnp.einsum("bk,bkv->bv", r, s), (leaf(32, 512, 512), leaf(32, 512))),
    ("four columns", lambda x, v: jnp.tanh(x) @ v, (leaf(4096, 2048, dtype=F32), leaf(2048, 4, dtype=F32))),
):
    named(title, Program(function, args, counted("convolution(")))

# -- outer products --------------------------------------------------------------------------------------------------------

COLUMN, ROW, SQUARE = leaf(4096, 1, dtype=F32), leaf(1, 2048, dtype=F32), leaf(4096, 2048, dtype=F32)
for title, function, args in (
    ("an outer product that is scaled", lambda a, b, x: (a @ b) * x, (COLUMN, ROW, SQUARE)),
    ("an outer product beside a product", lambda a, b, x, w: jnp.tanh(x @ w + a @ b), (COLUMN, ROW, SQUARE, leaf(2048, 2048, dtype=F32))),
    ("an outer product that is summed", lambda a, b, x: jnp.sum(jnp.tanh(a @ b) * x, axis=1), (COLUMN, ROW, SQUARE)),
):
    named(title, Program(function, args, stored("f32[4096,2048]")))

# -- barriers in loops -----------------------------------------------------------------------------------------------------


def checkpointed(weights, x, activation, prevent_cse):
    """A train step of scanned layers, each computed again in the backward loop, but for its products."""

    def layer(x, w):
        return x + activation(x @ w["up"]) @ w["down"], None

    each = jax.checkpoint(layer, prevent_cse=prevent_cse, policy=jax.checkpoint_policies.dots_saveable)
    gradients = jax.grad(lambda weights: (lax.scan(each, x, weights)[0] ** 2).mean())(weights)
    return jax.tree.map(lambda w, g: w - 1e-3 * g, weights, gradients)


LAYERS = {"up": leaf(24, 1024, 4096), "down": leaf(24, 4096, 1024)}
for title, activation in (("gelu", jax.nn.gelu), ("relu", jax.nn.relu), ("softmax", jax.nn.softmax)):
    of_layers = partial(checkpointed, activation=activation)
    without = Program(partial(of_layers, prevent_cse=False), (LAYERS, leaf(2048, 1024)), CYCLES, donate=(0,))
    named(f"layers of {title} after a barrier", replace(without, function=partial(of_layers, prevent_cse=True), over=without))
