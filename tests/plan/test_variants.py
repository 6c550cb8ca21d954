"""Variants of a program: which of them are searched, and in which order."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

import autoshard
from autoshard.ir.rewrites import Padded, PaddedDim
from autoshard.plan import searching
from autoshard.plan.variants import most_growth


def step(state, x):
    """A train step of a layer and a wide head."""

    def loss(state):
        return jnp.mean((jnp.tanh(x @ state["up"]) @ state["head"]) ** 2)

    return jax.tree.map(lambda p, g: p - 0.1 * g, state, jax.grad(loss)(state))


@pytest.mark.parametrize("batch,width,n,has_more_work", [(64, 512, 16_007, [False]), (3, 16, 12, [False, True])])
def test_what_padding_contains_is_not_searched_without_it(batch, width, n, has_more_work, monkeypatch):
    """Padding of less than a hundredth of which the plan makes use; with more work the program as it is written is searched first."""
    searched, search = [], searching._searched

    def recorded(fn, *args):
        searched.append(fn.rewrites)
        return search(fn, *args)

    monkeypatch.setattr(searching, "_searched", recorded)
    up, head, x = (jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((width, 64), (64, n), (batch, width)))
    pins = {"state['head']": P(None, "data")} if n > 100 else {}
    autoshard.search(step, {"up": up, "head": head}, x, cluster="v5e:2x4", donate_argnums=0, pins=pins)
    assert [any(most_growth(each, 8) > 0.01 for each in rewrites) for rewrites in searched] == has_more_work
    assert bool(searched[0]) == (n > 100)


@pytest.mark.parametrize("sizes,n_devices,most", [([(1000, 1008)], 16, 0.008), ([(27, 28)], 12, None), ([(10, 11), (8, 8)], 2, None)])
def test_what_padding_may_cost(sizes, n_devices, most):
    """Operations take no longer than in proportion; unknown where fewer devices divide the padded size than the plain one."""
    padded = Padded((PaddedDim(0, 0, tuple(sizes)),))
    assert most_growth(padded, n_devices) == (pytest.approx(most) if most is not None else float("inf"))
