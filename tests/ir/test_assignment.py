"""Choices of an op and the layouts that follow from them: laws over random rules, and assignments of a few values by hand."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from random_rules import choices, rules, sizes

from autoshard.ir import (
    NOWHERE,
    Assignment,
    Factor,
    Graph,
    Mesh,
    Rule,
    Value,
    choice_for,
    computed_layout,
    divides,
    exchanges,
    layouts,
    legal,
    legal_choices,
    operand_layout,
    reductions,
    result_layout,
    result_layouts,
    sent_tensors,
    served_from,
    shards,
    view_of,
)

MESH = Mesh.of({"data": 2, "model": 4})


def shape(rule, dims):
    """The shape of a tensor of a rule."""
    return tuple(math.prod(rule.factors[f].size for f in factors) for factors in dims)


@st.composite
def cases(draw):
    """A rule, the sizes of a mesh's axes, and a choice that may or may not be legal."""
    rule, axes = draw(rules()), draw(sizes)
    return rule, axes, draw(st.sampled_from(choices(rule, len(axes))))


@given(rules(), sizes)
def test_legal_choices_are_those_that_are_legal(rule, axes):
    """One by one and all at once is the same, in the same order; splitting nothing is always legal."""
    tried = choices(rule, len(axes))
    assert legal_choices(rule, tried, axes) == [choice for choice in tried if legal(rule, choice, axes)]
    assert legal(rule, (NOWHERE,) * len(axes), axes) and legal(rule, (), ())


@given(cases())
def test_a_legal_choice_leaves_equal_parts(case):
    """Factors, operands and results are divided evenly, what must be whole is whole, and only sums are scattered."""
    rule, axes, choice = case
    if not legal(rule, choice, axes):
        return
    for factor, entry in enumerate(rule.factors):
        n = math.prod(size for (split, _), size in zip(choice, axes, strict=True) if split == factor)
        assert entry.size % n == 0 and (entry.shardable or all(split != factor for split, _ in choice))
    for position, dims in enumerate(rule.operands):
        assert divides(operand_layout(rule, choice, position), shape(rule, dims), axes)
    for position, dims in enumerate(rule.results):
        assert divides(computed_layout(rule, choice, position), shape(rule, dims), axes)
        assert divides(result_layout(rule, choice, position), shape(rule, dims), axes)
    assert all(rule.factors[factor].operator == "sum" for factor, scatter in choice if scatter >= 0)


@given(cases())
def test_layouts_follow_the_factors(case):
    """An axis splits the dimension that has its factor, and none where there is none; a scattered result is split where it is scattered."""
    rule, _, choice = case
    for position, dims in enumerate(rule.operands):
        for (factor, _), dim in zip(choice, operand_layout(rule, choice, position), strict=True):
            assert factor in dims[dim] if dim >= 0 else all(factor not in other for other in dims)
    for position, dims in enumerate(rule.results):
        computed = computed_layout(rule, choice, position)
        for (factor, scatter), before, after in zip(choice, computed, result_layout(rule, choice, position), strict=True):
            assert factor in dims[before] if before >= 0 else all(factor not in other for other in dims)
            assert after == (scatter if scatter >= 0 else before)


@given(cases())
def test_communication_is_of_the_factors_that_are_split(case):
    """Partial results are combined over the axes that split reductions, data is sent over those longer than one that split what sends."""
    rule, axes, choice = case
    combined = reductions(rule, choice)
    assert [axis for axis, _, _ in combined] == [k for k, (f, _) in enumerate(choice) if f >= 0 and rule.factors[f].kind == "reduction"]
    assert all((operator, scatter) == (rule.factors[choice[axis][0]].operator, choice[axis][1]) for axis, operator, scatter in combined)
    sent = exchanges(rule, choice, axes)
    assert {(axis, factor) for factor, over in sent for axis in over} == {
        (axis, f) for axis, (f, _) in enumerate(choice) if f >= 0 and rule.factors[f].sends and axes[axis] > 1
    }
    assert len({factor for factor, _ in sent}) == len(sent)
    assert set(sent_tensors(rule, choice, axes)) == {send.tensor for factor, _ in sent for send in rule.factors[factor].sends}


def test_a_factor_may_send_several_tensors():
    """Each of them, once, where the factor is split over more than one device."""
    rule = Rule.parse("([i], [i])->([i]) {i=8} permutation={i/all_gather 1 of 0 + all_gather 2 of 1 + all_gather 1 of 0}")
    assert sent_tensors(rule, ((-1, -1), (0, -1)), MESH.sizes) == (0, 1)
    assert sent_tensors(rule, ((-1, -1), (0, -1)), (8, 1)) == () == sent_tensors(rule, (NOWHERE, NOWHERE), MESH.sizes)


@given(rules(), sizes)
def test_a_choice_is_found_for_every_layout_that_needs_no_communication(rule, axes):
    """The choice that is found computes the result so and sends nothing; where none is found, no choice of the same axes does.

    Axes of one device are exempt: they split a factor of size one, or none.
    """
    silent = [c for c in legal_choices(rule, choices(rule, len(axes)), axes) if not (reductions(rule, c) or exchanges(rule, c, axes))]
    for result, dims in enumerate(rule.results):
        made = {choice: result_layout(rule, choice, result) for choice in silent}
        reached = {layout for choice, layout in made.items() if [f >= 0 for f, _ in choice] == [dim >= 0 for dim in layout]}
        for layout in layouts(len(dims), len(axes)):
            found = choice_for(rule, result, layout, axes)
            if found is not None:
                assert found in silent and result_layout(rule, found, result) == layout
            elif min(axes) > 1:
                assert layout not in reached


