"""Programs that show what XLA:TPU sends, in which type, together with what, and beside what."""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

from autoshard.compilers.tpu.compiler import BUCKET_LIMITS, OVERLAP_OPTIONS
from benchmarks.evidence.measures import COMPILES, COPYING, CYCLES, carried, counted, formed, largest, sent
from benchmarks.evidence.program import BF16, F32, PROGRAMS, SPLIT, WHOLE, Program, leaf, named, program

SLICE = "v5e:2x4"
OTHERS = ("v6e:2x4", "v5p:2x2x2")
STARTS = counted("AsyncCollectiveStart")


def gathered(x):
    """The whole of what devices hold parts of."""
    return lax.all_gather(x, "x", tiled=True)


def convolved(x, kernel):
    """A convolution whose result is as large as its image."""
    return lax.conv_general_dilated(x, kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))


# -- all_reduces that are combined -----------------------------------------------------------------------------------------


@program(largest("all-reduce"), leaf(64, 1024), *[leaf(64, 5120)] * 24, on=SLICE, specs=(SPLIT, WHOLE))
def gradients_of_10_MiB_in_bfloat16(x, *ys):
    return tuple(lax.psum(y.T @ x, "x") for y in ys)


@program(largest("all-reduce"), leaf(64, 1024), *[leaf(64, 10240)] * 8, on=SLICE, specs=(SPLIT, WHOLE))
def gradients_of_40_MiB_in_float32(x, *ys):
    return tuple(lax.psum(jnp.dot(y.T, x, preferred_element_type=F32), "x") for y in ys)


@program(largest("all-reduce"), *[leaf(64, 10 * 2**18, dtype=F32)] * 24, on=SLICE, specs=(SPLIT, WHOLE))
def sums_of_10_MiB(*ys):
    return tuple(lax.psum(y.sum(0), "x") for y in ys)


@program(largest("all-reduce"), leaf(8192, 2048), *[leaf(2048, 2048)] * 24, on=SLICE, specs=((SPLIT, *[WHOLE] * 24), WHOLE))
def a_perceptron_of_24_layers(x, *weights):
    def loss(weights):
        y = x
        for weight in weights:
            y = jnp.tanh(y @ weight)
        return y.astype(F32).sum()

    return [lax.psum(gradient, "x") for gradient in jax.grad(loss)(weights)]


BUCKET = dict.fromkeys(BUCKET_LIMITS, 50 * 2**20)
for title in ("gradients of 10 MiB in bfloat16", "gradients of 40 MiB in float32", "sums of 10 MiB"):
    named(f"{title}, in buckets of 50 MiB", replace(PROGRAMS[title], options=BUCKET))

# -- what is rounded before it is sent -------------------------------------------------------------------------------------

WEIGHT = leaf(1024, 1024, dtype=F32)
ROWS = leaf(8192, 1024, dtype=F32)


@program(sent("all-gather"), ROWS, WEIGHT, on=SLICE, specs=(SPLIT, SPLIT))
def a_float32_weight_of_a_product(x, weight):
    return x @ gathered(weight)


@program(sent("all-gather"), ROWS, WEIGHT, on=SLICE, specs=(SPLIT, SPLIT))
def a_float32_weight_multiplied_twice(x, weight):
    whole = gathered(weight)
    return jnp.tanh(x @ whole) @ whole.T


IMAGES, KERNEL = leaf(64, 32, 32, 128, dtype=F32), leaf(3, 3, 128, 128, dtype=F32)


@program(sent("all-gather"), IMAGES, KERNEL, on=SLICE, specs=((SPLIT, P(None, None, "x")), SPLIT))
def a_float32_kernel_of_a_convolution(x, kernel):
    return convolved(x, lax.all_gather(kernel, "x", axis=2, tiled=True))


MATRICES = leaf(64, 128, 512, dtype=F32), leaf(64, 512, 256, dtype=F32)


@program(sent("all-gather"), *MATRICES, on=SLICE, specs=((WHOLE, SPLIT), WHOLE))
def float32_weights_of_a_batched_product(x, weight):
    return jnp.einsum("bik,bkj->bij", x, gathered(weight))


@program(sent("all-gather"), ROWS, WEIGHT, on=SLICE, specs=(SPLIT, (SPLIT, WHOLE)))
def a_float32_weight_that_a_sum_reads_too(x, weight):
    whole = gathered(weight)
    return x @ whole, (whole * whole).sum(0)


