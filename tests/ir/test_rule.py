"""Rules and their notation: random rules are written and read back."""

from __future__ import annotations

import doctest

import pytest
from hypothesis import given
from hypothesis import strategies as st
from random_rules import rules

from autoshard.errors import RuleError
from autoshard.ir import Factor, Rule, Send, factor_name, factor_names, rule


@given(rules(most=6))
def test_a_rule_is_read_back_as_it_was_written(found):
    """The notation says everything: kinds, operators, sends, composed dimensions, scalars; written once more it is the same text."""
    assert Rule.parse(str(found)) == found
    assert str(Rule.parse(str(found))) == str(found)


@given(st.integers(1, 60))
def test_factors_have_names_of_their_own(n):
    """However many there are: Shardy's letters first, then numbered ones, which are read back next to each other."""
    found = Rule(tuple(Factor(2) for _ in range(n)), (((*range(n),),),), (tuple((f,) for f in range(n)),))
    assert len(set(factor_names(found))) == n and factor_names(found)[-1] == factor_name(n - 1)
    assert Rule.parse(str(found)) == found


@pytest.mark.parametrize(
    "text", ["([i])->[i] {i=8}", "([i])->([i])", "([i])->([i]) {i}", "([i])->([i]) {i=-8}", "([i])->([j]) {i=8}", "([i, i])->([i]) {i=8}"]
)
def test_what_is_no_rule_is_refused(text):
    """Missing brackets, sizes or factors, and a factor twice in a tensor, are told with the text or the tensor."""
    with pytest.raises(RuleError, match=r"got|has no size"):
        Rule.parse(text)


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: Factor(8, "split"), "kind is one of"),
        (lambda: Factor(8, "reduction"), "names its operator"),
        (lambda: Factor(8, "pass_through", "sum"), "names its operator"),
        (lambda: Factor(8, "reduction", "mean"), "operator is one of"),
        (lambda: Factor(8, "pass_through", None, (Send("all_gather", 0),)), "send each other data"),
        (lambda: Send("all_reduce", 0), "a send is one of"),
        (lambda: Send("all_gather", -1), "a send is one of"),
        (lambda: Rule((Factor(8),), (((1,),),), ()), "factors 0 to 0"),
    ],
)
def test_records_that_say_nothing_are_refused(make, says):
    """A factor has one kind, and what belongs to it; a rule has the factors that its tensors name."""
    with pytest.raises(RuleError, match=says):
        make()


def test_examples_in_the_docstrings_hold():
    """The examples hold."""
    assert not doctest.testmod(rule).failed
