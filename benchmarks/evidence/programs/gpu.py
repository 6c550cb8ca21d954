"""Programs that show what XLA:GPU keeps, combines and puts in which order."""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
import optax
from jax import lax

from autoshard.compilers.gpu import BUCKET_LIMITS
from benchmarks.evidence.measures import PEAK, after_the_last, formed, largest, stored, times_the_rows
from benchmarks.evidence.program import BF16, F32, SPLIT, WHOLE, Program, leaf, named, program
from benchmarks.evidence.programs.kernels import GROUPED, KEPT, KEYS, QUERIES, gradients, grouped_programs

LAST = after_the_last("bf16[2048,2048]", "bf16[8192,2048]")
ONE, HOST = "h100:1", "h100:8"
BUCKET = dict.fromkeys(BUCKET_LIMITS, 12 * 2**20)

# -- functions that are kept -----------------------------------------------------------------------------------------------


def read_by_two_products(function):
    """A function of a product's result that another product and another kernel read."""

    def program(x, w):
        h = x @ w
        a = function(h)
        return (a + 1) * ((a * h) @ w)

    return program


FUNCTIONS = {
    "tanh": jnp.tanh,
    "sine": jnp.sin,
    "cosine": jnp.cos,
    "tangent": jnp.tan,
    "power": lambda x: x**1.7,
    "logarithm of 1 + x": jnp.log1p,
    "natural exponential": jnp.exp,
    "logistic": jax.nn.sigmoid,
    "square root": jnp.sqrt,
    "Gauss error function": lax.erf,
}
for title, function in FUNCTIONS.items():
    args = leaf(4096, 4096), leaf(4096, 4096)
    named(f"a {title} that two read", Program(read_by_two_products(function), args, stored("bf16[4096,4096]"), ONE))

# -- values of many sources --------------------------------------------------------------------------------------------------


def sine_of_a_sum(n):
    """Sums of rows of the sine of a sum of so many products."""

    def program(*args):
        return jnp.sin(sum(x @ w for x, w in zip(args[:n], args[n:], strict=True))).astype(F32).sum(-1)

    return program


for n in (4, 6, 12):
    args = (*[leaf(8192, 512)] * n, *[leaf(512, 1024)] * n)
    named(f"the sine of a sum of {n} products on GPUs", Program(sine_of_a_sum(n), args, KEPT, ONE))

# -- all_reduces that are combined -----------------------------------------------------------------------------------------


def products(x, *ys):
    return tuple(lax.psum(jnp.dot(y.T, x, preferred_element_type=x.dtype), "x") for y in ys)


def sums(*ys):
    return tuple(lax.psum(y.sum(0), "x") for y in ys)


for title, function, args in (
    ("gradients of 2 MiB in bfloat16", products, (leaf(64, 1024), *[leaf(64, 1024)] * 40)),
    ("gradients of 4 MiB in float32", products, (leaf(64, 1024, dtype=F32), *[leaf(64, 1024, dtype=F32)] * 20)),
    ("sums of 5 MiB", sums, tuple([leaf(64, 5 * 2**18, dtype=F32)] * 16)),
):
    combined = Program(function, args, largest("all-reduce"), HOST, (SPLIT, WHOLE))
    named(f"{title} on GPUs", combined)
    named(f"{title} on GPUs, in buckets of 12 MiB", replace(combined, options=BUCKET))


def gathered_and_scattered(x, *weights):
    def loss(weights):
        return sum((jnp.tanh(x @ lax.all_gather(weight, "x", tiled=True)) ** 2).sum() for weight in weights)

    return jax.grad(loss)(weights)


for kind in ("all-gather", "reduce-scatter"):
    for title, extra in (("", {}), (", in buckets of 12 MiB", BUCKET)):
        args = leaf(64, 1024, dtype=F32), *[leaf(1024, 1024, dtype=F32)] * 12
        named(f"{kind}s of 4 MiB on GPUs{title}", Program(gathered_and_scattered, args, largest(kind), HOST, (SPLIT, SPLIT), extra))

# -- reduce_scatters that are formed ---------------------------------------------------------------------------------------

COLUMNS, ROWS = [[0, 1, 2, 3], [4, 5, 6, 7]], [[0, 4], [1, 5], [2, 6], [3, 7]]  # of a mesh of 2 x 4


def scattered_rows(x, y):
    return lax.psum_scatter(x.T @ y, "x", tiled=True)


def scattered_twice(x, y):
    rows = lax.psum_scatter(x.T @ y, "x", tiled=True, axis_index_groups=COLUMNS)
    return lax.psum_scatter(rows, "x", scatter_dimension=1, tiled=True, axis_index_groups=ROWS)


for rows, columns in ((1024, 1024), (8, 768), (32, 1024), (5120, 200), (1024, 12)):
    for dtype in (BF16, F32):
        args = leaf(512, rows, dtype=dtype), leaf(512, columns, dtype=dtype)
        title = f"a {jnp.dtype(dtype).name} gradient of {rows} x {columns}"
        for how, function in (("over 8", scattered_rows), ("over 4 and 2", scattered_twice)):
            named(f"{title} scattered {how} on GPUs", Program(function, args, formed("reduce-scatter"), HOST, (SPLIT, SPLIT)))

