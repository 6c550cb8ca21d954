"""Fusion: which values are stored and which are computed where they are read, as compilers were seen to do it."""

from __future__ import annotations

import functools
import math
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import programs
import pytest
from profiles import facts_of, floats, stored

from autoshard.analysis.demanded_precision import precision_demands
from autoshard.analysis.values import free_values
from autoshard.cluster import Cluster
from autoshard.compilers import compiler_of
from autoshard.compilers.fusion import fuse
from autoshard.compilers.fusion_rules import FusionRules
from autoshard.trace import trace

SLICES = {"v4": "v4:2x2x1", "v5e": "v5e:2x2", "v5p": "v5p:2x2x1", "v6e": "v6e:2x2"}


def test_a_softmax_is_computed_again():
    """Of an attention its scores are kept; the masked, normalised and scaled ones are not."""

    def attend(q, k, v):
        weights = jax.nn.softmax(q @ k.T / 8.0, axis=-1)
        return weights @ v

    made = stored(jax.grad(lambda q, k, v: attend(q, k, v).sum()), floats(256, 64), floats(256, 64), floats(256, 64))
    assert made.count(((256, 256), "float32")) == 2  # scores, and the gradient of the weights


@pytest.mark.parametrize(("dtype", "kept"), [("bfloat16", 2), ("float32", 2)])
def test_a_narrow_value_made_of_wide_ones_is_kept(dtype, kept):
    """Gradients of scores are computed by both products that read them, but where rereading float32 scores moves more than keeping them.

    ``bf16[4,16,1024,1024]`` of ``f32[4,16,1024,1024]`` and its gradient in a transformer's backward pass (libtpu 0.0.42).
    """

    def attend(q, k, v):
        return jax.nn.softmax((q @ k.T).astype(dtype) / 8, axis=-1).astype(jnp.bfloat16) @ v

    like = (jax.ShapeDtypeStruct((256, 64), jnp.bfloat16),) * 3
    made = stored(jax.grad(lambda q, k, v: attend(q, k, v).astype(jnp.float32).sum(), (0, 1, 2)), *like)
    assert made.count(((256, 256), "bfloat16")) == kept


def test_an_epilogue_is_part_of_the_product():
    """A bias and a residual are added by the product's kernel: one value is stored, not three."""

    def block(x, w, b):
        y = x @ w + b + x
        return jnp.tanh(y), jnp.exp(y)

    assert len(stored(block, floats(64, 64), floats(64, 64), floats(64))) == 3


@pytest.mark.parametrize(
    ("function", "kept"),
    [
        (lambda a, b, x, w: (a @ b) * x, 1),
        (lambda a, b, x, w: jnp.tanh(x @ w + a @ b), 1),
        (lambda a, b, x, w: jnp.sum(jnp.tanh(a @ b) * x, axis=1), 0),
    ],
)
def test_an_outer_product_is_a_multiplication(function, kept):
    """It is computed with what reads it: only results of the program are stored."""
    made = stored(function, floats(64, 1), floats(1, 32), floats(64, 32), floats(32, 32))
    assert made.count(((64, 32), "float32")) == kept


def test_scores_are_kept_in_float32():
    """What is done to scores of a batch in float32 is stored so; any other product is stored as it is made, for its readers to widen."""

    def attend(q, k, v):
        return (jax.nn.softmax((q @ k.mT).astype(jnp.float32) / 8.0, axis=-1)).astype(jnp.bfloat16) @ v

    def widened(q, k, v):
        scores = (q @ k.mT).astype(jnp.float32)
        return jnp.tanh(scores), jnp.exp(scores), v

    one, batch = ([jax.ShapeDtypeStruct(shape, jnp.bfloat16)] * 3 for shape in ((256, 64), (2, 256, 64)))
    gradients = jax.grad(lambda q, k, v: attend(q, k, v).sum())
    assert ((2, 256, 256), "float32") in stored(gradients, *batch) and ((2, 256, 256), "bfloat16") in stored(widened, *batch)
    assert ((256, 256), "bfloat16") in (made := stored(gradients, *one)) and ((256, 256), "float32") not in made


