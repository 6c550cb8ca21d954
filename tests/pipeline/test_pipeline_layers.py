"""Scans over layers in parts compute what they compute in one, and their layers are on different stages."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import jaxpr_as_fun

from autoshard.errors import PipelineError
from autoshard.pipeline import stages_of
from autoshard.pipeline.layers import with_divided_layers
from autoshard.trace import trace
from tests import programs
from tests.pipelines import compared, pipelined
from tests.programs import abstract, concrete, train_step_of


def scanned(layers=4):
    """Layers of one width whose weights are stacked."""
    params = {"w": abstract((layers, 8, 16)), "v": abstract((layers, 16, 8))}

    def loss(params, x, y):
        x, _ = jax.lax.scan(lambda x, p: (x + jnp.tanh(x @ p["w"]) @ p["v"], None), x, params)
        return jnp.mean((x - y) ** 2)

    return train_step_of(loss, params, abstract((16, 8)), abstract((16, 8)))


@pytest.mark.parametrize("layers", [4, 5])
def test_parts_compute_the_same(layers):
    """Up to rounding, and each scan has a part of the layers."""
    fn, args = scanned(layers)
    traced = trace(fn, *args)
    divided = with_divided_layers(traced, 2, 4, rows=()).traced
    lengths = [op.params["length"] for op in divided.graph.ops if op.primitive == "scan"]
    assert lengths == ([2] * 4 if layers == 4 else [1] * 10)
    given = [jnp.asarray(x) for x in jax.tree.leaves(concrete(args))]
    for one, other in zip(*(jax.jit(jaxpr_as_fun(each.jaxpr))(*given) for each in (traced, divided)), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-6, atol=1e-9)


def test_scanned_layers_on_stages():
    """A scanned stack runs as a pipeline, with one activation and one cotangent between two stages."""
    fn, args = scanned()
    run = pipelined(fn, args, 2, 4)
    compared(run, args)
    assert [message.backward for stage in run.staged.stages for message in stage.sends if message.kind == "loop"] == [False, True]


@pytest.mark.parametrize("layers", [5, 6])
def test_stages_may_have_different_numbers_of_layers(layers):
    """Five and six equal layers on four stages: each has one or two."""
    fn, args = scanned(layers)
    stages = stages_of(trace(fn, *args), 4, 4).stages
    products = [sum(op.primitive == "dot_general" for op in stage.traced.graph.walk()) for stage in stages]
    assert max(products) <= 2 * min(products) and sum(products) == 6 * layers


def test_unequal_stages_compute_what_the_step_computes():
    """Three layers on two stages."""
    fn, args = scanned(3)
    compared(pipelined(fn, args, 2, 4), args)


@pytest.mark.slow
@pytest.mark.parametrize("n_stages", [2, 4])
@pytest.mark.parametrize("remat", [False, True])
def test_scanned_transformers_on_stages(n_stages, remat):
    """A scanned GPT, also one that recomputes its blocks."""
    fn, args = programs.gpt_scan(n_layers=4, remat=remat)
    compared(pipelined(fn, args, n_stages, 4, "zero_bubble"), args)


def test_a_scan_over_time_is_not_cut():
    """Its steps share their weights: one such loop is one operation, and more stages than operations are refused with the numbers."""

    def loss(w, x, y):
        h, _ = jax.lax.scan(lambda h, x: (jnp.tanh(h @ w + x), None), jnp.zeros((16, 8)), jnp.moveaxis(x, 1, 0))
        return jnp.mean((h - y) ** 2)

    fn, args = train_step_of(loss, abstract((8, 8)), abstract((16, 5, 8)), abstract((16, 8)))
    with pytest.raises(PipelineError, match="got 2 stages for 1 operations with products"):
        stages_of(trace(fn, *args), 2, 4)
    with pytest.raises(PipelineError, match="got 0"):
        stages_of(trace(fn, *args), 0, 4)
