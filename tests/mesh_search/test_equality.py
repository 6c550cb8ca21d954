"""Of plans that predictions do not tell apart the simplest is taken."""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest

import autoshard
from autoshard.cluster import Cluster
from autoshard.cost.record import Cost
from autoshard.ir import Mesh
from autoshard.mesh_search.equality import complexity, simplest_first
from autoshard.plan.full_plan import figures_of_plan
from autoshard.render import format_seconds


def plan(seconds, axes=1, peak=100.0, microbatches=1):
    cost = Cost(seconds, seconds, seconds, 0.0, 0.0, peak, 0.0)
    return cost, complexity(Mesh.of({f"a{k}": 2 for k in range(axes)}), cost, microbatches)


@pytest.mark.parametrize(
    "other, is_first",
    [
        (plan(1.02), True),
        (plan(1.05), False),
        (plan(1.02, peak=150.0), False),
        (plan(1.02, microbatches=2), False),
        (plan(1.02, axes=3), False),
    ],
)
def test_the_simplest_of_equal_plans_comes_first(other, is_first):
    """Within the error, with as little memory, and in a form that is no more complex; without a known error the fastest does."""
    fastest, slowest = plan(1.0, axes=2), plan(2.0)
    order = [other, fastest] if is_first else [fastest, other]
    assert simplest_first([slowest, other, fastest], 0.03, lambda each: each) == [*order, slowest]
    assert simplest_first([slowest, other, fastest], 0.0, lambda each: each)[0] is fastest


def test_choices_of_the_simplest_do_not_add_up():
    """Equal is what is equal to the fastest of all that is known, also of what was left in an earlier choice."""
    fastest, simple = plan(1.02, axes=2), plan(1.04)
    for known, first in ((1.015, simple), (1.0, fastest), (0.5, fastest)):
        assert simplest_first([simple, fastest], 0.03, lambda each: each, known)[0] is first


def step(params, x):
    gradients = jax.grad(lambda params: jnp.mean((jax.nn.relu(x @ params["up"]) @ params["down"]) ** 2))(params)
    return jax.tree.map(lambda p, g: p - 1e-3 * g, params, gradients)


def test_a_search_takes_the_simplest_of_equal_plans_and_says_so():
    """Its note has the faster one's time, a comparison tells the simpler one; without an error that is known the fastest is taken."""
    shape, known = jax.ShapeDtypeStruct, Cluster.parse("v5e:2x4")
    args = {"up": shape((1024, 4096), jnp.float32), "down": shape((4096, 1024), jnp.float32)}, shape((1024, 1024), jnp.float32)
    exact, rough = (
        autoshard.search(step, *args, cluster=replace(known, device=replace(known.device, pair_error=error)), remat=None, microbatches=None)
        for error in (0.0, 0.5)
    )
    assert exact.cost.makespan_seconds < rough.cost.makespan_seconds <= 1.5 * exact.cost.makespan_seconds
    assert figures_of_plan(rough)[1] < figures_of_plan(exact)[1] and rough.cost.peak_bytes <= 1.1 * exact.cost.peak_bytes
    (note,) = (note for note in rough.notes if "equal within the model's error" in note)
    assert format_seconds(exact.cost.makespan_seconds) in note and not any("equal within" in note for note in exact.notes)
    told = str(autoshard.compare(exact.with_record(replace(exact.record, cluster=rough.record.cluster)), rough))
    assert "second is the simpler one" in told and "Equal" not in str(autoshard.compare(exact, exact))
