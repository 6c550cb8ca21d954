"""Sharded programs that XLA, left to itself, computes wrongly, or does not compile."""

from __future__ import annotations

from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax
from random_assignments import random_assignment

from autoshard.cluster import Cluster
from autoshard.ir import Assignment, Mesh, computed_layout, divides, legal
from autoshard.judge.model import CostModel
from autoshard.lower import constrained, jax_mesh, manual_program
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


@pytest.mark.sample(3)
@pytest.mark.parametrize("name", WRONG)
def test_sharded_it_computes_what_it_means(name):
    """Under every legal split the result is that of the plain function."""
    fn, *args = WRONG[name]
    wanted = np.asarray(jax.jit(fn)(*args))
    found = [(choice, np.asarray(got)) for choice, (got,) in sharded_forms(fn, *args)]
    assert found
    for choice, got in found:
        np.testing.assert_array_equal(got, wanted, err_msg=str(choice))


ROWS = np.arange(300 * 8.0, dtype=np.float32).reshape(300, 8)  # more than the largest int8


def windows(x, update, i, j, many):
    """Slices of slices, updates of slices, and the windows that a mapped slice gathers, at starts as they are."""
    outer = lax.dynamic_slice_p.bind(x, i, j, slice_sizes=(64, 8))
    inner = lax.dynamic_slice_p.bind(outer, j, i, slice_sizes=(8, 8))
    updated = lax.dynamic_update_slice_p.bind(x[:256], update, i, j)
    nested = lax.dynamic_update_slice_p.bind(outer, update, j, i)
    numbers = lax.GatherDimensionNumbers((1, 2), (), (0,))
    gathered = lax.gather(x, many[:, None], numbers, (16, 8), mode="clip")
    return outer, inner, updated, nested, gathered


def windows_in_numpy(x, update, i, j, many):
    """What `windows` returns, by the definition of its operations: a window that would leave the array is moved inside."""

    def inside(start, size, window):
        return min(max(int(start), 0), size - window)

    def updated(x, start):
        return np.concatenate([x[:start], update, x[start + len(update) :]])

    outer = x[inside(i, 300, 64) :][:64]
    inner = outer[inside(j, 64, 8) :][:8]
    gathered = np.stack([x[inside(k, 300, 16) :][:16] for k in many])
    return outer, inner, updated(x[:256], inside(i, 256, 8)), updated(outer, inside(j, 64, 8)), gathered


@cache
def sharded_windows(lowering, dtype):
    """The function `windows`, whose ops read whole arrays, while their results are split over all devices."""
    start = jax.ShapeDtypeStruct((), dtype)
    many = jax.ShapeDtypeStruct((8,), dtype)
    traced = trace(windows, jax.ShapeDtypeStruct(ROWS.shape, "float32"), jax.ShapeDtypeStruct((8, 8), "float32"), start, start, many)
    made = (value for op in traced.graph.walk() for value in op.results)
    layouts = {value: (0, 0) for value in made if divides((0, 0), traced.graph.values[value].shape, MESH.sizes)}
    assignment, paths = Assignment(MESH, {}, layouts), MODEL.reshard_paths(traced.graph.values)
    return jax.jit(lowering(traced.jaxpr, traced.graph, rules_of(traced.graph), assignment, jax_mesh(MESH), paths))


@pytest.mark.sample(3)
@pytest.mark.parametrize("dtype", ["int8", "uint8", "int32", "uint32", "int64", "uint64"])
@pytest.mark.parametrize("lowering", [constrained, manual_program])
@given(data=st.data())
@settings(max_examples=20)
def test_a_window_beyond_the_end_is_moved_inside_before_its_result_is_split(lowering, dtype, data):
    """At any start of any integer type sharded slices, updates and gathers are those that the operations are defined to be."""
    info = np.iinfo(dtype)
    some = st.integers(info.min, info.max) | st.integers(max(info.min, -70), min(info.max, 310))
    i, j, *many = (np.array(data.draw(some), dtype) for _ in range(10))
    arguments = ROWS, -1 - ROWS[:8], i, j, np.stack(many)
    with jax.enable_x64(info.bits == 64):
        results = sharded_windows(lowering, dtype)(*arguments)
    for got, wanted in zip(results, windows_in_numpy(*arguments), strict=True):
        np.testing.assert_array_equal(got, wanted)


def windows_of_every_step(x, i, j, apart=lambda x: x):
    """Slices of slices and updates in a loop, a branch and a map, whose last windows leave the array, and their gradient."""

    def window(x, start):
        return lax.dynamic_slice_in_dim(apart(lax.dynamic_slice_in_dim(x, start, 64)), j, 16)

    def total(x):
        def body(carry, k):
            found = window(carry, i + 80 * k)
            return lax.dynamic_update_slice_in_dim(carry, 2 * found, j + 80 * k, 0), found

        last, found = lax.scan(body, x, jnp.arange(4))
        chosen = lax.cond(i > 0, lambda: window(x, i), lambda: window(last, j))
        mapped = jax.vmap(lambda row, k: lax.dynamic_update_slice_in_dim(row, row[:3] + 1, k, 0))(x, i + jnp.arange(len(x)))
        return jnp.sum(found**2) + jnp.sum(chosen**3) + jnp.sum(mapped * x), (last, found, chosen, mapped)

    return jax.grad(total, has_aux=True)(x)


windows_apart = jax.jit(partial(windows_of_every_step, apart=lax.optimization_barrier))


@pytest.mark.sample(1)
@pytest.mark.parametrize("lowering", [constrained, manual_program])
def test_windows_of_loops_branches_and_maps_are_moved_inside(lowering):
    """And so are those of gradients, however all are sharded: as on one device, where XLA merges no slices."""
    x = np.linspace(-1, 1, 304 * 8, dtype=np.float32).reshape(304, 8)
    traced = trace(windows_of_every_step, x, np.int32(0), np.int32(0))
    rules, paths = rules_of(traced.graph), MODEL.reshard_paths(traced.graph.values)
    assignment = random_assignment(traced.graph, rules, MESH, 0)
    sharded = jax.jit(lowering(traced.jaxpr, traced.graph, rules, assignment, jax_mesh(MESH), paths))
    for i, j in np.array([[250, 60], [-20, -9]], np.int32):
        expected = jax.tree.leaves(windows_apart(x, i, j))
        for got, wanted in zip(sharded(x, i, j), expected, strict=True):
            np.testing.assert_allclose(got, wanted, rtol=1e-4, atol=1e-5)
