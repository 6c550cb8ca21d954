"""One line per rule in the notation: goldens.txt says what the library believes of each operation."""

from __future__ import annotations

from pathlib import Path

import pytest
from rule_examples import EXAMPLES, example

from autoshard.ir import Rule

RULES = dict(line.split(": ", 1) for line in Path(__file__).with_name("goldens.txt").read_text().splitlines())


def test_every_example_has_a_golden_rule():
    """No example without its line, no line without its example."""
    assert list(RULES) == list(EXAMPLES)


@pytest.mark.parametrize("name", EXAMPLES)
def test_the_rule_reads_as_written(name):
    """The rule prints as its line, and the line parses to the rule."""
    assert str(example(name).rule) == RULES[name]
    assert Rule.parse(RULES[name]) == example(name).rule