# -- orders ----------------------------------------------------------------------------------------------------------------


def trained(layer):
    """Gradients that all devices add up."""

    def program(x, *weights):
        def loss(weights):
            y = x
            for weight in weights:
                y = layer(y, weight)
            return y.astype(F32).sum()

        return [lax.psum(gradient, "x") for gradient in jax.grad(loss)(weights)]

    return program


def gated(y, weight):
    return jax.checkpoint(lambda y: jax.nn.silu(y @ weight) * y)(y)


def checkpointed(y, weight):
    return jax.checkpoint(lambda y: jnp.tanh(jnp.sin(y @ weight) @ weight))(y)


def residual(y, weight):
    return y + jax.checkpoint(lambda y: jax.nn.gelu((y / (1 + abs(y))) @ weight))(y)


for device in ("a100:8", "h100:8", "b200:8"):
    for layer in (gated, checkpointed, residual):
        named(
            f"8 {layer.__name__} layers on {device[:4]}",
            Program(trained(layer), (leaf(8 * 8192, 2048), *[leaf(2048, 2048)] * 8), LAST, device, ((SPLIT, *[WHOLE] * 8), WHOLE)),
        )

# -- how much is alive where products wait ------------------------------------------------------------------------------------


def tied(y, weight):
    return y + jax.checkpoint(lambda y: jnp.tanh(y @ weight) @ weight.T)(y)


for device, layer, share in (
    *((device, layer, share) for device in ("h100:8", "b200:8") for layer in (checkpointed, tied) for share in (95, 2)),
    ("h100:8", checkpointed, 3),
):
    args, specs = (leaf(8 * 8192, 2048), *[leaf(2048, 2048)] * 24), ((SPLIT, *[WHOLE] * 24), WHOLE)
    options = {"xla_gpu_memory_limit_slop_factor": share}
    title = f"24 {layer.__name__} layers in {share} % of the memory of {device[:4]}"
    named(title, Program(trained(layer), args, PEAK, device, specs, options))

# -- scatters and lookups ----------------------------------------------------------------------------------------------------


def head(weight, x, labels):
    """The gradient of a loss that looks logits up in float32."""

    def loss(weight):
        logits = (x @ weight).astype(F32)
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

    return jax.grad(loss)(weight)


LABELS = leaf(512, dtype=jnp.int32)
named("a head's logits in float32", Program(head, (leaf(128, 4096), leaf(512, 128), LABELS), stored("f32[512,4096]"), ONE))


@program(stored("f32[512,4096]"), leaf(512, 4096, dtype=F32), LABELS, on=ONE)
def the_gradient_of_looked_up_numbers_and_sines(x, labels):
    return jax.grad(lambda x: (jnp.take_along_axis(x, labels[:, None], 1)[:, 0] * 2 - jnp.sin(x).sum(-1)).sum())(x)


@program(stored("f32[4096,128]"), leaf(4096, 128, dtype=F32), LABELS, on=ONE)
def the_gradient_of_an_embedding_and_its_decay(table, places):
    return jax.grad(lambda table: jnp.sin(table[places]).sum() + (table**2).sum())(table)


# -- scores of queries that share keys ----------------------------------------------------------------------------------------


def plain(scores):
    return scores


def capped(scores):
    return 30 * jnp.tanh(scores / 30)


def shifted(scores):
    return scores + jnp.arange(512, dtype=F32) / 64


for how in (plain, capped, shifted):
    named(f"{how.__name__} scores of grouped queries", Program(gradients(how), (GROUPED, KEYS, KEYS), stored("f32[8,4,4,512,512]"), ONE))
    named(f"{how.__name__} scores of queries", Program(gradients(how), (QUERIES, KEYS, KEYS), stored("f32[8,4,512,512]"), ONE))

# -- products of groups ------------------------------------------------------------------------------------------------------

for title, function, args in grouped_programs(4096, 8):
    named(f"{title.format(8)} on GPUs", Program(function, args, times_the_rows(2 * 4096 * 1024 * 2048), ONE))
    named(f"{title.format(8)} on GPUs, in memory", Program(function, args, PEAK, ONE))

# -- slices of stacks -----------------------------------------------------------------------------------------------------


def scanned_weights(x, weights):
    """Products with the slices of a stack."""
    return lax.scan(lambda x, weight: (jnp.tanh(x @ weight), None), x, weights)[0]


def stacked_products(x, weight):
    """A stack of products, each of which the next trip reads, too."""
    return lax.scan(lambda x, _: (2 * (y := x @ weight), y), x, None, length=6)[1]


def stacked_gradients(weights, x):
    """Gradients of a stack's slices."""
    return jax.grad(lambda weights: (scanned_weights(x, weights).astype(F32) ** 2).sum())(weights)


SCANNED = leaf(512, 1024), leaf(6, 1024, 1024)
for title, function, args, type_text in (
    ("products with a stack's slices", scanned_weights, SCANNED, "bf16[1,1024,1024]"),
    ("products that are stacked", stacked_products, (leaf(512, 1024), leaf(1024, 1024)), "bf16[6,512,1024]"),
    ("gradients of a stack's slices", stacked_gradients, SCANNED[::-1], "bf16[6,1024,1024]"),
):
    named(f"{title} on GPUs", Program(function, args, stored(type_text), ONE))