# -- what is sent beside compute -------------------------------------------------------------------------------------------

WIDE, SQUARE = leaf(65536, 2048), leaf(2048, 2048)


def two_layers(x, up, down):
    return jnp.tanh(x @ gathered(up)) @ gathered(down)


def gated(x, gate, up, down):
    return (jax.nn.silu(x @ gathered(gate)) * (x @ gathered(up))) @ gathered(down)


def convolutions(x, first, second):
    return convolved(jnp.tanh(convolved(x, gathered(first)[None, None])), gathered(second)[None, None])


GATHERING = {
    "two gathered layers": (two_layers, (WIDE, SQUARE, SQUARE)),
    "a gathered gated layer": (gated, (WIDE, SQUARE, SQUARE, SQUARE)),
    "two gathered convolutions": (convolutions, (leaf(128, 32, 32, 512), leaf(512, 512), leaf(512, 512))),
}
for title, (function, args) in GATHERING.items():
    named(title, Program(function, args, STARTS, SLICE, (SPLIT, SPLIT)))
    named(f"{title}, by what carries them", Program(function, args, carried("all-gather"), SLICE, (SPLIT, SPLIT)))
    for cluster in OTHERS:
        named(f"{title} on {cluster[:3]}", Program(function, args, STARTS, cluster, (SPLIT, SPLIT)))


for cluster in ("v5p:4x4x4", "v5p:4x4x8", "v5p:2x4x4"):
    for title, (function, args) in GATHERING.items():
        named(f"{title} over {cluster}", Program(function, args, largest("all-reduce"), cluster, (SPLIT, SPLIT)))


def ring(x):
    return lax.ppermute(x, "x", [(k, (k + 1) % 8) for k in range(8)])


def shifted_rows(x, weight):
    return x @ weight, ring(x) @ weight


def shifted_halo(x):
    return convolved(jnp.concatenate([ring(x[:, -1:]), x], 1), jnp.ones((3, 3, 128, 128), x.dtype))


def shifted_sums(x):
    return jnp.sin(x).sum(0, keepdims=True) + ring(jnp.cos(x)).max()


for cluster in (SLICE, *OTHERS):
    for title, function, args in (
        ("rows round a ring", shifted_rows, (WIDE, SQUARE)),
        ("a halo", shifted_halo, (leaf(8, 256, 256, 128),)),
        ("a permute beside sums", shifted_sums, (WIDE,)),
    ):
        specs = ((SPLIT, WHOLE) if len(args) > 1 else SPLIT, SPLIT)
        named(f"{title} on {cluster[:3]}", Program(function, args, counted("collective-permute-start("), cluster, specs))


def scattered_gradients(x, *weights):
    def loss(weights):
        y = x
        for weight in weights:
            y = jnp.tanh(y @ gathered(weight))
        return y.astype(F32).sum()

    return jax.grad(loss)(weights)


LAYERS = leaf(512, 1024), *[leaf(1024, 1024)] * 6
SCATTERED = Program(scattered_gradients, LAYERS, largest("reduce-scatter"), SLICE, (SPLIT, SPLIT), BUCKET)
named("scattered gradients, in buckets of 50 MiB", SCATTERED)

for title, extra in (("", {}), (" with options", OVERLAP_OPTIONS["v5e"])):
    for depth, width in ((2, 4096), (4, 2048), (6, 1024)):
        named(
            f"{depth} layers of {width}{title}",
            Program(scattered_gradients, (leaf(65536, width), *[leaf(width, width)] * depth), STARTS, SLICE, (SPLIT, SPLIT), extra),
        )

# -- reduce_scatters that are formed ---------------------------------------------------------------------------------------


def scattered_rows(x, y):
    return lax.psum_scatter(x.T @ y, "x", tiled=True)


for rows, columns in ((1024, 1024), (64, 1024), (8, 768), (32, 1024), (5120, 200), (128 * 8, 12)):
    for dtype in (BF16, F32):
        args = leaf(512, rows, dtype=dtype), leaf(512, columns, dtype=dtype)
        named(
            f"a {jnp.dtype(dtype).name} gradient of {rows} x {columns} scattered over 8",
            Program(scattered_rows, args, formed("reduce-scatter"), SLICE, (SPLIT, SPLIT)),
        )

# -- all_to_alls -----------------------------------------------------------------------------------------------------------


