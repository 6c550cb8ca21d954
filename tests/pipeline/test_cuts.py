"""What cuts of a step have in common is made once, and belongs to the search and to the strategy that is found."""

from __future__ import annotations

import gc
import weakref

import jax
import jax.numpy as jnp

import autoshard
from autoshard.cluster import Cluster
from autoshard.pipeline import cuts as module
from autoshard.pipeline.cuts import Cuts
from autoshard.trace import trace
from tests.programs import abstract, train_step_of

WIDTH, LAYERS = 8, 4


def step_around(table):
    """A train step that closes over an array, and its arguments."""

    def loss(layers, x):
        for w in layers:
            x = jnp.tanh(x @ w) + table
        return jnp.mean(x**2)

    return train_step_of(loss, [abstract((WIDTH, WIDTH))] * LAYERS, abstract((8, WIDTH)))


def test_nothing_is_alive_after_a_search():
    """An array that a step closes over is gone with the step and the strategy that was found, whatever was asked of it."""
    table = jnp.arange(float(WIDTH))
    alive, (step, args) = weakref.ref(table), step_around(table)
    strategy = autoshard.search(step, *args, cluster="cpu:4", stages=2, microbatches=4)
    strategy.what_if(stages=4)
    assert strategy.stages[0] is not None
    del table, step, strategy
    jax.clear_caches()
    gc.collect()
    assert alive() is None


def test_cuts_of_other_numbers_of_stages_begin_with_the_same_programs(monkeypatch):
    made, micro_of = [], module.micro_of
    monkeypatch.setattr(module, "micro_of", lambda *of: made.append(of) or micro_of(*of))
    step, args = step_around(0.0)
    cuts, devices = Cuts(trace(step, *args), 4), Cluster.of("cpu:1")
    (own,) = cuts.passes
    two, four = (cuts.stages(own, n, devices) for n in (2, 4))
    assert two.micro is four.micro and len(made) == 1
    assert cuts.stages(own, 2, devices) is two and cuts.stages(own, 2, devices, rows=()) is not two
