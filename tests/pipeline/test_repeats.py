"""Repeated layers: runs in a sequence of operations, and programs with fewer of their own layers."""

from __future__ import annotations

from functools import cache
from itertools import pairwise

import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autoshard.ir.rewrites import Microbatches
from autoshard.pipeline.repeats import layers_of, runs_of, shortened
from autoshard.rewrite import applied
from autoshard.trace import trace
from benchmarks import models

SMALL = {"batch": 16, "length": 32}
PROGRAMS = {
    "gpt": lambda n: models.gpt(n, 64, 4, 128, **SMALL),
    "gpt, remat": lambda n: models.gpt(n, 64, 4, 128, remat=True, **SMALL),
    "gpt, untied": lambda n: models.gpt(n, 64, 4, 128, tied=False, **SMALL),
    "llama": lambda n: models.llama(n, 64, 4, 2, 96, 128, **SMALL),
    "moe": lambda n: models.moe(n, 64, 4, 4, 128, **SMALL),
    "moe, Adafactor": lambda n: models.moe(n, 64, 4, 4, 128, **SMALL, optimizer=optax.adafactor(1e-2, min_dim_size_to_factor=16)),
}


@cache
def traced(name: str, n_layers: int):
    fn, args = PROGRAMS[name](n_layers)
    return trace(fn, *args, donate_argnums=0)


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.integers(0, 5), max_size=6),
    st.lists(st.integers(0, 5), min_size=1, max_size=6),
    st.integers(4, 8),
    st.lists(st.integers(6, 9), max_size=6),
)
def test_what_repeats_is_found(before, period, count, after):
    """Runs are disjoint, in order and periodic, and a sequence that was repeated is in one of them or in several."""
    tokens = [*before, *(period * count), *after]
    runs = runs_of(tokens)
    for run in runs:
        inside = tokens[run.start : run.stop]
        assert run.count >= 4
        assert inside[run.period :] == inside[: -run.period]
    assert all(a.stop <= b.start for a, b in pairwise(runs))
    assert sum(run.length for run in runs) >= len(period) * count - len(period)


def test_what_does_not_repeat_has_no_runs():
    """Different tokens, and fewer repetitions than make a deep program."""
    assert runs_of(range(50)) == ()
    assert runs_of([1, 2, 3] * 3) == ()
    assert runs_of([]) == ()


@pytest.mark.parametrize("name", PROGRAMS)
@pytest.mark.parametrize("kept", [2, 3])
def test_a_shortened_program_is_that_of_fewer_layers(name, kept):
    """It has the arguments, results and, but for shared constants, the operations of the program traced with so few layers."""
    whole, small = traced(name, 7), traced(name, kept)
    layers = layers_of(whole.graph)
    assert layers is not None
    assert layers.count == 7
    short = shortened(whole, layers, kept)
    assert short is not None

    def leaves(graph, numbers):
        return sorted((graph.values[value].shape, graph.values[value].dtype) for value in numbers)

    def read(graph):
        """The arguments that it reads: all others stay, since nothing tells their layer."""
        return {value for op in graph.ops for value in op.operands}.intersection(graph.arguments)

    assert leaves(short.graph, read(short.graph)) == leaves(small.graph, read(small.graph))
    assert len(short.graph.arguments) - len(read(short.graph)) == len(whole.graph.arguments) - len(read(whole.graph))
    assert leaves(short.graph, short.graph.results) == leaves(small.graph, small.graph.results)
    assert len(short.graph.aliases) == len(small.graph.aliases)
    donated = [read(graph).intersection(graph.arguments[k] for k in graph.donated) for graph in (short.graph, small.graph)]
    assert len(donated[0]) == len(donated[1])
    products = [sorted(op.primitive for op in each.graph.walk() if op.primitive == "dot_general") for each in (short, small)]
    assert products[0] == products[1]
    assert abs(len(short.graph.walk()) - len(small.graph.walk())) <= 0.02 * len(small.graph.walk())
    assert len(applied(Microbatches(4), short).graph.walk()) > 0


def test_what_a_layer_hands_on():
    """Between two layers of a transformer there is the residual stream, and what the layer behind reads of the one before alone."""
    layers = layers_of(traced("gpt", 6).graph)
    stream = 16 * 32 * 64 * 2
    assert stream <= layers.handed_on_bytes <= 2 * stream


@pytest.mark.parametrize("make", [lambda: models.unet(2, 8, 8, 16, 4), lambda: models.gpt(2, 64, 4, 128, **SMALL)])
def test_a_program_without_equal_layers_has_none(make):
    """A shallow program, or one whose blocks all differ, is not taken for a deep one."""
    fn, args = make()
    assert layers_of(trace(fn, *args).graph) is None
