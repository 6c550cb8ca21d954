"""Padded dimensions: programs with them compute what they compute without, whatever is in the padding."""

import random

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fuzz import random_program
from fuzz.checking import MESH
from jax import lax
from programs import tied_step
from rewrite.padding_checks import check_padding

from autoshard.rewrite.extents import divided, extent


def f32(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def i32(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.int32)


@pytest.mark.sample(3)
@pytest.mark.parametrize("number", range(8))
def test_any_program_keeps_its_numbers(number):
    """Random programs, of which random dimensions are padded, at their end or within; padding of arguments is NaN."""
    program = random_program(random.Random(f"padding {number}"))
    check_padding(program.function(), *program.args(), by=random.Random(number), axis_names=MESH.names)


@pytest.mark.slow
@pytest.mark.parametrize("number", range(1000))
def test_a_thousand_programs_keep_their_numbers(number):
    """The same at length."""
    program = random_program(random.Random(f"paddings {number}"))
    check_padding(program.function(), *program.args(), by=random.Random(number), axis_names=MESH.names)


def test_padding_of_a_tiled_dimension_may_be_of_whole_copies():
    """Three rows twice are padded as three rows five times."""
    _, plan = check_padding(lambda x, y: lax.tile(x, (2, 1)) * y, f32(3, 4), f32(6, 4), by={"y": {0: 15}})
    assert len(plan.moves) == 2


MIXING = {
    "sum": lambda x: jnp.sum(x, 1),
    "prod": lambda x: jnp.prod(x, 1),
    "max": lambda x: jnp.max(x, 1),
    "min": lambda x: jnp.min(x, 1),
    "argmax": lambda x: jnp.argmax(x, 1),
    "argmin": lambda x: jnp.argmin(x, 1),
    "any": lambda x: jnp.any(x > 0.5, 1),
    "all": lambda x: jnp.all(x < 3, 1),
    "integers": lambda x: jnp.max((x * 9).astype(jnp.int8), 1),
    "logsumexp": lambda x: jax.nn.logsumexp(x, 1),
    "softmax": lambda x: jax.nn.softmax(x, 1),
    "log_softmax": lambda x: jax.nn.log_softmax(x, 1),
    "layer norm": lambda x: (x - x.mean(1, keepdims=True)) / x.std(1, keepdims=True),
    "variance": lambda x: jnp.var(x, 1),
    "cumsum": lambda x: jnp.cumsum(x, 1),
    "reversed cumsum": lambda x: lax.cumsum(x, 1, reverse=True),
    "reversed cummax": lambda x: lax.cummax(x, 1, reverse=True),
    "cumlogsumexp": lambda x: lax.cumlogsumexp(x, 1, reverse=True),
    "sort": lambda x: jnp.sort(x, 1),
    "top_k": lambda x: lax.top_k(-jnp.abs(x), 3),
    "median": lambda x: jnp.median(x, 1),
    "reversal": lambda x: jnp.flip(x, 1),
    "fft": lambda x: jnp.abs(jnp.fft.fft(x, axis=1)),
    "roll": lambda x: jnp.roll(x, 2, 1),
    "neighbours": lambda x: x[:, 1:] - x[:, :-1],
    "concatenation": lambda x: jnp.concatenate([x, x], 1),
    "window": lambda x: lax.reduce_window(x, -jnp.inf, lax.max, (1, 3), (1, 1), "SAME"),
    "mean of windows": lambda x: lax.reduce_window(x, 0.0, lax.add, (1, 3), (1, 1), "SAME"),
    "gram": lambda x: x.T @ x,
    "inner": lambda x: x @ x.T,
    "division": lambda x: jnp.sum(1 / x, 1),
    "flattened": lambda x: jnp.cumsum(x.reshape(-1)),
    "split": lambda x: jnp.sum(x.reshape(3, 2, 7), 1),
    "bits": lambda x: jnp.sum(lax.bitcast_convert_type(x, jnp.int32) >> 20, 1),
    "positions": lambda x: x * jnp.arange(7) + jnp.arange(6)[:, None],
    "convolution": lambda x: jnp.convolve(x[0], jnp.ones(3), "same"),
    "dynamic slice": lambda x: lax.dynamic_slice(x, (2, 5), (3, 4)),
    "dynamic update": lambda x: lax.dynamic_update_slice(x, jnp.ones((6, 1)), (0, 9)),
    "outside": lambda x: x.at[:, 7].get(mode="fill", fill_value=5) + x.at[:, 8].get(mode="clip"),
    "scatter outside": lambda x: x.at[:, jnp.array([7, 3])].add(1.0, mode="drop").at[:, 8].set(2.0, mode="clip"),
    "wrapped": lambda x: x[:, jnp.array([-1, -7])],
    "triangle": lambda x: jnp.linalg.cholesky(x @ x.T + jnp.eye(6)),
}


@pytest.mark.sample(1)
@pytest.mark.parametrize("part", range(4))
def test_operations_that_mix_a_padded_dimension(part):
    """Forward and, of floats, backward, with padding in both dimensions."""
    names = list(MIXING)[part::4]

    def fn(x):
        def loss(x):
            floats = [y for name in names for y in jax.tree.leaves(MIXING[name](x)) if jnp.issubdtype(y.dtype, jnp.inexact)]
            return sum((jnp.sum(jnp.sin(y)) for y in floats), 0.0 * jnp.sum(x))

        return {name: MIXING[name](x) for name in names}, jax.grad(loss)(x)

    check_padding(fn, f32(6, 7), by={"x": {0: 8, 1: 12}})


def test_operations_run_padded():
    """What is combined is masked rather than cut: no array of a train step of odd sizes keeps its own size but the loss."""

    weights = {"embed": f32(23, 5), "up": f32(5, 19), "down": f32(19, 5)}
    by = {"weights['embed']": {0: 24, 1: 8}, "weights['up']": {1: 32}, "tokens": {0: 4, 1: 16}}
    new, _ = check_padding(tied_step, weights, i32(3, 11), i32(3, 11), by=by)
    sizes = {size for value in new.graph.values for size in value.shape}
    assert sizes.isdisjoint({23, 5, 19, 3, 11})
    assert not any(op.primitive in ("pad", "slice") for op in new.graph.walk())


def test_only_what_is_not_known_is_masked():
    """Zeros that are written in the program are zeros in padding, too, but zero times what is not known is not."""

    def fn(x):
        zeros = jnp.zeros((5, 7)) * 2.0
        return jnp.sum(zeros, 1), jnp.sum(x, 0), zeros.T @ (zeros + x[:, None])

    new, _ = check_padding(fn, f32(5), by={"x": {0: 8}})
    assert sum(op.primitive == "select_n" for op in new.graph.walk()) == 2  # of the sum of x, and of the second factor


@pytest.mark.slow
def test_random_bits_are_those_without_padding():
    """Of padded dimensions, the first and others, by typed and by raw keys."""

    def fn(x, seed):
        key = jax.random.key(seed)
        noise = jax.random.normal(key, (5, 7)) + jax.random.uniform(key, (5, 7)) + jax.random.bernoulli(jax.random.PRNGKey(1), 0.5, (5, 7))
        return x * noise, jax.random.permutation(key, x, axis=1)

    check_padding(fn, f32(5, 7), jax.ShapeDtypeStruct((), jnp.int32), by={"x": {0: 8, 1: 8}})
    check_padding(lambda x: x * jax.random.normal(jax.random.key(0), (5, 6)), f32(5, 6), by={"x": {1: [(2, 2), (3, 4)]}})


def test_loops_branches_and_checkpoints():
    """Carries, slices, stacked results and operands of branches are padded; the dimension that a loop goes along is not."""

    def fn(w, x, n):
        def layer(carry, each):
            y = jax.checkpoint(lambda c: jnp.tanh(c @ w + jnp.sum(each)))(carry)
            return y, jnp.max(y, 1)

        last, stacked = lax.scan(layer, x, jnp.stack([x, 2 * x, 3 * x]))
        last = lax.cond(n > 0, lambda z: z - jnp.mean(z, 0), lambda z: z * 2, last)
        last, _ = lax.while_loop(lambda c: (jnp.sum(c[0]) < 100) & (c[1] < 9), lambda c: (c[0] + jnp.abs(c[0]), c[1] + 1), (last, n))
        return jnp.sum(last, 0), stacked, jax.vmap(lambda r: lax.fori_loop(0, 3, lambda i, a: a * 0.5 + jnp.sum(r), r))(x)

    by = {"w": {0: 8}, "x": {0: 4}}
    new, _ = check_padding(fn, f32(5, 5), f32(3, 5), jax.ShapeDtypeStruct((), jnp.int32), by=by)
    (scan, *_) = (op for op in new.graph.ops if op.primitive == "scan")
    assert {new.graph.values[value].shape for value in scan.bodies[0].inputs} >= {(8, 8), (4, 8)}
    grad = jax.grad(lambda w, x: jnp.sum(fn(w, x, 1)[1]))
    check_padding(grad, f32(5, 5), f32(3, 5), by=by)


def test_padding_within_a_dimension():
    """Of 3 x 5 heads of 2 elements, five heads are padded to eight in each third; matrices around keep whole heads together."""

    def fn(w, x):
        q, k, v = jnp.moveaxis((x @ w).reshape(4, 3, 5, 2), 1, 0)
        scores = jax.nn.softmax(jnp.einsum("thd,shd->hts", q, k))
        return jnp.einsum("hts,shd->thd", scores, v).reshape(4, 10) @ w[:10]

    by = {"w": {1: [(3, 3), (5, 8), (2, 2)]}}
    new, _ = check_padding(lambda w, x: jax.grad(lambda w: jnp.sum(jnp.sin(fn(w, x))))(w), f32(10, 30), f32(4, 10), by=by)
    assert {value.shape for value in new.graph.values} >= {(4, 3, 8, 2), (8, 4, 4), (4, 8, 2)}


def test_extents():
    """Parts are taken apart along whole elements alone."""
    assert divided(extent([(3, 3), (5, 8), (2, 2)]), (3, 5, 2)) == [(), ((5, 8),), ()]
    assert divided(extent([(3, 3), (5, 8), (2, 2)]), (15, 2)) == [((3, 3), (5, 8)), ()]
    assert divided(((15, 24),), (3, 5)) is None


def test_a_shard_map_reads_what_it_is_written_for():
    """Its operands are cut to their own sizes, its results padded."""
    mesh = jax.make_mesh((1,), ("a",), devices=jax.devices()[:1], axis_types=(jax.sharding.AxisType.Auto,))
    spec = jax.sharding.PartitionSpec()

    def fn(x):
        inner = jax.shard_map(lambda y: y - jnp.mean(y), mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
        return jnp.sum(inner(x * 2) + x, 0)

    check_padding(fn, f32(5, 3), by={"x": {0: 8}})


def test_negative_zero_and_infinity():
    """Real infinities and NaN come out as without padding."""
    x = np.array([[np.inf, 1, -2], [0.0, np.nan, 3], [-np.inf, -0.0, 1]], np.float32)

    def fn(x):
        return jnp.max(x, 1), jnp.min(x, 0), jnp.argmax(x, 1), jnp.sum(x, 1), jax.nn.softmax(x, 0), lax.top_k(x, 2)

    check_padding(fn, f32(3, 3), by={"x": {0: 4, 1: 4}}, arrays=(x,))