@pytest.mark.parametrize("change", [lambda y: y - 1.5, lambda y: 30 * jnp.tanh(y / 30)], ids=["shifted", "capped"])
def test_a_convolution_is_kept_as_it_is_made(change):
    """It is not stored in float32 by what is computed of it before a normalisation and its gradient: these widen it."""

    def normalised(x, kernel, gradient):
        x = jax.lax.conv_general_dilated(x, kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
        y, gradient = change(x.astype(jnp.float32)), gradient.astype(jnp.float32)
        return (gradient * (y * y).sum((1, 2), keepdims=True) - y * (y * gradient).sum((1, 2), keepdims=True)).astype(jnp.bfloat16)

    images, kernel = (jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((4, 16, 16, 32), (3, 3, 32, 32)))
    made = [dtype for shape, dtype in stored(normalised, images, kernel, images) if shape == (4, 16, 16, 32)]
    assert made and "float32" not in made


@pytest.mark.parametrize("heads", [1, 2])
def test_scores_of_queries_that_share_keys_are_kept_as_their_product_makes_them(heads):
    """A batched product whose operand has several free dimensions is not kept wider than it is made: its readers widen it.

    Nor are the weights kept, or their gradient: scores, and what comes back to the weights, are all that has their size.
    """

    def loss(queries, keys, values):
        scores = jnp.einsum("bqhgk,bshk->bhgqs", queries, keys).astype(jnp.float32) / 8.0
        weights = jax.nn.softmax(scores, axis=-1).astype(jnp.bfloat16)
        return jnp.einsum("bhgqs,bshk->bqhgk", weights, values).astype(jnp.float32).sum()

    queries, keys = (jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((2, 128, 4, heads, 64), (2, 128, 4, 64)))
    made = stored(jax.grad(loss, (0, 1, 2)), queries, keys, keys)
    assert [dtype for shape, dtype in made if shape.count(128) == 2] == ["bfloat16"] * 2


@pytest.mark.parametrize(("axis", "lies"), [(0, False), (1, True), (2, True)])
def test_strided_slices_of_tiles_and_pads_between_elements_lie_in_memory(axis, lies):
    """Taking every other row or column stands between two fusions, and so does what puts them apart; every other matrix is fused."""

    def every_other(x):
        return jnp.tanh(jax.lax.slice_in_dim(jnp.sin(x), 0, None, 2, axis))

    def apart(x):
        return jnp.tanh(jax.lax.pad(jnp.sin(x), 0.0, [(0, 1, 1) if k == axis else (0, 0, 0) for k in range(3)]))

    halved = tuple(64 // 2 if k == axis else 64 for k in range(3))
    assert (stored(every_other, floats(64, 64, 64)).count((halved, "float32")) == 2) == lies  # the slice, and the result
    assert len(stored(apart, floats(*halved))) == 3


@pytest.mark.parametrize("tokens", ["c", "bc"])
def test_batched_products_compute_what_they_read(tokens):
    """An expert's activation is computed by the product that reads it, on one dimension of tokens as on two."""

    def program(x, w):
        return jnp.einsum(f"{tokens}ef,efd->{tokens}ed", jnp.tanh(x), w)

    shape = (32, 16) if len(tokens) == 2 else (512,)
    assert ((*shape, 4, 64), "float32") not in stored(program, floats(*shape, 4, 64), floats(4, 64, 32))


def test_fusion_is_linear():
    """Twice the layers make twice the kernels, all with few reads."""
    short, long = (facts_of(fn, *args).fusion.kernels for fn, args in map(programs.gpt, (2, 4)))
    assert len(long) < 2.2 * len(short)
    assert max(len(kernel.reads) for kernel in long) < 40


def test_kernels_read_what_is_stored_before():
    """Each kernel reads arguments or what an earlier kernel made, and the same program is fused the same way."""
    for make in programs.PROGRAMS.values():
        fn, args = make()
        facts = facts_of(fn, *args)
        known = {facts.fusion.root[value] for value in (*facts.graph.arguments, *facts.graph.constants)}
        for kernel in facts.fusion.kernels:
            assert all(value in known or facts.free[value] for value in kernel.reads)
            known.update(kernel.makes)
        assert fuse(facts.graph, facts.free, facts.demands, facts.compiler.fusion_rules) == facts.fusion


CHAINS = {
    "softmax": jax.nn.softmax,
    "silu": jax.nn.silu,
    "logistic": jax.nn.sigmoid,
    "exp(exp)": lambda x: jnp.exp(jnp.exp(x)),
    "erf": jax.lax.erf,
    "scaled": lambda x: x / 3.0 / 7.0 + 1.0,
    **{f"poly {n}": lambda x, n=n: functools.reduce(lambda y, i: y * x + (i + 0.1), range(n), x) for n in (4, 8, 12, 16, 24)},
}


@pytest.mark.parametrize(
    ("chain", "dtype", "keeps"),
    [
        ("softmax", "float32", ("v5p",)),
        ("silu", "float32", ("v5p",)),
        ("silu", "bfloat16", ()),
        ("exp(exp)", "float32", ()),
        ("logistic", "float32", ()),
        ("scaled", "float32", ()),
        ("erf", "bfloat16", ("v4", "v5e", "v5p", "v6e")),
        ("poly 4", "float32", ()),
        ("poly 8", "float32", ("v4", "v5p", "v6e")),
        ("poly 8", "bfloat16", ("v5p",)),
        ("poly 12", "float32", ("v4", "v5p", "v6e")),
        ("poly 16", "float32", ("v4", "v5e", "v5p", "v6e")),
        ("poly 24", "bfloat16", ("v4", "v5e", "v5p", "v6e")),
    ],
)
def test_what_takes_longer_than_its_memory_is_kept(chain, dtype, keeps):
    """What is between a product's scores and the next product lies in memory on those TPUs where libtpu 0.0.42 keeps it."""

    def attend(q, k, v):
        scores = jnp.einsum("bqhd,bkhd->bhqk", q, k, preferred_element_type=dtype)
        return jnp.einsum("bhqk,bkhd->bqhd", CHAINS[chain](scores).astype(jnp.bfloat16), v)

    def step(q, k, v, g):
        out, back = jax.vjp(attend, q, k, v)
        return back(g + jax.lax.optimization_barrier(out))

    graph = trace(step, *[jax.ShapeDtypeStruct((8, 1024, 16, 64), jnp.bfloat16)] * 4).graph
    assert _keeping(graph, (8, 16, 1024, 1024)) == set(keeps)


@pytest.mark.parametrize(("chain", "keeps"), [("poly 4", False), ("poly 8", False), ("silu", False), ("poly 16", True), ("poly 24", True)])
def test_what_a_layer_reads_and_makes_hides_work(chain, keeps):
    """Between layers of equal width libtpu 0.0.42 keeps on v5p what takes twice as long as between a head's products."""

    def step(x, g, up, down):
        out, back = jax.vjp(lambda x, up, down: CHAINS[chain](x @ up) @ down, x, up, down)
        return back(g + jax.lax.optimization_barrier(out))

    x, weight = (jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((262_144, 128), (128, 128)))
    assert ("v5p" in _keeping(trace(step, x, x, weight, weight).graph, x.shape)) == keeps


def _keeping(graph, shape: tuple[int, ...]) -> set[str]:
    """On which TPUs more values of a shape lie in memory in bfloat16 than where computing takes no time."""

    def kept(rules: FusionRules) -> int:
        stored = fuse(graph, free_values(graph), precision_demands(graph), rules).stored
        return sum(stored[number] and value.shape == shape and value.itemsize == 2 for number, value in enumerate(graph.values))

    found = {name: compiler_of(Cluster.parse(cluster)).fusion_rules for name, cluster in SLICES.items()}
    return {name for name, rules in found.items() if kept(rules) > kept(replace(rules, patience=math.inf))}


def convolve(x, kernel):
    return jax.lax.conv_general_dilated(x, kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))


def test_what_is_put_together_for_a_convolution_lies_in_memory():
    """A skip is made once: the convolutions on the way down and up both read it (a U-Net compiled by libtpu 0.0.42)."""
    kernels = floats(3, 3, 128, 128), floats(3, 3, 256, 128)

    def program(x, first, last, joined):
        skip = jnp.sin(convolve(x, first))
        return convolve(jnp.concatenate([skip, x], -1), last) if joined else convolve(skip, first)

    stored = []
    for joined in (True, False):
        facts = facts_of(partial(program, joined=joined), floats(8, 64, 64, 128), *kernels)
        (sine,) = (op for op in facts.graph.walk() if op.primitive == "sin")
        stored.append(facts.fusion.stored[sine.results[0]])
    assert stored == [True, False]


HALF = 16


@pytest.mark.parametrize(
    ("program", "on_tpu", "on_gpu"),
    [
        (lambda x: jnp.tanh(jnp.exp(x)[:HALF]), False, False),
        (lambda x: jnp.tanh(jnp.exp(x)[:HALF]) * jnp.exp(x)[HALF:], False, False),  # two values, of which one half each is read
        (lambda y: jnp.tanh(y[:HALF]) * y[HALF:], True, False),
        (lambda y: (y[:HALF].sum(0), (y[HALF:] ** 2).sum(0)), True, False),
        (lambda y: jnp.tanh(y[::2]), True, False),
        (lambda y: jnp.tanh(sum(jnp.split(y, 4))), True, False),
        (lambda y: y.sum(0) + (y**2).sum(0), False, False),
    ],
)
def test_what_is_sliced_twice_is_kept(program, on_tpu, on_gpu):
    """Of an elementwise value what XLA:TPU (libtpu 0.0.42) and XLA:GPU (jaxlib 0.10.2) store: kernels compute one part of it, not two."""
    given = jax.ShapeDtypeStruct((2 * HALF, 512, 512), jnp.float32)

    def applied(x):
        return program(x) if program.__code__.co_varnames[0] == "x" else program(jnp.exp(x))

    graph = trace(applied, given).graph
    whole = {value for op in graph.walk() if op.primitive == "exp" for value in op.results}
    for cluster, kept in (("v5e:2x4", on_tpu), ("h100:8", on_gpu)):
        rules = replace(compiler_of(Cluster.parse(cluster)).fusion_rules, patience=math.inf)
        fusion = fuse(graph, free_values(graph), precision_demands(graph), rules)
        assert {fusion.stored[value] for value in whole} == {kept}


@pytest.mark.parametrize(
    ("read", "lies"),
    [
        (lambda y: jnp.max(y, -1), False),
        (lambda y: jnp.argmin(jnp.abs(y), -1), False),
        (lambda y: jnp.sum(y.astype(jnp.float32), 0), False),
        (lambda y: (jnp.max(y, -1), jnp.sum(y, -1)), True),
        (lambda y: jnp.sum(y.reshape(1024, 8, 64), -1), True),
    ],
)
def test_a_product_that_one_reduction_alone_reads_lies_nowhere(read, lies):
    """XLA:TPU reduces it as it is made, whatever it is reduced to (libtpu 0.0.42); of two reductions, or of groups, it is stored."""
    inputs = (jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((1024, 256), (256, 512)))
    facts = facts_of(lambda x, w: read(x @ w), *inputs)
    product = next(op for op in facts.graph.walk() if op.primitive == "dot_general")
    assert any(facts.fusion.stored[facts.fusion.root[value]] for value in product.results) == lies


@pytest.mark.parametrize(
    ("read", "stored"),
    [
        (lambda y: (y.argmin(-1), y.min(-1)), False),
        (lambda y: (y.min(-1), y.max(-1), y.sum(-1)), False),
        (lambda y: (y.sum(0), y.max(1)), False),
        (lambda y: (y.argmin(-1), y.max(-1)), True),
        (lambda y: (y.argmax(-1), y.sum(-1)), True),
        (lambda y: (y.argmax(0), y.argmax(1)), True),
    ],
)
def test_several_reductions_are_of_one_product_if_the_compiler_joins_them(read, stored):
    """Sums and extrema along any dimensions, and an extremum with its place; 65,536 x 4,096 float32 are 1.07 GB or none (libtpu 0.0.52)."""
    facts = facts_of(lambda x, w: read(jnp.tanh(x @ w.T)), floats(1024, 256), floats(512, 256))
    product = next(op for op in facts.graph.walk() if op.primitive == "dot_general")
    tanh = next(op for op in facts.graph.walk() if op.primitive == "tanh")
    assert any(facts.fusion.stored[facts.fusion.root[value]] for op in (product, tanh) for value in op.results) == stored


WIDE, NARROW = jax.ShapeDtypeStruct((512, 512), jnp.float32), jax.ShapeDtypeStruct((512, 512), jnp.bfloat16)


@pytest.mark.parametrize(
    ("make", "given", "again"),
    [
        (lambda x, _: jnp.tanh(x.astype(jnp.float32)), NARROW, True),
        (lambda x, _: functools.reduce(lambda x, _: jnp.tanh(x), range(12), x), WIDE, True),  # however long it takes
        (lambda x, y: jnp.tanh(x.astype(jnp.float32)) * y.astype(jnp.float32), NARROW, True),
        (lambda x, y: jnp.tanh(x) * y, NARROW, False),
        (lambda x, _: jnp.tanh(x).astype(jnp.bfloat16), WIDE, False),
    ],
)
def test_what_is_stored_for_a_lookup_is_computed_again_by_others(make, given, again):
    """XLA:TPU stores it for the gather alone, where what it is made of has no more bytes (libtpu 0.0.52)."""

    def program(x, y, rows):
        made = make(x, y)
        return jnp.take_along_axis(made, rows, -1), jnp.sum(made * made, -1)

    facts = facts_of(program, given, given, jax.ShapeDtypeStruct((512, 1), jnp.int32))
    reduction = next(op for op in facts.graph.walk() if op.primitive == "reduce_sum")
    kernel = next(kernel for kernel in facts.fusion.kernels if kernel.main == reduction.index)
    assert set(kernel.reads) <= set(facts.graph.arguments) if again else set(kernel.reads).isdisjoint(facts.graph.arguments)


def test_a_product_makes_capped_logits_for_a_lookup():
    """One kernel makes a product's logits, float32 ones to look up, and their maxima; both gradients read the first (libtpu 0.0.52)."""

    def loss(x, w, rows):
        made = 30 * jnp.tanh((x @ w).astype(jnp.float32) / 30)
        return jnp.sum(jax.nn.logsumexp(made, -1) - jnp.take_along_axis(made, rows, -1)[:, 0])

    facts = facts_of(jax.value_and_grad(loss, (0, 1)), NARROW, NARROW, jax.ShapeDtypeStruct((512, 1), jnp.int32))
    graph, (first, *others) = facts.graph, [k for k in facts.fusion.kernels if facts.graph.walk()[k.main].primitive == "dot_general"]
    logits, looked_up, maxima = first.makes
    assert graph.values[maxima].rank == 1
    assert (graph.values[logits].dtype, graph.values[looked_up].dtype) == ("bfloat16", "float32")
    assert len(others) == 2 and all(logits in kernel.reads and looked_up not in kernel.reads for kernel in others)


@pytest.mark.parametrize(("make", "stored"), [(jnp.tanh, 2), (lambda x: x, 0)])
def test_what_is_looked_up_in_two_orders_is_stored_in_both(make, stored):
    """One kernel makes logits whose rows and columns are looked up, in both orders; arrays that are in memory anyway are read there."""

    def looked_up(x, rows):
        made = make(x)
        return jnp.take_along_axis(made, rows, -1) + jnp.take_along_axis(made.T, rows, -1), jnp.sum(made, -1)

    x = jax.ShapeDtypeStruct((512, 512), jnp.float32)
    facts = facts_of(looked_up, x, jax.ShapeDtypeStruct((512, 1), jnp.int32))
    large = [[v for v in kernel.makes if facts.graph.values[v].size == 512 * 512] for kernel in facts.fusion.kernels]
    assert sum(map(len, large)) == max(map(len, large)) == stored


@pytest.mark.parametrize(
    ("branches", "arrays"),
    [
        ((lambda x, w: x @ w, lambda x, w: jnp.tanh(x)), 2),
        ((lambda x, w: x @ w, lambda x, w: x), 2),
        ((lambda x, w: (x @ w, x), lambda x, w: (jnp.tanh(x), x)), 2),
        ((lambda x, w: (y := x @ w, y), lambda x, w: (y := jnp.tanh(x), y)), 2),
    ],
)
def test_a_conditional_copies_nothing(branches, arrays):
    """What branches read, all pass on, or return twice is stored once, and what they make is written where the conditional returns it."""

    def program(x, w, p):
        found = jax.lax.cond(p, *branches, x, w)
        return sum(map(jnp.sum, jax.tree.leaves(found)))

    facts = facts_of(program, floats(64, 32), floats(32, 32), jax.ShapeDtypeStruct((), jnp.bool_))
    fusion, values = facts.fusion, facts.graph.values
    kept = {root for value, root in enumerate(fusion.root) if values[value].shape == (64, 32) and fusion.stored[root]}
    assert len(kept) == arrays
