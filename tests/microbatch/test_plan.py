"""Any program, split along any dimension of its arguments, computes in microbatches what it computes whole, or is refused."""

from __future__ import annotations

import random

import fuzz
import harnesses
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import jaxpr_as_fun
from programs import concrete

from autoshard.errors import TraceError
from autoshard.microbatch.plan import plan_loop
from autoshard.microbatch.rewrite import in_microbatches
from autoshard.rules import rules_of
from autoshard.trace import trace

NUMBERS = (2, 3, 5, 7)
NAMES = sorted({name for group in harnesses.groups() for name in harnesses.sample(group)})


def split(graph, rng):
    """A dimension of an argument, of several arguments half the time, and a number that divides it; None where there is none."""
    sizes = {(value, dim): size for value in graph.arguments for dim, size in enumerate(graph.values[value].shape) if size > 1}
    if not sizes:
        return None
    value, dim = rng.choice(list(sizes))
    size = sizes[value, dim]
    batch = {value: dim}
    if rng.random() < 0.5:
        batch = {other: at for (other, at), n in sizes.items() if n == size} | batch
    return batch, next((n for n in NUMBERS if size % n == 0), size)


def outcome(traced, args, rng):
    """``equal``, ``different ...``, ``refused``, or ``nothing`` where no operation runs in the loop."""
    graph, rules = traced.graph, rules_of(traced.graph)
    found = split(graph, rng)
    if found is None:
        return "nothing"
    loop = plan_loop(graph, rules, *found)
    if "inside" not in loop.phases.values():
        return "nothing"
    leaves = jax.tree.leaves(args)
    try:
        got = jax.jit(in_microbatches(traced.jaxpr, graph, rules, loop))(*leaves)
    except TraceError:
        return "refused"
    wanted = jax.jit(jaxpr_as_fun(traced.jaxpr))(*leaves)
    for a, b in zip(wanted, got, strict=True):
        if difference := _difference(a, b):
            return f"different in {found}: {difference}"
    return "equal"


def _difference(a, b):
    """What two results differ by, in words; floats may differ by the rounding of sums in another order."""
    if jnp.issubdtype(a.dtype, jax.dtypes.prng_key):
        a, b = jax.random.key_data(a), jax.random.key_data(b)
    a, b = np.asarray(a), np.asarray(b)
    if (a.shape, a.dtype) != (b.shape, b.dtype):
        return f"{b.dtype}{b.shape} for {a.dtype}{a.shape}"
    if a.dtype.kind in "biu":
        return "" if np.array_equal(a, b) else "other bits"
    tolerance = {"float16": 2e-2, "bfloat16": 1e-1}.get(str(a.dtype), 1e-4)
    a, b = a.astype(np.complex128), b.astype(np.complex128)
    finite = np.isfinite(a)
    if not np.array_equal(finite, np.isfinite(b)):
        return "not finite"
    largest = max(1.0, np.abs(a[finite]).max(initial=0.0))
    apart = np.abs(a[finite] - b[finite]).max(initial=0.0)
    return "" if apart <= tolerance * largest else f"{apart:.1e} of {largest:.1e}"


def of_fuzz(seeds):
    """Per random program what came of it."""
    for seed in seeds:
        program = fuzz.random_program(random.Random(seed))
        args = concrete(program.args())
        yield seed, outcome(trace(program.function(), *args), args, random.Random(seed))


def of_harnesses(names):
    """Per example of a primitive what came of it; without those that JAX cannot run here."""
    for name in names:
        args = harnesses._arguments(name)
        try:
            yield name, outcome(trace(harnesses.CASES[name].dyn_fun, *args), args, random.Random(name))
        except NotImplementedError:
            yield name, "nothing"


def check(outcomes, least):
    """None differs, and so many are computed in microbatches and equal."""
    found = dict(outcomes)
    assert {name: text for name, text in found.items() if text not in ("equal", "refused", "nothing")} == {}
    assert sum(text == "equal" for text in found.values()) >= least


@pytest.mark.slow
def test_random_programs():
    """Programs with loops, branches, derivatives, random numbers, and dimensions that are merged and taken apart."""
    check(of_fuzz(range(20)), 12)


@pytest.mark.slow
def test_examples_of_primitives():
    """Some of JAX's own, of all kinds."""
    check(of_harnesses(NAMES[::12]), 15)


@pytest.mark.slow(minutes=15)
def test_many_random_programs():
    """Three hundred."""
    check(of_fuzz(range(20, 320)), 200)


@pytest.mark.slow(minutes=15)
def test_all_examples_of_primitives():
    """All of the sample."""
    check(of_harnesses(NAMES), 230)


def test_merged_dimensions_are_split_example_by_example():
    """Of a batch that is merged with the sequence, random masks and results are those of the whole batch."""

    def tokens(x, key):
        flat = x.reshape(-1, 8)
        kept = jax.random.bernoulli(key, 0.5, flat.shape)
        return jnp.where(kept, flat, 0.0), flat.sum(-1) * jnp.arange(32), (flat @ flat.T).shape[0] * flat.sum()

    args = jnp.arange(4 * 8 * 8, dtype=jnp.float32).reshape(4, 8, 8), jax.random.key(0)
    traced = trace(tokens, *args)
    graph, rules = traced.graph, rules_of(traced.graph)
    loop = plan_loop(graph, rules, {graph.arguments[0]: 0}, 2)
    assert {status.inner for status in loop.statuses.values() if status.kind == "slice"} >= {1, 8}
    got = jax.jit(in_microbatches(traced.jaxpr, graph, rules, loop))(*args)
    for found, wanted in zip(got, tokens(*args), strict=True):
        np.testing.assert_array_equal(found, wanted)