@pytest.mark.parametrize(
    ("layout", "choice"),
    [
        ((0, 0), ((0, -1), (1, -1))),  # what the first axis leaves of the major factor is nothing: the second takes the minor one
        ((0, -1), ((0, -1), (-1, -1))),
        ((-1, 0), None),  # four parts of two
    ],
)
def test_axes_split_the_factors_of_a_dimension_from_major_to_minor(layout, choice):
    """A merged dimension is split as its factors are, the major one to the end first."""
    assert choice_for(Rule.parse("([i, j])->([ij]) {i=2, j=4}"), 0, layout, MESH.sizes) == choice


@pytest.mark.parametrize(
    ("text", "choice", "is_legal"),
    [
        ("([ij])->([i, j]) {i=2, j=4}", ((0, -1), (1, -1)), True),  # the major factor is split to the end first
        ("([ij])->([i, j]) {i=2, j=4}", ((-1, -1), (1, -1)), False),
        ("([ij])->([i, j]) {i=4, j=4}", ((0, -1), (1, -1)), False),
        ("([ij])->([i, j]) {i=4, j=2}", ((1, -1), (0, -1)), False),  # against the order of axes
        ("([i])->([i]) {i=8} need_replication={i}", ((0, -1), (-1, -1)), False),
        ("([i])->([i]) {i=8} permutation={i}", ((0, -1), (-1, -1)), False),
        ("([i])->([i]) {i=8} permutation={i/collective_permute 4 of 0}", ((0, -1), (-1, -1)), True),
        ("([i])->([i]) {i=8} permutation={i/collective_permute 5 of 0}", ((0, -1), (-1, -1)), False),  # of four elements
        ("([i, k])->([i]) {i=8, k=4} reduction={k}", ((1, 0), (-1, -1)), True),
        ("([i, k])->([i]) {i=8, k=4} reduction={k}", ((1, 1), (-1, -1)), False),  # onto a dimension that is not there
        ("([i, k])->([i]) {i=8, k=4} reduction={k:max}", ((1, 0), (-1, -1)), False),
        ("([i, k])->([i]) {i=8, k=4} reduction={k}", ((1, 0), (0, -1)), False),  # an axis further in has it already
        ("([i, k])->([i]) {i=6, k=4} reduction={k}", ((-1, -1), (1, 0)), False),
        ("([i, k])->([i], [i]) {i=8, k=4} reduction={k}", ((1, 0), (-1, -1)), False),  # of several results none is scattered
    ],
)
def test_a_choice_is_legal_where_the_partitioner_need_not_move_data(text, choice, is_legal):
    """What a choice may split on a mesh of two by four devices, one reason after another."""
    assert legal(Rule.parse(text), choice, MESH.sizes) is is_legal


@given(st.permutations(range(3)), st.sampled_from(layouts(3, 2)))
def test_a_transpose_is_a_view(order, layout):
    """A transpose has each layout whose operand, in the permuted layout, it is a view of; what computes is a view of nothing."""
    rule = Rule(tuple(Factor(8) for _ in order), (((0,), (1,), (2,)),), (tuple((dim,) for dim in order),))
    assert view_of("transpose", rule, layout, MESH.sizes) == tuple(order[dim] if dim >= 0 else -1 for dim in layout)
    assert view_of("tanh", rule, layout, MESH.sizes) is None and view_of("transpose", None, layout, MESH.sizes) is None


@given(*[st.sampled_from(layouts(2, 2))] * 3, st.integers(0, 3), st.integers(0, 3))
def test_a_reader_is_served_from_what_is_cheapest(own, copy, target, first, second):
    """From the copy where that costs less, else from the value itself; from whichever is there already at no cost."""
    seconds = {own: first, copy: second} if own != copy else {own: first}
    served = served_from(own, copy, target, lambda source, _: seconds[source])
    assert served in (own, copy)
    assert served == own if target in (own, copy) else seconds[served] == min(seconds.values())
    assert served_from(own, None, target, lambda source, _: seconds[source]) == own


def test_what_is_not_assigned_is_whole():
    """A value without a layout is replicated, an op without a choice splits nothing."""
    found = Assignment(MESH, {3: ((0, -1), (-1, -1))}, {7: (0, 1)})
    assert found.layout(7) == (0, 1) and found.layout(8) == (-1, -1)
    assert found.choice(3) == ((0, -1), (-1, -1)) and found.choice(4) == (NOWHERE, NOWHERE)
    assert shards(found.layout(8), MESH.sizes) == 1


def test_a_result_that_replaces_an_argument_keeps_its_layout():
    """The other results leave as they are made."""
    values = tuple(Value((8, 8), "float32", 4) for _ in range(3))
    graph = Graph("f", values, (), (0,), ("w",), (1, 2), ("new", "loss"), aliases=((0, 0),))
    assert result_layouts(graph, Assignment(MESH, {}, {0: (0, 1), 1: (1, 0), 2: (1, -1)})) == ((0, 1), (1, -1))
