"""Which partial sums are sent together, as in the modules of libtpu 0.0.42 that `all_reduce_combiner` cites."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

from autoshard.cluster import Cluster
from autoshard.compilers import compiler_of
from autoshard.compilers.all_reduce_combiner import COMBINED_BYTES, sent_together
from autoshard.compilers.buffer_assignment import peak_memory
from autoshard.compilers.program_facts import program_facts
from autoshard.compilers.tpu.buffers import _early
from autoshard.cost.reshard import Step
from autoshard.ir import Assignment, Mesh, Value
from autoshard.rules import rules_of
from autoshard.trace import trace

ROWS, WIDTH = 4096, 128


def step(w, x):
    """An update that reads a statistic of the batch, and a loss that does not."""
    usage = jnp.sort(x).mean(0)
    return w - usage @ w - (jnp.cos(x) * usage).sum(0).sum(), (x @ w).sum()


def sums_with_loss(kinds=("all_reduce",) * 3, nbytes=256.0, devices=8):
    """What is combined with the loss of the three sums: the statistic, what the update makes of it, and the loss."""
    w, x = (jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((WIDTH, WIDTH), (ROWS, WIDTH, WIDTH)))
    graph = trace(step, w, x).graph
    facts = program_facts(graph, rules_of(graph), compiler_of(Cluster.parse("v5e:2x4")))
    whole = ROWS, WIDTH, WIDTH
    over_rows = [op.index for op in graph.walk() if op.primitive == "reduce_sum" and graph.values[op.operands[0]].shape == whole]
    partials = {
        op: Step(kind, (0,), (-1,), (0 if kind == "reduce_scatter" else -1,), 4.0 if op == over_rows[-1] else nbytes, 0.0)
        for op, kind in zip(over_rows, kinds, strict=True)
    }
    group = next((group for group in sent_together(graph, facts.combined, partials, (devices,)) if over_rows[-1] in group), ())
    return [over_rows.index(op) for op in group if op != over_rows[-1]]


def test_a_loss_is_sent_with_a_statistic_that_the_update_needs():
    """Where nothing that needs the statistic is all_reduced between, one collective takes both."""
    assert sums_with_loss(("all_reduce", "reduce_scatter", "all_reduce")) == [0]


def test_what_is_scattered_in_parts_of_tiles_is_all_reduced():
    """A gradient of 128 rows over 32 devices has four for each, half a tile: it takes the loss as if nobody scattered it."""
    assert sums_with_loss(("all_reduce", "reduce_scatter", "all_reduce"), devices=32) == [1]


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
    facts = program_facts(graph, rules_of(graph), compiler_of(Cluster.parse("v5e:2x4")))
    sums = [op for op in graph.walk() if op.primitive == "reduce_sum"]
    partials = {op.index: Step("all_reduce", (0,), (-1,), (-1,), float(graph.values[op.results[0]].nbytes), 0.0) for op in sums}
    sizes = [float(graph.values[value].nbytes) for value in facts.lifetimes.values]
    assert sum(nbytes for nbytes, _, _ in _early(facts, partials, sizes, (8,))) == ROWS * WIDTH * 4


def test_a_loss_that_is_sent_early_is_made_beside_the_activations():
    """What a loss is made of is in memory with what is still read where a statistic waits for the same all_reduce, else after that.

    A mixture of experts near the limit was predicted at 0.80 of what libtpu 0.0.42 takes of it without this.
    """
    rows, width = 2**14, 2**12
    w, v, x = (jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((width, width), (width, width), (rows, width)))

    def trained(w, v, x):
        kept = jnp.sort(x, 0, stable=False)  # without positions or copies
        updated = w - x.T @ (kept * kept.mean(0))
        return updated, (3.0 * (jnp.cos(x) @ v)).sum()

    graph = trace(trained, w, v, x, donate_argnums=0).graph
    facts = program_facts(graph, rules_of(graph), compiler_of(Cluster.parse("v5e:2x4")))
    statistic, loss = [op for op in graph.walk() if op.primitive == "reduce_sum"]
    assignment = Assignment(Mesh.of({"data": 8}), {}, {}, {})

    def held(*sent):
        partials = {op.index: Step("all_reduce", (0,), (-1,), (-1,), float(graph.values[op.results[0]].nbytes), 0.0) for op in sent}
        return peak_memory(facts, assignment, {}, partials).nbytes - 4 * (w.size + v.size + x.size)

    assert held(loss) == rows * width * 4
    assert held(statistic, loss) - held(loss) == rows * width * 4


@pytest.mark.parametrize(
    ("shape", "target", "formed"),
    [
        ((8, 1024), (1, 1), True),
        ((8, 768), (1, 1), False),
        ((4, 1024), (1, 1), False),
        ((1280, 5120), (1, 1), True),
        ((5120, 1280), (0, 1), False),
        ((1024,), (0, 0), False),
    ],
)
def test_compilers_form_reduce_scatters_of_whole_tiles_along_one_dimension(shape, target, formed):
    """As in mixtures of experts and a transformer of 1,280 features that libtpu 0.0.42 compiled for eight devices; XLA:GPU forms all."""
    step = Step("reduce_scatter", (0, 1), (-1, -1), target, 0.0, 0.0)
    value = Value(shape, "float32", 4.0)
    of = {cluster: compiler_of(Cluster.parse(cluster)).scatters(value, step, (4, 2)) for cluster in ("v5e:2x4", "h100:8")}
    assert of == {"v5e:2x4": formed, "h100:8": True}
