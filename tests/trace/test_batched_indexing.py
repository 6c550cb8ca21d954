"""Gathers and scatters whose coordinates count a batch."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from jax import lax
from jax.extend.core import jaxpr_as_fun
from jax.sharding import PartitionSpec as P
from programs import abstract

import autoshard
from autoshard.ir import Op
from autoshard.trace import trace
from autoshard.trace.batched_indexing import batched

SIZES = st.integers(1, 4)


def batching(fn, *args) -> list[tuple[int, ...]]:
    """The operand's batching dimensions of every gather and scatter, in program order."""
    ops: list[Op] = [op for op in trace(fn, *args).graph.walk() if op.primitive == "gather" or op.primitive.startswith("scatter")]
    return [op.params["dimension_numbers"].operand_batching_dims for op in ops]


@st.composite
def lookups(draw):
    """An operand's shape, its indices' shape, and per indexed dimension what it is indexed by."""
    batch = draw(st.lists(SIZES, min_size=1, max_size=2))
    indexed = draw(st.integers(1, 3))
    coordinates, shape = [], []
    for _ in range(indexed):
        kind = draw(st.sampled_from(["counts", "captured", "backward", "late", "any", "one"]))
        dim = draw(st.integers(0, len(batch) - 1))
        shape.append(draw(st.sampled_from([batch[dim], batch[dim], draw(SIZES)])))
        coordinates.append((kind, dim))
    return tuple(shape) + tuple(draw(st.lists(SIZES, max_size=2))), tuple(batch), coordinates


def coordinate(kind: str, dim: int, batch: tuple[int, ...], anything: jax.Array):
    numpy = np if kind == "captured" else jnp
    along = numpy.arange(batch[dim]).reshape([-1 if d == dim else 1 for d in range(len(batch))])
    return {"backward": along[::-1], "late": along + 1, "any": anything, "one": anything[:1]}.get(kind, along)


@settings(max_examples=5)
@given(lookups(), st.sampled_from(["gather", "add", "max", "set"]), st.sampled_from([None, "clip", "fill", "promise_in_bounds"]))
def test_batched_programs_do_the_same(lookup, how, mode):
    """Whatever counts or nearly does, in and out of bounds: looked up and written is what was."""
    shape, batch, coordinates = lookup
    within, keys = mode == "promise_in_bounds", jax.random.split(jax.random.key(0), 2)
    assume(not within or all(kind != "late" and shape[k] >= batch[dim] for k, (kind, dim) in enumerate(coordinates)))
    if how == "set" and any(kind in ("any", "one") for kind, _ in coordinates):
        how = "add"  # which of several writes to one place is the last is anybody's choice
    x = jax.random.normal(keys[0], shape)
    anything = jax.random.randint(keys[1], batch, 0 if within else -3, min(shape) if within else 6)

    def program(x, anything):
        at = x.at[tuple(coordinate(kind, dim, batch, anything) for kind, dim in coordinates)]
        return at.get(mode=mode) if how == "gather" else getattr(at, how)(x[(0,) * len(coordinates)], mode=mode)

    closed = jax.make_jaxpr(program)(x, anything)
    np.testing.assert_allclose(jaxpr_as_fun(batched(closed))(x, anything), jaxpr_as_fun(closed)(x, anything), rtol=1e-6)


x, labels = abstract((8, 16)), abstract((8,), "int32")


