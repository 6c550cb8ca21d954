"""Small Pallas kernels, interpreted: the kinds of grids, index maps and bodies that rules are read from."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu


def like(*arrays: jax.Array) -> list[jax.ShapeDtypeStruct]:
    return [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in arrays]


def attention(q, k, v):
    """Attention in blocks of two queries, whose query heads share a key head by twos."""
    batch, heads, length, width = q.shape

    def kernel(q, k, v, o):
        o[0, 0] = jax.nn.softmax(q[0, 0] @ k[0, 0].T) @ v[0, 0]

    rows = pl.BlockSpec((1, 1, 2, width), lambda b, h, i: (b, h, i, 0))
    shared = pl.BlockSpec((1, 1, *k.shape[2:]), lambda b, h, i: (b, h // 2, 0, 0))
    grid = batch, heads, length // 2
    return pl.pallas_call(kernel, grid=grid, in_specs=[rows, shared, shared], out_specs=rows, out_shape=like(q)[0], interpret=True)(q, k, v)


def grouped_sum(x):
    """The sum over each group of heads, of which each program adds one: heads of a group write the same block."""

    def kernel(x, o):
        @pl.when(pl.program_id(1) == 0)
        def _():
            o[...] = jnp.zeros_like(o)

        o[...] += x[0]

    groups, _, width = x.shape
    return pl.pallas_call(
        kernel,
        grid=x.shape[:2],
        in_specs=[pl.BlockSpec((1, 1, width), lambda g, m: (g, m, 0))],
        out_specs=pl.BlockSpec((1, width), lambda g, m: (g, 0)),
        out_shape=jax.ShapeDtypeStruct((groups, width), x.dtype),
        interpret=True,
    )(x)


def product(x, y, declared=None):
    """A product in blocks that are summed in scratch memory."""
    (m, k), n = x.shape, y.shape[1]

    def kernel(x, y, o, scratch):
        @pl.when(pl.program_id(2) == 0)
        def _():
            scratch[...] = jnp.zeros_like(scratch)

        scratch[...] += x[...] @ y[...]

        @pl.when(pl.program_id(2) == pl.num_programs(2) - 1)
        def _():
            o[...] = scratch[...]

    return pl.pallas_call(
        kernel,
        grid=(m // 2, n // 2, k // 2),
        in_specs=[pl.BlockSpec((2, 2), lambda i, j, k: (i, k)), pl.BlockSpec((2, 2), lambda i, j, k: (k, j))],
        out_specs=pl.BlockSpec((2, 2), lambda i, j, k: (i, j)),
        out_shape=jax.ShapeDtypeStruct((m, n), x.dtype),
        scratch_shapes=[pltpu.VMEM((2, 2), x.dtype)],
        compiler_params=declared and pltpu.CompilerParams(dimension_semantics=declared),
        interpret=True,
    )(x, y)


def running_sum(x):
    """The sum of all blocks of a column up to each, which scratch memory passes along the axis inside the one whose position is read."""

    def kernel(x, o, scratch):
        @pl.when(pl.program_id(0) == 0)
        def _():
            scratch[...] = jnp.zeros_like(scratch)

        scratch[...] += x[...]
        o[...] = scratch[...]

    block = pl.BlockSpec((1, 1), lambda i, j: (i, j))
    scratch = [pltpu.VMEM((1, 1), x.dtype)]
    return pl.pallas_call(
        kernel, grid=x.shape, in_specs=[block], out_specs=block, out_shape=like(x)[0], scratch_shapes=scratch, interpret=True
    )(x)


def numbered(x):
    """Rows multiplied by the numbers of their blocks."""

    def kernel(x, o):
        o[...] = x[...] * (pl.program_id(0) + 1)

    block = pl.BlockSpec((2, 2), lambda i, j: (i, j))
    grid = x.shape[0] // 2, x.shape[1] // 2
    return pl.pallas_call(kernel, grid=grid, in_specs=[block], out_specs=block, out_shape=like(x)[0], interpret=True)(x)


def chosen(order, x):
    """The rows of a table in the order of prefetched scalars."""

    def kernel(order, x, o):
        o[...] = x[...]

    spec = pltpu.PrefetchScalarGridSpec(
        num_scalar_prefetch=1,
        grid=(order.size, x.shape[1] // 2),
        in_specs=[pl.BlockSpec((1, 2), lambda i, j, order: (order[i], j))],
        out_specs=pl.BlockSpec((1, 2), lambda i, j, order: (i, j)),
    )
    made = jax.ShapeDtypeStruct((order.size, x.shape[1]), x.dtype)
    return pl.pallas_call(kernel, grid_spec=spec, out_shape=made, interpret=True)(order, x)


def added(x, y):
    """A sum that overwrites its first operand, and the product beside it."""

    def kernel(x, y, total, times):
        total[...] = x[...] + y[...]
        times[...] = x[...] * y[...]

    block = pl.BlockSpec((2, x.shape[1]), lambda i: (i, 0))
    return pl.pallas_call(
        kernel,
        grid=(x.shape[0] // 2,),
        in_specs=[block, block],
        out_specs=[block, block],
        out_shape=like(x, y),
        input_output_aliases={0: 0},
        interpret=True,
    )(x, y)


def skewed(x):
    """Blocks whose row depends on two grid axes."""

    def kernel(x, o):
        o[...] = x[...]

    return pl.pallas_call(
        kernel,
        grid=(2, 4),
        in_specs=[pl.BlockSpec((1, 2), lambda i, j: (i * 4 + j, 0))],
        out_specs=pl.BlockSpec((1, 2), lambda i, j: (i * 4 + j, 0)),
        out_shape=like(x)[0],
        interpret=True,
    )(x)


def paged(lengths, pages, x):
    """The sum of the first rows of an example's pages, whose numbers are prefetched, and as many rows as its length says."""

    def kernel(lengths, pages, x, o):
        example, page = pl.program_id(0), pl.program_id(1)

        @pl.when(page == 0)
        def _():
            o[...] = jnp.zeros_like(o)

        kept = jnp.arange(x.shape[1]) < lengths[example]
        o[...] += jnp.sum(jnp.where(kept[None, :, None], x[...], 0), 1)

    each = pages.size // lengths.size
    spec = pltpu.PrefetchScalarGridSpec(
        num_scalar_prefetch=2,
        grid=(lengths.size, each),
        in_specs=[pl.BlockSpec((1, *x.shape[1:]), lambda i, j, lengths, pages: (pages[i * each + j], 0, 0))],
        out_specs=pl.BlockSpec((1, x.shape[2]), lambda i, j, *_: (i, 0)),
    )
    made = jax.ShapeDtypeStruct((lengths.size, x.shape[2]), x.dtype)
    return pl.pallas_call(kernel, grid_spec=spec, out_shape=made, interpret=True)(lengths, pages, x)


