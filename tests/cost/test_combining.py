"""Which partial sums are sent together, as in the modules of libtpu 0.0.42 that combining.py cites."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

from autoshard.cost.combining import COMBINED_BYTES, sent_with
from autoshard.cost.memory import _early
from autoshard.cost.profile import profile
from autoshard.cost.reshard import Step
from autoshard.rules import rules_of
from autoshard.trace import trace

ROWS, WIDTH = 4096, 64


def step(w, x):
    """An update that reads a statistic of the batch, and a loss that does not."""
    usage = jnp.sort(x).mean(0)
    return w - usage @ w - (jnp.cos(x) * usage).sum(0).sum(), (x @ w).sum()


def sums_with_loss(kinds=("all_reduce",) * 3, nbytes=256.0):
    """What is combined with the loss of the three sums: the statistic, what the update makes of it, and the loss."""
    w, x = (jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((WIDTH, WIDTH), (ROWS, WIDTH)))
    graph = trace(step, w, x).graph
    facts = profile(graph, rules_of(graph))
    over_rows = [op.index for op in graph.walk() if op.primitive == "reduce_sum" and graph.values[op.operands[0]].shape == (ROWS, WIDTH)]
    partials = {
        op: Step(kind, (0,), (-1,), (-1,), 4.0 if op == over_rows[-1] else nbytes, 0.0) for op, kind in zip(over_rows, kinds, strict=True)
    }
    return [over_rows.index(op) for op in sent_with(graph, facts.combined, partials, over_rows[-1])]


def test_a_loss_is_sent_with_a_statistic_that_the_update_needs():
    """Where nothing that needs the statistic is all_reduced between, one collective takes both."""
    assert sums_with_loss(("all_reduce", "reduce_scatter", "all_reduce")) == [0]


def test_what_needs_a_sum_is_sent_after_it():
    """A gradient that needs the statistic starts another group, and that takes the loss."""
    assert sums_with_loss() == [1]


@pytest.mark.parametrize(("nbytes", "together"), [(COMBINED_BYTES - 4.0, [0]), (COMBINED_BYTES, [])])
def test_groups_are_no_larger_than_a_threshold(nbytes, together):
    """What the loss has no room with is sent alone."""
    assert sums_with_loss(("all_reduce", "reduce_scatter", "all_reduce"), nbytes) == together


@pytest.mark.parametrize("n_losses", [1, 3])
def test_losses_of_one_value_wait_for_it_together(n_losses):
    """However many sums of scalars are sent with what is wanted earlier, what they are made of is in memory once."""
    w, v, x = (jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((WIDTH, WIDTH), (WIDTH, WIDTH), (ROWS, WIDTH)))

    def several(w, v, x):
        updated = w - jnp.sort(x).mean(0) @ w
        made = jnp.cos(x) @ v
        return updated, sum((weight * made).sum() for weight in range(1, 1 + n_losses))

    graph = trace(several, w, v, x).graph
    facts = profile(graph, rules_of(graph))
    sums = [op for op in graph.walk() if op.primitive == "reduce_sum"]
    partials = {op.index: Step("all_reduce", (0,), (-1,), (-1,), float(graph.values[op.results[0]].nbytes), 0.0) for op in sums}
    sizes = [float(graph.values[value].nbytes) for value in facts.lifetimes.values]
    assert sum(nbytes for nbytes, _, _ in _early(facts, partials, sizes)) == ROWS * WIDTH * 4