@pytest.mark.parametrize(
    "fn",
    [
        lambda x, t: x[jnp.arange(8), t],
        lambda x, t: x[np.arange(8), t],
        lambda x, t: x[jnp.arange(8)[:, None], t[:, None]],
        lambda x, t: x[jnp.squeeze(jnp.arange(8)[None].T, 1).astype(jnp.uint8), t],
        lambda x, t: jax.jit(lambda rows: x[rows, t])(jnp.arange(8)),
        lambda x, t: jax.checkpoint(lambda rows: x[rows, t])(jnp.arange(8)),
        lambda x, t: x.at[jnp.arange(8), t].add(1.0),
        lambda x, t: x.at[jnp.arange(8), t].set(1.0),
        lambda x, t: lax.scan(lambda c, _: (c + x[jnp.arange(8), t], None), jnp.zeros(8), None, 3)[0],
        lambda x, t: lax.scan(lambda c, rows: (c + x[rows, t], None), jnp.zeros(8), jnp.broadcast_to(jnp.arange(8), (3, 8)))[0],
        jax.grad(lambda x, t: lax.scan(lambda c, t: (c + x[jnp.arange(8), t].sum(), None), 0.0, jnp.stack([t, t + 1]))[0]),
        lambda x, t: lax.fori_loop(0, 3, lambda _, c: c + x[jnp.arange(8), t], jnp.zeros(8)),
        lambda x, t: lax.cond(t[0] > 0, lambda rows: x[rows, t], lambda rows: x[rows, t + 1], jnp.arange(8)),
    ],
)
def test_what_counts_the_batch_is_batched(fn):
    """However the positions come about, and at any depth of calls, loops and branches."""
    assert set(batching(fn, x, labels)) == {(0,)}


@pytest.mark.parametrize("how", [lambda at: at.get(), lambda at: at.add(1.0), lambda at: at.set(1.0)])
def test_single_elements_are_looked_up_along_a_dimension_of_their_own(how):
    """As `jnp.take_along_axis` does it, which XLA:TPU knows; rows are not."""

    def index_shapes(fn, *args):
        graph = trace(fn, *args).graph
        return [graph.values[op.operands[1]].shape for op in graph.walk() if op.primitive == "gather" or op.primitive.startswith("scatter")]

    assert index_shapes(lambda x, t: how(x.at[jnp.arange(8), t]), x, labels) == [(8, 1, 1)]
    assert index_shapes(lambda x, t: how(x.at[jnp.arange(8), t]), abstract((8, 16, 3)), labels) == [(8, 1)]


def test_several_dimensions_may_count():
    """Each coordinate that counts a batch dimension of its own goes, and one stays."""
    volume = abstract((4, 8, 16, 3))
    assert batching(lambda x, t: x[jnp.arange(4)[:, None], jnp.arange(8), t], volume, abstract((4, 8), "int32")) == [(0, 1)]
    assert batching(lambda x: x[jnp.arange(4)[:, None], jnp.arange(8)], volume) == [(0,)]
    assert batching(lambda x: x[:, jnp.arange(8), :, jnp.arange(8) % 3], volume) == [(1,)]


@pytest.mark.parametrize(
    "rows",
    [
        lambda: jnp.arange(8)[::-1],
        lambda: jnp.arange(1, 9),
        lambda: 2 * jnp.arange(8),
        lambda: np.array([0, 1, 2, 3, 4, 5, 7, 6]),
        lambda: jnp.zeros(8, int),
    ],
)
def test_what_does_not_count_stays_a_coordinate(rows):
    """Rows in another order may be any shard's."""
    assert batching(lambda x, t: x[rows(), t], x, labels) == [()]


def test_a_part_of_an_operand_stays_a_coordinate():
    """The batch that is counted and the dimension that it indexes are of one size; so they are no more where a small type wraps."""
    assert batching(lambda x, t: x[jnp.arange(8), t], abstract((16, 16)), labels) == [()]
    many = abstract((300, 16))
    assert batching(lambda x, t: x[lax.iota("int8", 300).astype("int32"), t], many, abstract((300,), "int32")) == [()]


def test_a_counted_batch_is_not_combined_over_devices():
    """Labels are looked up, and their gradients written, where the batch lies."""

    def loss(weights, x, labels):
        return -jax.nn.log_softmax(x @ weights)[jnp.arange(64), labels].mean()

    arguments = abstract((32, 16)), abstract((64, 32)), abstract((64,), "int32")
    step = jax.value_and_grad(loss)
    specs = {"x": P("data"), "labels": P("data")}
    strategy = autoshard.evaluate(step, *arguments, cluster="cpu:8", mesh={"data": 8}, in_specs=specs)
    sent = [(collective.kind, collective.bytes) for collective in strategy.cost.collectives]
    assert sorted(kind for kind, _ in sent) == ["all_reduce", "all_reduce"] and max(size for _, size in sent) == 32 * 16 * 4
    assert autoshard.verify(strategy, step, *arguments, target="shardy").exact