def neighbours(order, x):
    """Rows multiplied by the numbers of this program and of the one before it, which a shard would not have."""

    def kernel(order, x, o):
        i = pl.program_id(0)
        o[...] = x[...] * order[i] * order[jnp.maximum(i - 1, 0)]

    block = pl.BlockSpec((1, x.shape[1]), lambda i, order: (i, 0))
    spec = pltpu.PrefetchScalarGridSpec(num_scalar_prefetch=1, grid=(len(x),), in_specs=[block], out_specs=block)
    return pl.pallas_call(kernel, grid_spec=spec, out_shape=like(x)[0], interpret=True)(order, x)


def grouped_gradient(x, group=2):
    """Sums over groups of heads, in a result that nobody reads in place of scratch memory: emptied where a group begins, per block of rows.

    The block of rows is the outer axis, and its position is read: nothing but the body says that heads pass on nothing.
    """
    heads, rows, width = x.shape

    def kernel(x, o, scratch):
        @pl.when(pl.program_id(1) % group == 0)
        def _():
            scratch[...] = jnp.zeros_like(scratch)

        scratch[...] += x[0] * (pl.program_id(0) + 1)

        @pl.when(pl.program_id(1) % group == group - 1)
        def _():
            o[0] = scratch[...]

    call = pl.pallas_call(
        kernel,
        grid=(rows // 2, heads),
        in_specs=[pl.BlockSpec((1, 2, width), lambda i, h: (h, i, 0))],
        out_specs=[pl.BlockSpec((1, 2, width), lambda i, h: (h // group, i, 0)), pl.BlockSpec((2, width), lambda i, h: (0, 0))],
        out_shape=[jax.ShapeDtypeStruct((heads // group, rows, width), x.dtype), jax.ShapeDtypeStruct((2, width), x.dtype)],
        interpret=True,
    )
    return call(x)[0]


def causal(x, y):
    """Products of blocks of rows with the blocks of columns up to their own, of which others are left out."""
    size = x.shape[0] // 4

    def kernel(x, y, o):
        @pl.when(pl.program_id(1) <= pl.program_id(0))
        def _():
            o[...] = jnp.dot(x[...], y[...])

    rows, columns = pl.BlockSpec((size, x.shape[1]), lambda i, j: (i, 0)), pl.BlockSpec((y.shape[0], size), lambda i, j: (0, j))
    made = jax.ShapeDtypeStruct((x.shape[0], y.shape[1]), x.dtype)
    block = pl.BlockSpec((size, size), lambda i, j: (i, j))
    return pl.pallas_call(kernel, grid=(4, 4), in_specs=[rows, columns], out_specs=block, out_shape=made, interpret=True)(x, y)


def up_to_itself(x, y):
    """The same in one loop for each block of rows, as long as its position says."""
    size = x.shape[0] // 4

    def kernel(x, y, o):
        def add(j, total):
            return total + jnp.dot(x[:, pl.ds(j * size, size)], y[pl.ds(j * size, size), :])

        o[...] = jax.lax.fori_loop(0, pl.program_id(0) + 1, add, jnp.zeros(o.shape, o.dtype))

    rows, everything = pl.BlockSpec((size, x.shape[1]), lambda i: (i, 0)), pl.BlockSpec(y.shape, lambda i: (0, 0))
    made = jax.ShapeDtypeStruct((x.shape[0], y.shape[1]), x.dtype)
    block = pl.BlockSpec((size, y.shape[1]), lambda i: (i, 0))
    return pl.pallas_call(kernel, grid=(4,), in_specs=[rows, everything], out_specs=block, out_shape=made, interpret=True)(x, y)


def cross_entropy(x, labels):
    """The loss of each row in blocks of columns, with running maximum and sum in scratch memory."""
    rows, columns = 2, 4

    def kernel(x, labels, o, most, total, chosen):
        j = pl.program_id(1)

        @pl.when(j == 0)
        def _():
            most[...], total[...], chosen[...] = jnp.full_like(most, -jnp.inf), jnp.zeros_like(total), jnp.zeros_like(chosen)

        new = jnp.maximum(most[...], x[...].max(1, keepdims=True))
        total[...] = total[...] * jnp.exp(most[...] - new) + jnp.exp(x[...] - new).sum(1, keepdims=True)
        most[...] = new
        here = j * columns + jax.lax.broadcasted_iota(jnp.int32, x.shape, 1) == labels[...]
        chosen[...] += jnp.where(here, x[...], 0).sum(1, keepdims=True)

        @pl.when(j == pl.num_programs(1) - 1)
        def _():
            o[...] = most[...] + jnp.log(total[...]) - chosen[...]

    column = pl.BlockSpec((rows, 1), lambda i, j: (i, 0))
    return pl.pallas_call(
        kernel,
        grid=(x.shape[0] // rows, x.shape[1] // columns),
        in_specs=[pl.BlockSpec((rows, columns), lambda i, j: (i, j)), column],
        out_specs=column,
        out_shape=jax.ShapeDtypeStruct((x.shape[0], 1), x.dtype),
        scratch_shapes=[pltpu.VMEM((rows, 1), x.dtype)] * 3,
        interpret=True,
    )(x, labels)


def state_space(x, decay):
    """A recurrence over chunks of each head, whose state is in scratch memory; a head's decay is a number of a whole operand."""

    def kernel(x, decay, o, state):
        @pl.when(pl.program_id(2) == 0)
        def _():
            state[...] = jnp.zeros_like(state)

        o[0, 0, 0] = x[0, 0, 0] + state[...]
        state[...] = state[...] * decay[pl.program_id(1)] + x[0, 0, 0]

    batch, heads, chunks, width = x.shape
    block = pl.BlockSpec((1, 1, 1, width), lambda b, h, c: (b, h, c, 0))
    return pl.pallas_call(
        kernel,
        grid=(batch, heads, chunks),
        in_specs=[block, pl.BlockSpec(memory_space=pltpu.SMEM)],
        out_specs=block,
        out_shape=like(x)[0],
        scratch_shapes=[pltpu.VMEM((width,), x.dtype)],
        interpret=True,
    )(x, decay)


def between(ends, x):
    """Rows multiplied by the distance between prefetched ends, one more of which there is than rows."""

    def kernel(ends, x, o):
        o[...] = x[...] * (ends[pl.program_id(0) + 1] - ends[pl.program_id(0)])

    block = pl.BlockSpec((1, x.shape[1]), lambda i, ends: (i, 0))
    spec = pltpu.PrefetchScalarGridSpec(num_scalar_prefetch=1, grid=(len(x),), in_specs=[block], out_specs=block)
    return pl.pallas_call(kernel, grid_spec=spec, out_shape=like(x)[0], interpret=True)(ends, x)


def edged(n, x):
    """A grid of a length that is known when it runs, and blocks that do not divide the columns."""

    def kernel(x, o):
        o[...] = 2 * x[...]

    block = pl.BlockSpec((2, 4, None), lambda i, j, k: (i, j, k))
    grid = n, pl.cdiv(x.shape[1], 4), x.shape[2]
    return pl.pallas_call(kernel, grid=grid, in_specs=[block], out_specs=block, out_shape=like(x)[0], interpret=True)(x)


def piped(x):
    """A loop over blocks in a kernel of its own making, without a grid."""

    def kernel(x, o):
        block = pl.BlockSpec((2, x.shape[1]), lambda i: (i, 0))

        def double(x, o):
            o[...] = 2 * x[...]

        pltpu.emit_pipeline(double, grid=(x.shape[0] // 2,), in_specs=[block], out_specs=[block])(x, o)

    everything = pl.BlockSpec(memory_space=pl.ANY)
    return pl.pallas_call(kernel, in_specs=[everything], out_specs=everything, out_shape=like(x)[0])(x)


def on_cores(x):
    """A kernel for each core of a TPU."""
    mesh = pltpu.create_tensorcore_mesh("core", num_cores=1)

    @pl.kernel(out_type=like(x)[0], mesh=mesh, scratch_types=[pltpu.VMEM(x.shape, x.dtype)])
    def kernel(x, o, near):
        pltpu.sync_copy(x, near)
        near[...] = near[...] @ near[...]
        pltpu.sync_copy(near, o)

    return kernel(x)


def masked(mask, x, y):
    """Products of the blocks that a prefetched mask names."""
    size = x.shape[0] // 4

    def kernel(mask, x, y, o):
        @pl.when(mask[pl.program_id(0), pl.program_id(1)] > 0)
        def _():
            o[...] = jnp.dot(x[...], y[...])

    spec = pltpu.PrefetchScalarGridSpec(
        num_scalar_prefetch=1,
        grid=(4, 4),
        in_specs=[pl.BlockSpec((size, x.shape[1]), lambda i, j, _: (i, 0)), pl.BlockSpec((y.shape[0], size), lambda i, j, _: (0, j))],
        out_specs=pl.BlockSpec((size, size), lambda i, j, _: (i, j)),
    )
    made = jax.ShapeDtypeStruct((x.shape[0], y.shape[1]), x.dtype)
    return pl.pallas_call(kernel, grid_spec=spec, out_shape=made, interpret=True)(mask, x, y)


def segment_sum(first, x):
    """The sum of the rows of a segment up to each, which scratch memory passes on to the next row unless that begins a segment."""

    def kernel(first, x, o, scratch):
        @pl.when(first[pl.program_id(0)] > 0)
        def _():
            scratch[...] = jnp.zeros_like(scratch)

        scratch[...] += x[...]
        o[...] = scratch[...]

    block = pl.BlockSpec((1, x.shape[1]), lambda i, first: (i, 0))
    scratch = [pltpu.VMEM((1, x.shape[1]), x.dtype)]
    spec = pltpu.PrefetchScalarGridSpec(
        num_scalar_prefetch=1, grid=(len(x),), in_specs=[block], out_specs=block, scratch_shapes=scratch
    )
    return pl.pallas_call(kernel, grid_spec=spec, out_shape=like(x)[0], interpret=True)(first, x)


def segment_blocks(first, x):
    """The same where each block of rows has its flag beside it, so that the body uses no position at all."""

    def kernel(first, x, o, scratch):
        @pl.when(first[0, 0] > 0)
        def _():
            scratch[...] = jnp.zeros_like(scratch)

        scratch[...] += x[...]
        o[...] = scratch[...]

    flag, block = (pl.BlockSpec((1, width), lambda i: (i, 0)) for width in (1, x.shape[1]))
    made, scratch = like(x)[0], [pltpu.VMEM((1, x.shape[1]), x.dtype)]
    specs = {"in_specs": [flag, block], "out_specs": block, "out_shape": made, "scratch_shapes": scratch}
    return pl.pallas_call(kernel, grid=(len(x),), interpret=True, **specs)(first, x)
