"""Sharded programs that XLA, left to itself, computes wrongly, or does not compile."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from autoshard.cluster import Cluster
from autoshard.ir import Assignment, Mesh, computed_layout, divides, legal
from autoshard.judge.model import CostModel
from autoshard.lower import constrained, jax_mesh
from autoshard.rules import rules_of
from autoshard.trace import trace

MESH = Mesh.of({"x": 2, "y": 4})
MODEL = CostModel(Cluster.parse("cpu:8"), MESH)


def splits(rule):
    """Every legal choice in which one mesh axis splits one factor."""
    for factor in range(len(rule.factors)):
        for choice in (((factor, -1), (-1, -1)), ((-1, -1), (factor, -1))):
            if legal(rule, choice, MESH.sizes):
                yield choice


def sharded_forms(fn, *args):
    """What a function of one op computes under every split, its arguments replicated or sharded along the first dimension."""
    traced = trace(fn, *args)
    graph, rules = traced.graph, rules_of(traced.graph)
    (op,) = graph.ops
    rule = rules[op.index]
    for choice in splits(rule):
        for entering in (-1, 0):
            layouts = {value: (entering, -1) for value in graph.arguments if divides((entering, -1), graph.values[value].shape, MESH.sizes)}
            layouts |= {value: computed_layout(rule, choice, k) for k, value in enumerate(op.results)}
            assignment = Assignment(MESH, {op.index: choice}, layouts)
            paths = MODEL.reshard_paths(graph.values)
            yield choice, jax.jit(constrained(traced.jaxpr, graph, rules, assignment, jax_mesh(MESH), paths))(*args)


def grouped_kernel_gradient(x, cotangent):
    """The convolution that the gradient of a grouped convolution's kernel is: it groups the batch, and sums over the examples."""
    numbers = lax.ConvDimensionNumbers((0, 1, 2, 3), (0, 1, 2, 3), (0, 1, 2, 3))
    return lax.conv_general_dilated(x, cotangent, (1, 1), "VALID", dimension_numbers=numbers, batch_group_count=2)


X, WIDE = jnp.arange(16.0) + 1, jnp.arange(64.0).reshape(8, 8) + 1
ONE = lax.ScatterDimensionNumbers((), (0,), (0,))

WRONG = {
    "one_update_in_the_next_shard": (lambda x: lax.scatter_add(x, jnp.array([9]), jnp.float32(100), ONE), X),
    "one_update_overwrites": (lambda x: lax.scatter(x, jnp.array([0]), jnp.float32(100), ONE, unique_indices=True), X),
    "update_beyond_the_end": (lambda x, u: lax.dynamic_update_slice_p.bind(x, u, jnp.int32(40)), X, 100 * X[:1]),
    "update_before_the_beginning": (lambda x, u: lax.dynamic_update_slice_p.bind(x, u, jnp.int8(-9)), X, 100 * X[:1]),
    "reduction_from_an_initial_value": (lambda x: lax.reduce(x, np.float32(3), lambda a, b: a + b + 0 * a, (0,)), WIDE),
    "convolution_that_groups_the_batch": (grouped_kernel_gradient, jnp.ones((4, 4, 6, 6)), jnp.ones((8, 4, 3, 3))),
    "largest_complex_number": (lambda x: lax.reduce_max(x, (0,)), WIDE + 1j),
}


@pytest.mark.parametrize("name", WRONG)
def test_sharded_it_computes_what_it_means(name):
    """Under every legal split the result is that of the plain function."""
    fn, *args = WRONG[name]
    wanted = np.asarray(jax.jit(fn)(*args))
    found = [(choice, np.asarray(got)) for choice, (got,) in sharded_forms(fn, *args)]
    assert found
    for choice, got in found:
        np.testing.assert_array_equal(got, wanted, err_msg=str(choice))