def exchanged(split, concat):
    return lambda x: lax.all_to_all(x * 2, "x", split, concat, tiled=True) + 1


# Reads and writes as many bytes of float32 as a device has of each operand, so two passes.
TWO_PASSES = Program(lambda x: x * 2, (leaf(4096, 8192, dtype=F32),), CYCLES)

for title, shape, split, concat in (
    ("rows become columns", (65536, 8192), 1, 0),
    ("columns become rows", (65536, 8192), 0, 1),
    ("heads become positions", (64, 4096, 16, 128), 2, 1),
    ("experts become tokens", (64, 8192, 1024), 0, 1),
    ("tokens become experts", (64, 8192, 1024), 1, 0),
):
    before, after = (P(*("x" if dim == wanted else None for dim in range(len(shape)))) for wanted in (concat, split))
    how = Program(exchanged(split, concat), (leaf(*shape),), COPYING, SLICE, (before, after), over=TWO_PASSES)
    named(f"{title} by an all_to_all", how)

# -- rows of a batched product ---------------------------------------------------------------------------------------------


def beside(put, product="bid,bjd->bij"):
    """A product of rows, the columns of which are split, the first of them sent and the others looked up."""

    def function(x, y, z, table, places):
        own = lax.all_to_all(jnp.tanh(x), "x", 1, 0, tiled=True)
        return lax.psum(jnp.einsum(product, put(own, y, table[places]), z), "x")

    return function


for title, put, product in (
    ("a row stacked on one that is looked up", lambda own, _, found: jnp.stack([own, found], 1), "bid,bjd->bij"),
    ("a row joined with one that is looked up", lambda own, _, found: jnp.concatenate([own[:, None], found[:, None]], 1), "bid,bjd->bij"),
    ("a row stacked on the sine of one", lambda own, _, found: jnp.stack([own, jnp.sin(found)], 1), "bid,bjd->bij"),
    ("a row stacked on an argument", lambda own, given, _: jnp.stack([own, given], 1), "bid,bjd->bij"),
    ("rows of a plain product", lambda own, _, found: jnp.stack([own, found], 1), "bid,cjd->bicj"),
):
    each = leaf(1024, 128, dtype=F32)
    columns = P(None, "x")
    args = each, each, leaf(1024, 3, 128, dtype=F32), leaf(1000, 128, dtype=F32), leaf(1024, dtype=jnp.int32)
    specs = (SPLIT, columns, P(None, None, "x"), columns, WHOLE), WHOLE
    named(title, Program(beside(put, product), args, sent("all-to-all"), SLICE, specs))

# -- rings -----------------------------------------------------------------------------------------------------------------


def around(n):
    """A product of rows that go round a ring, block by block."""

    def function(x, weight):
        blocks = []
        for _ in range(n):
            blocks.append(x @ weight)
            x = lax.ppermute(x, "x", [(k, (k + 1) % n) for k in range(n)])
        return jnp.concatenate(blocks)

    return function


for n, cluster in ((4, "v5e:2x2"), (8, "v5e:2x4"), (16, "v5e:4x4")):
    specs = (SPLIT, P(None, "x")), P(None, "x")
    named(f"a ring of {n} blocks", Program(around(n), (leaf(8192, 1024), leaf(1024, 4096)), counted("convolution("), cluster, specs))


# -- element types -----------------------------------------------------------------------------------------------------------


def scattered(x):
    """The parts of a sum over devices."""
    return lax.psum_scatter(x, "x", tiled=True)


def of_type(name: str, function, dtype, on: str) -> None:
    """Whether a collective of an element type compiles."""
    named(name, Program(function, (leaf(1024, 256, dtype=dtype),), COMPILES, on, (SPLIT, SPLIT)))


of_type("a scattered sum of complex numbers", scattered, jnp.complex64, SLICE)
of_type("a scattered sum of their parts", lambda x: (scattered(x.real), scattered(x.imag)), jnp.complex64, SLICE)
of_type("an all_reduce of complex numbers", lambda x: lax.psum(x, "x"), jnp.complex64, SLICE)
for _kind in ("e4m3", "e3m4", "e4m3fn", "e5m2fnuz"):
    of_type(f"shards of float8_{_kind} gathered", gathered, jnp.dtype(f"float8_{_kind}"), "h100:4x1")
    of_type(f"a sum of float8_{_kind}", lambda x: lax.psum(x, "x"), jnp.dtype(f"float8_{_kind}"), "h100:4x1")
