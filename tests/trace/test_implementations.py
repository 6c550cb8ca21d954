"""Primitives of other libraries are planned by what they compute, in every mode, and differentiated by their own rules."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir
from problems import eager_cluster

from autoshard import search
from autoshard.trace import trace

SHAPE = (16, 8)
X, W = (jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32) for seed, shape in enumerate((SHAPE, (8, 8))))


def primitive(name, implementation, lowered=None):
    """A primitive as other libraries define it: of several results, and its operands' types known to its parameters."""
    made = Primitive(name)
    made.multiple_results = True
    made.def_impl(implementation)
    made.def_abstract_eval(lambda x, *others, **params: [jax.core.ShapedArray(x.shape, x.dtype)])
    mlir.register_lowering(made, mlir.lower_fun(lowered or implementation, multiple_results=True))
    return made


def of_one_shape(x, w, unread, *, shape, inner):
    """The implementation of `settled`: it takes nothing but the whole."""
    if x.shape != shape:
        raise ValueError(f"{x.shape} does not match {shape}")
    (half,) = inner.bind(x)
    return [jax.lax.fori_loop(0, 3, lambda _, y: jnp.tanh(y @ w), half)]


halved = primitive("halved", lambda x: [x / 2])
settled = primitive("settled", of_one_shape)


def _mapped(operands, dims, *, shape, inner):
    return jax.vmap(lambda *each: of_one_shape(*each, shape=shape, inner=inner), dims)(*operands), [0]


batching.primitive_batchers[settled] = _mapped
batching.primitive_batchers[halved] = lambda operands, dims: (halved.bind(*operands), dims)
ad.primitive_jvps[settled] = lambda primals, tangents, **params: (settled.bind(*primals, **params), [tangents[0] * 7.0])


COUNTED = np.arange(128.0, dtype=np.float32).reshape(SHAPE)


def settle(x, w):
    unread = x + COUNTED  # by the implementation: what is of a whole array here is added to no shard
    (y,) = settled.bind(x, w, unread, shape=x.shape, inner=halved)
    return y


def step(w, x):
    """An update, through a branch in a loop, from the rows of a batch."""

    def trip(y, k):
        return jax.lax.cond(k > 0, lambda: settle(y, w), lambda: y), None

    y, _ = jax.lax.scan(trip, jnp.sin(x), jnp.arange(2))
    return w - 0.1 * jnp.mean(y, axis=0), jnp.mean(y * y)


def searched(fn, *args, **options):
    return search(fn, *args, **{"cluster": eager_cluster("cpu:8"), "mesh": {"x": 8}, **options})


@pytest.mark.parametrize("lowering", ["manual", "constraints"])
def test_what_a_primitive_computes_is_split(lowering):
    """The rows of a batch are split inside an implementation that takes nothing but the whole array, and the result is equal."""
    strategy = searched(settle, X, W)
    assert strategy.in_specs[0][0] == "x"
    assert not strategy.notes or "settled" not in " ".join(strategy.notes)
    np.testing.assert_allclose(strategy.apply(settle, lowering=lowering)(X, W), jax.jit(settle)(X, W), rtol=1e-5, atol=1e-6)


def test_primitives_are_opened_at_any_depth():
    """In loops, branches, other implementations and mapped, no equation of another library's primitive is left."""
    graph = trace(step, W, X).graph
    found = {op.primitive for op in graph.walk()}
    assert "dot_general" in found and {"settled", "halved"}.isdisjoint(found)
    mapped = trace(jax.vmap(settle, (0, None)), jnp.ones((4, *SHAPE)), W).graph
    assert {"settled", "halved"}.isdisjoint(op.primitive for op in mapped.walk())


@pytest.mark.sample(1)
@pytest.mark.parametrize("options", [{"searcher": "fully_sharded"}, {"microbatches": 2}, {"remat": "full"}], ids=str)
def test_modes_see_inside(options):
    """A step with another library's primitive is fully sharded, cut into microbatches and recomputed as any other is."""
    strategy = searched(step, W, X, **options)
    for ours, plain in zip(strategy.apply(step)(W, X), jax.jit(step)(W, X), strict=True):
        np.testing.assert_allclose(ours, plain, rtol=1e-5, atol=1e-6)


def test_a_sharded_step_is_differentiated_by_the_primitive_s_rule():
    """The derivative of a sharded function is what the primitive says, rather than that of its implementation."""

    def loss(x, w):
        return jnp.sum(settle(x, w))

    np.testing.assert_allclose(jax.grad(searched(loss, X, W).apply(loss))(X, W), np.full(SHAPE, 7.0), rtol=1e-6)


def looks(x):
    return [x * (1.0 if np.asarray(x).sum() > 0 else 2.0)]


CLOSED = {
    "looks_at_values": (primitive("looks_at_values", looks, lambda x: [x * 2.0]), "TracerArrayConversionError"),
    "of_other_types": (primitive("of_other_types", lambda x: [x.sum()], lambda x: [x * 2.0]), "abstract evaluation"),
    "raises": (primitive("raises", lambda x: 1 / 0, lambda x: [x * 2.0]), "ZeroDivisionError: division by zero"),
}


@pytest.mark.parametrize("name", CLOSED)
def test_what_cannot_be_opened_runs_as_it_is_lowered(name):
    """A primitive whose implementation cannot be traced, or is of other types, is left as it is, and a note says which, where and why."""
    made, why = CLOSED[name]
    strategy = searched(lambda x: made.bind(x)[0], X)
    (note,) = (note for note in strategy.notes if name in note and why in note)
    assert "test_implementations.py" in note
    np.testing.assert_allclose(strategy.apply(lambda x: made.bind(x)[0])(X), X * 2.0, rtol=1e-6)


def test_an_implementation_that_calls_its_primitive_is_opened_once():
    """One that dispatches to the primitive itself, compiled, has no end; and a primitive without an implementation has none to open."""
    made = primitive("dispatched", lambda x: jax.jit(made.bind)(x), lambda x: [x * 2.0])
    bare = Primitive("bare")
    bare.def_abstract_eval(lambda x: jax.core.ShapedArray(x.shape, x.dtype))
    mlir.register_lowering(bare, mlir.lower_fun(lambda x: x * 2.0, multiple_results=False))
    traced = trace(lambda x: bare.bind(made.bind(x)[0]), X)
    assert [op.primitive for op in traced.graph.ops] == ["dispatched", "bare"]
    assert [note.split(" at ")[0] for note in traced.graph.assumptions] == ["dispatched"]


def test_operands_that_are_written_in_the_program_may_be_looked_at():
    """An implementation that chooses by an operand's value sees it where the program has it as a number."""
    chosen = primitive("chosen", lambda x, k: [(jnp.sin, jnp.cos)[k.item()](x)])
    (op,) = trace(lambda x: chosen.bind(x, np.int32(1))[0], X).graph.ops
    assert op.primitive == "cos"
