"""Costs of layers from costs of programs."""

from __future__ import annotations

from dataclasses import astuple, fields, replace

import jax
import jax.numpy as jnp
import pytest
from hypothesis import given
from hypothesis import strategies as st

from autoshard.cluster import Cluster
from autoshard.compilers import compiler_of
from autoshard.compilers.program_facts import program_facts
from autoshard.ir.rewrites import Microbatches
from autoshard.pipeline.layer_costs import Costs, LayerCosts, kept_values, layer_costs
from autoshard.pipeline.micro import loop_of
from autoshard.rewrite import applied
from autoshard.rules import rules_of
from autoshard.trace import trace

COSTS = st.builds(Costs, *[st.floats(0, 100)] * len(fields(Costs))).map(
    lambda costs: replace(costs, computing_seconds=min(costs.computing_seconds, costs.microbatch_seconds))
)


@given(COSTS, COSTS, st.integers(1, 5), st.integers(1, 20))
def test_affine_costs_are_found_and_extended(layer, ends, fewer, n):
    """Two programs of layers and ends give both, and so the costs of any number of layers."""
    truth = LayerCosts(layer, ends)
    found = layer_costs(truth.of(fewer), truth.of(fewer + 1), fewer, fewer + 1)
    assert astuple(found.of(n)) == pytest.approx(astuple(truth.of(n)), abs=1e-6)


@given(COSTS, COSTS)
def test_no_cost_is_negative(fewer, more):
    """Searches need not be consistent, and costs stay ones."""
    found = layer_costs(fewer, more, 2, 3)
    assert min(*astuple(found.layer), *astuple(found.ends)) >= 0


@given(COSTS, COSTS)
def test_a_layer_takes_as_long_as_it_computes(fewer, more):
    """A layer that hides communication of the ends may add less than it computes; many layers cannot."""
    layer = layer_costs(fewer, more, 2, 3).layer
    assert layer.microbatch_seconds >= more.computing_seconds - fewer.computing_seconds


def test_what_microbatches_in_flight_keep_is_held_once_for_each():
    """State and other bytes of layers are there once; what is not in layers is on one stage, but for what any stage needs to work."""
    costs = LayerCosts(Costs(0, 0, 0, 0, 0, 0, 10, 5, 1, 0), Costs(0, 0, 0, 0, 0, 0, 100, 7, 30, 0))
    assert costs.peak_bytes(2, 3, False) == 2 * (10 + 1 + 3 * 5) + 30
    assert costs.peak_bytes(2, 3, True) == 2 * (10 + 1 + 3 * 5) + 30 + 100 + 3 * 7


def test_a_backward_pass_of_its_own_has_what_was_kept_beside_what_it_makes():
    """On stages without the ends, where that is more than both passes together need while they work."""
    costs = LayerCosts(Costs(0, 0, 0, 0, 0, 0, 10, 5, 1, 8), Costs(0, 0, 0, 0, 0, 0, 100, 7, 30, 20))
    assert costs.peak_bytes(2, 3, False) == 2 * (10 + 3 * 5 + 8) + 20
    assert costs.peak_bytes(1, 3, False) == 10 + 3 * 5 + 1 + 30
    assert costs.peak_bytes(2, 3, True) == 2 * (10 + 1 + 3 * 5) + 30 + 100 + 3 * 7


def test_what_is_kept_is_what_the_backward_pass_reads():
    """Two products keep their operands that all microbatches do not share, and nothing of the update after the loop."""

    def step(w, x):
        def loss(w):
            return jnp.sum(jnp.tanh(x @ w["a"]) @ w["b"])

        return jax.tree.map(lambda one, gradient: one - gradient, w, jax.grad(loss)(w))

    weights = {"a": jnp.zeros((16, 32)), "b": jnp.zeros((32, 64))}
    traced = applied(Microbatches(4), trace(step, weights, jnp.zeros((8, 16))))
    facts = program_facts(traced.graph, rules_of(traced.graph), compiler_of(Cluster.parse("h100:2")))
    kept = kept_values(facts, loop_of(traced.graph, facts.rules, 4))
    assert (2, 32) in {traced.graph.values[value].shape for value in kept}
    assert not kept.intersection(traced.graph.arguments)
    assert all(traced.graph.values[value].shape[0] == 2 for value in kept)
    assert kept_values(facts, None) == frozenset()
