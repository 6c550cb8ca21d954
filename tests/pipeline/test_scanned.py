"""Scanned layers of a step, and the step with fewer of them."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

from autoshard.pipeline.scanned import scanned_layers_of
from autoshard.trace import trace
from tests.programs import abstract, train_step_of


def step(layers, joined=False):
    """Layers of one width whose weights are stacked; the loss reads all of them at once where they are ``joined``."""
    params = {"w": abstract((layers, 8, 16)), "v": abstract((layers, 16, 8))}

    def loss(params, x, y):
        x, _ = jax.lax.scan(lambda x, p: (x + jnp.tanh(x @ p["w"]) @ p["v"], None), x, params)
        more = jnp.linalg.norm(jnp.cumsum(params["w"], 0)) if joined else 0.0
        return jnp.mean((x - y) ** 2) + more

    fn, args = train_step_of(loss, params, abstract((16, 8)), abstract((16, 8)))
    return trace(fn, *args, donate_argnums=0)


@pytest.mark.parametrize("layers, numbers", [(6, (2, 3)), (8, (2, 4)), (5, (1, 5))])
def test_shorter_programs_are_those_of_fewer_layers(layers, numbers):
    """Optimizer state included: the same operations on the same shapes as those of a step that has so many layers."""
    whole = step(layers)
    found = scanned_layers_of(whole)
    assert (found.count, found.handed_on_bytes) == (layers, 16 * 8 * 4)
    shorter = found.shorter(whole)
    assert shorter.numbers == numbers
    for n, short in zip(numbers, shorter.programs, strict=True):
        wanted = step(n).graph
        assert short.rewrites == whole.rewrites
        for graph in (short.graph, wanted):
            assert graph.argument_paths == whole.graph.argument_paths
        shapes, wanted_shapes = ([graph.values[value].shape for value in graph.arguments] for graph in (short.graph, wanted))
        assert shapes == wanted_shapes
        assert [op.params["length"] for op in short.graph.ops if op.primitive == "scan"] == [n, n]


def test_there_are_none_where_layers_are_few_or_needed_at_once():
    """A scan over three layers is no deep program, and sums along the layers need all of them."""
    assert scanned_layers_of(step(3)) is None
    joined = step(6, joined=True)
    assert scanned_layers_of(joined).shorter(joined) is None
