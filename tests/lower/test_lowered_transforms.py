"""Sharded Fourier transforms over several dimensions: split over all devices, and one kernel where they are not."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from programs import abstract, concrete
from random_assignments import random_assignment

import autoshard
from autoshard.cluster import Cluster
from autoshard.ir import Assignment, Mesh
from autoshard.judge.model import CostModel
from autoshard.lower import constrained, jax_mesh, manual_program
from autoshard.rules import rules_of
from autoshard.trace import trace

MESH = Mesh.of({"x": 2, "y": 4})
MODEL = CostModel(Cluster.parse("cpu:8"), MESH)


def lowered(fn, x, lowering, assignment_of):
    traced = trace(fn, x)
    rules = rules_of(traced.graph)
    paths = MODEL.reshard_paths(traced.graph.values)
    assignment = assignment_of(traced.graph, rules)
    return jax.jit(lowering(traced.jaxpr, traced.graph, rules, assignment, jax_mesh(MESH), paths)).lower(x)


def filtered(x):
    """A filter of real numbers in a loop, between a transform of all dimensions and one of a batch."""
    spectrum = jnp.fft.rfftn(x)
    smooth, _ = jax.lax.scan(lambda x, k: (jnp.fft.ifftn(jnp.fft.fftn(x) * k), None), spectrum, jnp.arange(1.0, 3.0))
    return jnp.fft.irfftn(smooth), jnp.fft.fft2(x)


@pytest.mark.sample(1)
@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("lowering", [constrained, manual_program])
def test_transforms_sharded_in_any_way_have_the_numbers_of_one_device(lowering, seed):
    """Resharded between transforms, in loops and batches, with results of real and of complex numbers."""
    (x,) = jax.tree.leaves(concrete((abstract((8, 16, 8)),), 0))
    step = lowered(filtered, x, lowering, lambda graph, rules: random_assignment(graph, rules, MESH, seed))
    for got, wanted in zip(step.compile()(x), filtered(x), strict=True):
        np.testing.assert_allclose(got, wanted, rtol=1e-4, atol=1e-4)


def test_a_transform_that_is_not_split_is_one_operation():
    """Where a device has all transformed dimensions, it runs one kernel for all of them, of its part of a batch, too."""

    def split(graph, rules):
        batch = tuple((rules[op.index].results[0][0][0], -1) for op in graph.ops[:1])
        choices = {op.index: (*batch, (-1, -1)) for op in graph.ops}
        return Assignment(MESH, choices, dict.fromkeys((*graph.arguments, *(op.results[0] for op in graph.ops)), (0, -1)))

    whole = lowered(jnp.fft.rfftn, jnp.ones((4, 8, 8)), manual_program, lambda *_: Assignment(MESH, {}, {}))
    of_batch = lowered(jnp.fft.fft2, jnp.ones((4, 8, 8), jnp.complex64), manual_program, split)
    for step in (whole, of_batch):
        assert step.as_text().count("stablehlo.fft") == 1
    assert "tensor<2x8x8xcomplex<f32>>" in of_batch.as_text()


def test_a_transform_of_all_dimensions_is_split_over_all_devices():
    """Without a batch each of 8 chips stores an eighth at every moment, or less: arrays beside it fit into the core's own memory."""
    x = jax.ShapeDtypeStruct((256, 256, 256), "complex64")
    one, eight = (autoshard.search(jnp.fft.fftn, x, cluster=cluster).cost for cluster in ("v5e:1x1", "v5e:2x4"))
    assert 2 * 256**3 * 8 / 8 <= eight.peak_bytes <= one.peak_bytes / 8 and eight.compute_seconds < one.compute_seconds / 3
    assert one.flops == one.transform_flops == 256**3 * 5 * 3 * 8 and eight.flops == one.flops / 8  # 5 n log2 n along each dimension


def test_transforms_are_counted_apart_from_the_products_that_are_verified(tmp_path):
    """Compiled programs name the FLOPs of products alone; a saved strategy keeps both."""

    def program(x, w):
        return jnp.fft.rfft(x).real @ w

    arguments = jnp.ones((16, 8)), jnp.ones((5, 4))
    strategy = autoshard.search(program, *arguments, cluster="cpu:8", mesh={"data": 8})
    strategy.save(tmp_path / "s.json")
    cost = autoshard.load(tmp_path / "s.json").cost
    assert (cost.transform_flops, cost.compiled_flops) == (2 * 5 * 8 * 3 / 2, 2 * 2 * 5 * 4)
    found = autoshard.verify(strategy, program, *arguments, target="cpu")
    assert found.predicted_flops == found.actual_flops == cost.compiled_flops
    assert "matrix products, convolutions and Fourier transforms" in str(strategy.explain())
