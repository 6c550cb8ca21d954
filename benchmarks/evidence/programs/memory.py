"""Programs that show how XLA:TPU lays arrays out, what it keeps in the core's own memory, and what it computes again."""

from __future__ import annotations

from functools import partial
from itertools import product

import jax
import jax.numpy as jnp

from benchmarks.evidence.measures import COPYING, FILLING, PEAK, copies, in_fast_memory, ordered
from benchmarks.evidence.program import BF16, F32, SPLIT, Program, leaf, named, program

MIB = 2**20

# -- the core's own memory -------------------------------------------------------------------------------------------------

for kind, fits in (("v5e:1x1", 112), ("v6e:1x1", 95), ("v5p:1x1x1", 47)):
    for size in (fits, fits + 1):
        rows = size * MIB // 4 // 2048
        measure = in_fast_memory(f"f32[{rows},4,512]")
        named(
            f"{size} MiB that are sorted on {kind[:3]}",
            Program(lambda x: jnp.sort(x * 2, axis=0).sum(0), (leaf(rows, 4, 512, dtype=F32),), measure, kind),
        )

# -- sorts -----------------------------------------------------------------------------------------------------------------

for name, function, dtype in (
    ("columns that are sorted", lambda x: jnp.sort(x, axis=0), F32),
    ("rows that are sorted", lambda x: jnp.sort(x, axis=1), F32),
    ("rows in bfloat16 that are sorted", lambda x: jnp.sort(x, axis=1), BF16),
    ("rows that an unstable sort sorts", lambda x: jax.lax.sort(x, dimension=1, is_stable=False), F32),
    ("positions of sorted rows", lambda x: jnp.argsort(x, axis=1), F32),
    ("medians of rows", lambda x: jnp.median(x, axis=1), F32),
):
    for rows, size in ((4096, "small"), (65536, "large")):
        named(f"{size} {name}", Program(function, (leaf(rows, 1024, dtype=dtype),), PEAK))

# -- tiles -----------------------------------------------------------------------------------------------------------------

for shape in ((65536, 5), (65536, 3), (65536, 2), (1001, 1025)):
    named(f"tiles of {shape[0]} x {shape[1]} numbers", Program(jnp.sin, (leaf(*shape, dtype=F32),), PEAK))


@program(PEAK, leaf(512, 4, 49, 32), leaf(512, 4, 49, 32))
def tiles_of_attention_to_49_positions(x, y):
    return jnp.einsum("bhqd,bhkd->bhqk", x, y)


@program(PEAK, leaf(4, 128, 128, 96), leaf(3, 3, 96, 160))
def tiles_of_a_convolution_to_160_features(x, kernel):
    return jax.lax.conv_general_dilated(x, kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))


# -- tables of short rows --------------------------------------------------------------------------------------------------


def looked_up(table, places):
    return table[places]


for width, dtype in ((8, F32), (16, F32), (32, F32), (32, BF16)):
    itemsize = jnp.dtype(dtype).itemsize
    wasted = (128 - width) * itemsize
    for share in (0.98, 1.02):
        rows = int(share * 128 * MIB / wasted)
        kind = {2: "bf16", 4: "f32"}[itemsize]
        named(
            f"{rows} rows of {width} looked up in {kind}",
            Program(looked_up, (leaf(rows, width, dtype=dtype), leaf(1024, dtype=jnp.int32)), copies(f"{kind}[{rows},{width}]")),
        )


def added_to(table, places, rows):
    return table.at[places].add(rows)


def embedded(table, places, y):
    """The gradient of an embedding that is read twice."""
    return jax.grad(lambda table: (jnp.sin(table[places]) * y).sum())(table)


def summed_by_kind(places, rows, kinds=400_000):
    return jax.ops.segment_sum(rows, places, kinds)


TABLE, PLACES, FOUND = leaf(400_000, 64, dtype=F32), leaf(4096, dtype=jnp.int32), leaf(4096, 64, dtype=F32)
for title, function, args in (
    ("rows of 64 that are added to a table", added_to, (TABLE, PLACES, FOUND)),
    ("the gradient of rows of 64", embedded, (TABLE, PLACES, FOUND)),
    ("sums of rows of 64 by kind", summed_by_kind, (PLACES, FOUND)),
):
    named(title, Program(function, args, PEAK))

