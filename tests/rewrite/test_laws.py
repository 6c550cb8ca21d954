"""Laws of rewrites: equal results on random steps, alone and one after the other, and the same program again from their written form."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.extend.core import jaxpr_as_fun

from autoshard.cluster import Cluster
from autoshard.compilers import compiler_of
from autoshard.compilers.program_facts import program_facts
from autoshard.ir.rewrites import KINDS, Microbatches, Offload, OneProgram, Recompute, from_json, to_json
from autoshard.reader import Node
from autoshard.recompute import Options, optimizer_state
from autoshard.rewrite import rewritten
from autoshard.rules import rules_of
from autoshard.trace import Traced, trace

V5E = Cluster.parse("v5e:1x1")
LAYERS, BATCH, WIDTH = 4, 8, 16
ACTIVATIONS = {"relu": jax.nn.relu, "tanh": jnp.tanh, "softmax": jax.nn.softmax, "gelu": jax.nn.gelu}


def step_of(names, scanned, residual):
    """A train step with momentum of layers with these activations, and its arguments."""

    def layer(x, w, name):
        made = ACTIVATIONS[name](x @ w)
        return x + made if residual else made

    def loss(weights, x, y):
        if scanned:
            x = jax.lax.scan(lambda x, w: (layer(x, w, names[0]), None), x, weights)[0]
        else:
            for k, name in enumerate(names):
                x = layer(x, weights[k], name)
        return jnp.mean((x - y) ** 2)

    def step(weights, moments, x, y):
        value, gradients = jax.value_and_grad(loss)(weights, x, y)
        moments = 0.9 * moments + gradients
        return weights - 0.1 * moments, moments, value

    rng = np.random.default_rng(0)
    weights = rng.normal(0, 0.2, (LAYERS, WIDTH, WIDTH))
    return step, [jnp.asarray(x, jnp.float32) for x in (weights, np.zeros_like(weights), *rng.normal(0, 1, (2, BATCH, WIDTH)))]


def remats(traced: Traced):
    """The recomputation of all that can be, and that between it and none."""
    options = Options(traced, program_facts(traced.graph, rules_of(traced.graph), compiler_of(V5E)), V5E.device)
    return [each for each in (options.full, *options.all[:1]) if each is not None]


@st.composite
def steps(draw):
    """A step, traced, its arguments, and rewrites of it in the order in which they are applied."""
    names, scanned = draw(st.tuples(*[st.sampled_from(sorted(ACTIVATIONS))] * LAYERS)), draw(st.booleans())
    step, arguments = step_of(names, scanned, draw(st.booleans()))
    traced = trace(step, *arguments, donate_argnums=(0, 1))
    again = draw(st.none() | st.sampled_from(remats(traced) or [None]))
    loops = st.builds(Microbatches, st.sampled_from((2, 4, 8)))
    staged = st.sampled_from((OneProgram(2, 4), OneProgram(4, 8), OneProgram(2, 2, 2), OneProgram(2, 2, 1, True))) if scanned else st.none()
    leaves = optimizer_state(traced, least=0)
    hosted = draw(st.none() | st.just(Offload(leaves))) if leaves else None
    found = (None if again is None else Recompute(again), draw(st.none() | loops | staged), hosted)
    return traced, arguments, tuple(each for each in found if each is not None)


def check(traced, arguments, rewrites):
    made = rewritten(traced, rewrites)
    assert made.rewrites == rewrites and all(each.describe() for each in rewrites)
    assert [each.kind for each in rewrites] == [kind for kind in KINDS if kind in {each.kind for each in rewrites}]
    expected, found = (jax.jit(jaxpr_as_fun(each.jaxpr))(*arguments) for each in (traced, made))
    for one, other in zip(expected, found, strict=True):
        np.testing.assert_allclose(np.asarray(one), np.asarray(other), rtol=2e-5, atol=1e-6)
    read = from_json(Node(to_json(rewrites)))
    assert read == rewrites and rewritten(traced, read).graph.fingerprint == made.graph.fingerprint


@settings(max_examples=3, deadline=None, derandomize=True, database=None)
@given(steps())
def test_rewrites_keep_the_results_of_any_step(found):
    check(*found)


@pytest.mark.slow(minutes=4)
@settings(max_examples=100, deadline=None, database=None)
@given(steps())
def test_rewrites_keep_the_results_of_a_hundred_steps(found):
    check(*found)
