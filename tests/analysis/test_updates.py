"""Gradients that are stored before new state is computed of them."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

import autoshard
from autoshard.run.step import Step

ROWS, WIDTH = 16_384, 128


def step(w, x, y):
    return w - 1e-3 * jax.grad(lambda w: jnp.mean((x @ w - y) ** 2))(w)


def tied(w, x, y):
    """The gradient is transposed before it is subtracted."""
    return w - 1e-3 * jax.grad(lambda w: jnp.mean((x @ w.T - y) ** 2))(w)


def without_state(w, x, y):
    return step(w, x, y).astype(jnp.bfloat16)


def barriers(fn, split, rows=ROWS, cluster="v5e:2x2"):
    """How often a value is kept apart in what a device runs, of a plan by given specs."""
    shapes = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((WIDTH, WIDTH), (rows, WIDTH), (rows, WIDTH))]
    specs = {"rows": (P(), P("x"), P("x")), "columns": (P(None, "x"), P(), P(None, "x")), "transposed": (P("x"), P(), P(None, "x"))}
    found = autoshard.evaluate(fn, *shapes, cluster=cluster, mesh={"x": 4}, in_specs=specs[split], donate_argnums=0)
    return Step(fn, found.record, None).lower(*shapes, platform="cpu").as_text().count("optimization_barrier")


@pytest.mark.parametrize(("fn", "split"), [(step, "columns"), (tied, "transposed")])
def test_a_gradient_of_many_rows_is_stored_before_the_update_on_a_tpu(fn, split):
    """XLA:TPU would compute both in one kernel, which takes twice as long; a transposition in between changes nothing."""
    assert barriers(fn, split) == 1
    assert barriers(fn, split, rows=ROWS // 2) == 0
    assert barriers(fn, split, cluster="h100:4x1") == 0


def test_what_replaces_no_argument_is_not_kept_apart():
    assert barriers(without_state, "columns") == 0