for (width, dtype), share in product(((4, F32), (32, F32), (4, BF16)), (0.049, 0.051)):  # of the memory, in rows of whole tiles
    kinds = int(share * 16 * 1024 * MIB / (128 * jnp.dtype(dtype).itemsize))
    args = (leaf(kinds // 200, dtype=jnp.int32), leaf(kinds // 200, width, dtype=dtype))
    title = f"{kinds} sums of {kinds // 200} rows of {width} in {jnp.dtype(dtype)}"
    named(title, Program(partial(summed_by_kind, kinds=kinds), args, PEAK))

# -- copies of tables -----------------------------------------------------------------------------------------------------------

for (kinds, added), width, dtype in product(((1 << 20, 8192), (1 << 15, 1024)), (8, 64), (F32, BF16)):
    function, args = partial(summed_by_kind, kinds=kinds), (leaf(added, dtype=jnp.int32), leaf(added, width, dtype=dtype))
    named(f"{kinds} sums of {added} rows of {width} in {jnp.dtype(dtype)}", Program(function, args, COPYING))

LARGE = ((700_000, 48, 1750), (700_000, 48, 1900), (400_000, 20, 1300), (400_000, 20, 1400), (1_000_000, 8, 3800), (1_000_000, 8, 4000))
for kinds, width, added in LARGE:
    args = leaf(added, dtype=jnp.int32), leaf(added, width, dtype=F32)
    measure = copies(f"f32[{kinds},{width}]")
    named(f"{kinds} sums of {added} rows of {width}", Program(partial(summed_by_kind, kinds=kinds), args, measure))

MILLION = 1 << 20
FILLED = ((MILLION, 8, 2048), (MILLION, 8, 16384), (MILLION, 64, 16384), (MILLION, 8, 40_000), (100_000, 128, 2500), (100_000, 128, 3500))
for kinds, width, added in FILLED:
    args = leaf(added, dtype=jnp.int32), leaf(added, width, dtype=F32)
    named(f"zeros for {kinds} sums of {added} rows of {width}", Program(partial(summed_by_kind, kinds=kinds), args, FILLING))

named("a table of 1048576 rows of 64 looked up", Program(looked_up, (leaf(1 << 20, 64, dtype=F32), leaf(1024, dtype=jnp.int32)), COPYING))

# -- updates of tables -------------------------------------------------------------------------------------------------------


def gradient_descent(table, _, gradient):
    return table - 0.1 * gradient


def rmsprop(table, moment, gradient):
    moment = 0.9 * moment + 0.1 * gradient**2
    return table - 0.1 * gradient * jax.lax.rsqrt(moment + 1e-7), moment


def adagrad(table, moment, gradient):
    moment = moment + gradient**2
    return table - 0.1 * gradient * jnp.where(moment > 0, jax.lax.rsqrt(moment + 1e-7), 1.0), moment


def projected(table, _, gradient):
    """Gradient descent that keeps the table positive."""
    return jnp.maximum(table - 0.1 * gradient, 0.0)


def with_momentum(table, moment, gradient):
    moment = gradient + 0.9 * moment
    return table - 0.1 * moment, moment


def updated(update):
    def step(table, moment, places, y):
        return update(table, moment, jax.grad(lambda table: jnp.mean(jnp.sin(table[places]) * y))(table))

    return step


SHORT_ROWS, MOMENT = leaf(250_000, 16, dtype=F32), leaf(250_000, 16, dtype=F32)
for update in (gradient_descent, rmsprop, adagrad, projected, with_momentum):
    args = SHORT_ROWS, MOMENT, leaf(8192, dtype=jnp.int32), leaf(8192, 16, dtype=F32)
    named(f"a table of rows of 16 after {update.__name__}", Program(updated(update), args, PEAK))

# -- stacks that replace arguments -----------------------------------------------------------------------------------------


def cache_in_slices(cache, x):
    """Layers that read their slices of a cache and stack new ones."""

    def layer(x, old):
        new = old.at[3].set(x)
        return jnp.tanh(x + new.sum(0)), new

    return jax.lax.scan(layer, x, cache)[::-1]


def carried_cache(cache, x):
    """The same with the cache as a carry, of which each layer replaces its slice."""

    def layer(carry, k):
        x, cache = carry
        new = cache[k].at[3].set(x)
        return (jnp.tanh(x + new.sum(0)), cache.at[k].set(new)), None

    return jax.lax.scan(layer, (x, cache), jnp.arange(len(cache)))[0][::-1]


def updated_in_slices(weights, gradients):
    """Updates of weights, layer by layer."""
    return jax.lax.scan(lambda total, layer: (total + layer[1].sum(), layer[0] - layer[1]), 0.0, (weights, gradients))[::-1]


STACK = leaf(8, 1024, 4096, dtype=F32)  # 128 MiB
for target, on in (("", "v5e:1x1"), (" on GPUs", "h100:1")):
    for title, function, beside in (
        ("a donated cache that layers read and stack in slices", cache_in_slices, leaf(4096, dtype=F32)),
        ("a donated cache that layers carry", carried_cache, leaf(4096, dtype=F32)),
        ("donated weights that are updated in slices", updated_in_slices, STACK),
    ):
        named(title + target, Program(function, (STACK, beside), PEAK, on, donate=(0,)))

# -- what is computed again ------------------------------------------------------------------------------------------------


def gradients_of(layer):
    """The gradients of a stack of layers, beside an argument that takes most of the memory."""

    def program(weights, x, large):
        def loss(weights):
            y = x
            for weight in weights:
                y = layer(y, weight)
            return y.astype(F32).sum()

        return jax.grad(loss)(weights), large[0, 0]

    return program


def product(y, weight):
    return jnp.tanh(y @ weight)


def gated(y, weight):
    return jax.nn.silu(y @ weight) * y


def added(y, weight):
    return y + jnp.tanh(jnp.sin(y) @ weight)


LAYERS, ROWS, WIDTH = 48, 2**16, 1024  # 128 MiB a layer
TOTAL = 16128  # MiB of a v5e's memory that programs may have
for layer in (product, gated, added):
    values = (1 if layer is product else 2) * LAYERS * 128  # MiB
    for percent in (93, 98, 105, 115):
        large = (TOTAL * percent // 100 - values - LAYERS * 4 - 128) * MIB // 2048
        named(
            f"{LAYERS} {layer.__name__} layers that take {percent} % of the memory",
            Program(gradients_of(layer), ([leaf(WIDTH, WIDTH)] * LAYERS, leaf(ROWS, WIDTH), leaf(large // 8 * 8, 1024)), PEAK),
        )

# -- gathered weights beside their gradients -----------------------------------------------------------------------------------------------


def gradients_of_a_head(loss):
    """The gradients of a loss of logits by a head that is gathered, and by what it reads."""

    def step(x, head, targets):
        found, gradient = jax.grad(lambda head, x: loss(x, jax.lax.all_gather(head, "x", tiled=True), targets), (0, 1))(head, x)
        return found, gradient

    return step


def of_wide_logits(x, head, targets):
    logits = jnp.einsum("bd,vd->bv", x, head, preferred_element_type=F32)
    return (jax.nn.logsumexp(logits, -1) - jnp.take_along_axis(logits, targets[:, None], -1)[:, 0]).sum()


def of_smoothed_labels(x, head, targets):
    logs = jax.nn.log_softmax(jnp.einsum("bd,vd->bv", x, head).astype(F32))
    return -(0.9 * jnp.take_along_axis(logs, targets[:, None], -1)[:, 0] + 0.1 * logs.mean(-1)).sum()


def of_two_rows(x, head, targets):
    logs = jax.nn.log_softmax(jnp.einsum("bd,vd->bv", x, head).astype(F32))
    found = jnp.take_along_axis(logs, targets[:, None], -1)[:, 0]
    return -jax.nn.log_sigmoid(found[::2] - found[1::2]).sum()


for title, loss in (("float32", of_wide_logits), ("smoothed labels", of_smoothed_labels), ("pairs of rows", of_two_rows)):
    args = leaf(16_384, 2048), leaf(65_536, 2048), leaf(16_384, dtype=jnp.int32)
    named(
        f"gradients of a gathered head by logits of {title}",
        Program(gradients_of_a_head(loss), args, PEAK, on="v5e:2x4", specs=((SPLIT, SPLIT, SPLIT), (SPLIT, SPLIT))),
    )


# -- Fourier transforms ------------------------------------------------------------------------------------------------------


def power(transform):
    """What a transform makes, reduced twice, so that it is stored."""

    def program(x):
        made = transform(x)
        return jnp.abs(made).max(), jnp.real(made * jnp.abs(made).max()).sum()

    return program


for title, transform, shape, dtype in [
    ("a transform of 65536 x 1024", jnp.fft.fft, (65536, 1024), jnp.complex64),
    ("a transform of 65536 x 1024 real numbers", jnp.fft.rfft, (65536, 1024), F32),
    ("a transform of 64 x 8192 x 128 real numbers by rows", lambda x: jnp.fft.rfft(x, axis=1), (64, 8192, 128), F32),
    ("a transform to 65536 x 1024 real numbers", lambda x: jnp.fft.irfft(x, n=1024), (65536, 513), jnp.complex64),
    ("a transform of 16384 x 4096", jnp.fft.fft, (16384, 4096), jnp.complex64),
]:
    named(title, Program(power(transform), (leaf(*shape, dtype=dtype),), PEAK))


def multiplied_frequencies(axes, kept, spec):
    """A Fourier operator: the lowest frequencies of an array are each multiplied by a matrix of its own, and brought back."""

    def loss(weights, x):
        made = jnp.fft.rfftn(x, axes=axes)
        places = slice(None), *(slice(kept),) * len(axes)
        low = jnp.einsum(spec, made[places], weights)
        back = jnp.zeros_like(made).at[places].set(low)
        return (jax.nn.gelu(x + jnp.fft.irfftn(back, [x.shape[axis] for axis in axes], axes=axes)) ** 2).mean()

    return jax.value_and_grad(loss, (0, 1))


for title, axes, kept, shape, spec, stored in [
    ("64 features", (1,), 128, (64, 8192, 64), "bxi,xio->bxo", "f32[64,4097,64]{2,0,1"),
    ("32 features", (1,), 128, (64, 8192, 32), "bxi,xio->bxo", "f32[64,4097,32]{0,2,1"),
    ("64 features over two dimensions", (1, 2), 32, (32, 256, 256, 64), "bxyi,xyio->bxyo", "f32[32,64,129,256]{1,0,2,3"),
]:
    weights = leaf(*(kept,) * len(axes), shape[-1], shape[-1], dtype=jnp.complex64)
    operator = multiplied_frequencies(axes, kept, spec)
    named(f"frequencies of {title}", Program(operator, (weights, leaf(*shape, dtype=F32)), ordered(stored)))
