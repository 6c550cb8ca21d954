"""Lines that differ from an earlier one in some fields are written by these, and come back."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autoshard.errors import StrategyError
from autoshard.reader import Node
from autoshard.strategy.changes import with_changes, without_changes

KINDS, NUMBERS = st.sampled_from(("all_gather", "all_reduce")), st.integers(0, 3)
FIELDS = st.fixed_dictionaries({"kind": KINDS}, optional={"bytes": NUMBERS, "op": NUMBERS})
LINES = st.lists(FIELDS | st.just({"again": 3, "back": 1, "shift": {}}), max_size=50)


@given(LINES)
def test_whatever_is_alike_comes_back(lines):
    """Fields that are absent, equal or different, copies between, and lines farther away than any may refer to."""
    written = with_changes(lines)
    assert without_changes(Node(written)).value == lines
    assert len(json.dumps(written)) <= len(json.dumps(lines))


def test_a_line_is_written_by_what_it_changes():
    """In the nearest of the lines that leave least to write; a field that an earlier line has and this one has not cannot be left out."""
    sent = {"kind": "all_reduce", "bytes": 256.0, "count": 1, "seconds": 1.3e-05}
    larger, copy = {**sent, "bytes": 512.0}, {"again": 2, "back": 1, "shift": {}}
    lines = [sent, {**sent, "exposed_seconds": 0.0}, larger, copy, larger]
    assert with_changes(lines) == [sent, {"as": 1, "exposed_seconds": 0.0}, {"as": 2, "bytes": 512.0}, copy, {"as": 2}]


@pytest.mark.parametrize("back", [0, -1, 3, None, True, 1])
def test_a_reference_to_no_line_is_refused(back):
    """Before the first one, to itself, or to a copy, which the last number is; the error names the place."""
    lines = [{"kind": "all_gather"}, {"again": 1, "back": 1, "shift": {}}, {"as": back, "bytes": 1.0}]
    with pytest.raises(StrategyError, match=r"at sent\[2\].as: expected"):
        without_changes(Node(lines, "sent"))
