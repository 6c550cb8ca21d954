"""Laws of moving costs between tables, against enumeration."""

from __future__ import annotations

import sys
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from small_models import labellings, small_models

from autoshard.budgets import BUDGETS
from autoshard.inference.message_layout import MessageLayout, class_order
from autoshard.inference.model import PairwiseModel
from autoshard.inference.reparametrisation import reparametrise
from autoshard.inference.trw_s import MessagePassing


def coarsened(model: PairwiseModel) -> PairwiseModel:
    """The model with zeros and ones in its pairs, whose tables have equal rows."""
    return PairwiseModel(model.unary, {pair: table // 5 for pair, table in model.pairs.items()})


@settings(max_examples=50, deadline=None)
@given(small_models())
def test_energies_are_unchanged(model):
    """Bound and tables add up to the energy of the original tables at all labels, and no table is negative."""
    moved = reparametrise(model)
    assert all(table.min() >= -1e-12 for table in (*moved.unary, *moved.pairs.values()))
    for labels in labellings(model):
        again = moved.bound + PairwiseModel(moved.unary, moved.pairs).energy(labels)
        assert again == pytest.approx(model.energy(labels), abs=1e-9)


@settings(max_examples=50, deadline=None)
@given(small_models(), st.booleans())
def test_reduced_costs_bound_every_labelling_with_the_label(model, coarse):
    """Labels cost at least the bound plus the reduced cost of each of them."""
    model = coarsened(model) if coarse else model
    moved = reparametrise(model)
    for labels in labellings(model):
        cost = model.energy(labels)
        assert all(moved.bound + reduced[label] <= cost + 1e-9 for reduced, label in zip(moved.reduced, labels, strict=True))


def test_a_chain_is_bounded_tightly():
    """On a tree the bound is the minimum itself, and the given tables are left alone."""
    generator = np.random.default_rng(0)
    unary = [generator.random(5) for _ in range(12)]
    pairs = {(i, i + 1): generator.random((5, 5)) for i in range(11)}
    before = [table.copy() for table in (*unary, *pairs.values())]
    model = PairwiseModel(unary, pairs)
    moved = reparametrise(model)
    best = min(map(model.energy, _beam(unary, pairs)))
    assert moved.bound == pytest.approx(best, rel=1e-9)
    assert all((a == b).all() for a, b in zip(before, (*unary, *pairs.values()), strict=True))


def test_a_chain_takes_one_sweep_however_its_nodes_are_numbered():
    """Costs go from end to end of a chain in a single sweep, though its variables are numbered at random."""
    generator = np.random.default_rng(1)
    n = 40
    unary = [generator.random(4) for _ in range(n)]
    pairs = {(i, i + 1): generator.random((4, 4)) for i in range(n - 1)}
    best = min(map(PairwiseModel(unary, pairs).energy, _beam(unary, pairs)))
    number = generator.permutation(n).tolist()
    shuffled = [unary[number.index(k)] for k in range(n)]
    moved = reparametrise(PairwiseModel(shuffled, {(number[i], number[j]): table for (i, j), table in pairs.items()}), max_sweeps=1)
    assert moved.bound == pytest.approx(best, rel=1e-9)


@settings(max_examples=100, deadline=None)
@given(small_models(), st.integers(2, 12), st.booleans())
def test_the_bound_never_falls(model, sweeps, coarse):
    """Extrapolations that would lower the bound are undone, and the messages by then give the same bound from the start."""
    model = coarsened(model) if coarse else model
    passing = MessagePassing(model)
    bound = -np.inf
    for _ in range(sweeps):
        passing.run(3)
        assert passing.bound() >= bound - 1e-9
        bound = passing.bound()
    assert MessagePassing(model, passing.messages).bound() == pytest.approx(bound, abs=1e-9)


@settings(max_examples=60, deadline=None)
@given(
    st.integers(1, 4),
    st.integers(2, 6),
    st.integers(0, 2**32 - 1),
    st.booleans(),
    st.sampled_from([0, 6, 1 << 12]),
    st.sampled_from([1, 40]),
    st.sampled_from([1, 2, 1 << 30]),
)
def test_levels_pass_the_messages_of_single_variables(width, layers, seed, ring, in_a_row, together, values):
    """Whole levels pass the messages that single variables would, whether layers touch in one place or around a ring, in any storage.

    With few values tables have equal rows and columns.
    """
    generator = np.random.default_rng(seed)
    sizes = generator.integers(1, 5, width).tolist()
    places = [(a, b) for a in range(width) for b in range(a + 1, width) if generator.random() < 0.7]
    within = {(a, b): generator.integers(0, values, (sizes[a], sizes[b])) / values for a, b in places}
    between = generator.random((sizes[-1], sizes[0]))
    unary = [generator.random(sizes[variable % width]) for variable in range(width * layers)]
    pairs = {(layer * width + a, layer * width + b): table for layer in range(layers) for (a, b), table in within.items()}
    pairs |= {(layer * width + width - 1, layer * width + width): between for layer in range(layers - 1)}
    if ring and layers * width > 2:
        pairs[0, layers * width - 1] = between.T
    alike = [variable % width for variable in range(width * layers)]
    with pytest.MonkeyPatch.context() as patch:
        budgets = replace(BUDGETS, small_entries=in_a_row, together_entries=together)
        patch.setattr(sys.modules[MessageLayout.__module__], "BUDGETS", budgets)
        passing = MessagePassing(PairwiseModel(unary, pairs), classes=alike)
    alone = {(pair, end): np.zeros(n) for pair, table in pairs.items() for end, n in enumerate(table.shape)}
    for _ in range(3):
        passing.sweep()
        _sweep(unary, pairs, alone, class_order(alike, pairs))
        for pair, moved in passing.messages.items():
            for end in (0, 1):
                assert moved[end] == pytest.approx(-alone[pair, end], abs=1e-12)


def _sweep(unary, pairs, taken, order):
    """One sweep of message passing, variable by variable; ``taken`` of each pair by its ends."""
    place = {variable: position for position, variable in enumerate(order)}
    for way in (1, -1):
        for variable in order[::way]:
            ends = [(pair, end) for pair in pairs for end in (0, 1) if pair[end] == variable]
            come = [(pair, end) for pair, end in ends if way * place[pair[1 - end]] < way * place[variable]]
            for pair, end in come:
                table = pairs[pair].T if end else pairs[pair]
                taken[pair, end] = (table - taken[pair, 1 - end]).min(axis=1)
            held = unary[variable] + sum(taken[each] for each in ends)
            for each in set(ends) - set(come):
                taken[each] = taken[each] - held / max(len(come), len(ends) - len(come))


def _beam(unary, pairs):
    """The best labels of a chain by the Viterbi recursion, one for each last label."""
    cost, paths = unary[0], [[k] for k in range(len(unary[0]))]
    for i in range(1, len(unary)):
        total = cost[:, None] + pairs[i - 1, i] + unary[i]
        came = total.argmin(axis=0)
        cost, paths = total.min(axis=0), [[*paths[k], label] for label, k in enumerate(came)]
    return paths
