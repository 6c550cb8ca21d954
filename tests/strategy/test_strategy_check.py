"""A strategy is applied to the program it was found for and to no other."""

from __future__ import annotations

from dataclasses import replace

import pytest
from strategy_records import EXAMPLE, MESH

from autoshard.errors import StrategyError
from autoshard.ir import Graph, Op, Origin, Rule, Value
from autoshard.strategy import Program, TensorRecord, check_program

RULES = (Rule.parse("([i, k], [k, j])->([i, j]) {i=16, j=32, k=64} reduction={k}"), None)
GRAPH = Graph(
    name="f",
    values=(Value((16, 64), "float32", 4), Value((64, 32), "float32", 4), Value((16, 32), "float32", 4)),
    ops=(
        Op(0, "dot_general", (0, 1), (2,), {}, Origin("f.py", 3, "f"), (0,)),
        Op(1, "mystery", (2,), (2,), {}, Origin("f.py", 4, "f"), (1,)),
    ),
    arguments=(0, 1),
    argument_paths=("x", "w"),
    results=(2,),
    result_paths=("",),
    fingerprint="abc",
)
RECORD = replace(
    EXAMPLE,
    name="s",
    mesh=MESH,
    program=Program("f", "abc", 2, 3),
    arguments=(TensorRecord("x", (16, 64), "float32", ()), TensorRecord("w", (64, 32), "float32", ())),
    choices={0: ((0, -1), (2, 1))},
    layouts={0: (0, 1), 1: (-1, 0), 2: (0, 1)},
    copies={2: (0, -1)},
)


def test_a_strategy_of_the_program_passes():
    """The record of a program is an assignment of its graph."""
    check_program(RECORD, GRAPH, RULES)
    assert RECORD.assignment.choice(0) == ((0, -1), (2, 1))
    assert RECORD.assignment.layout(1) == (-1, 0)
    assert RECORD.assignment.mesh == MESH


@pytest.mark.parametrize(
    ("changes", "pattern"),
    [
        ({"layouts": {1: (-1, 2)}}, r"layout \[-1, 2\] of value 1 shards more dimensions than the value's 2"),
        ({"copies": {2: (2, -1)}}, r"copy \[2, -1\] of value 2"),
        ({"choices": {0: ((3, -1), (-1, -1))}}, r"op 0, dot_general at f\.py:3 \(f\), is illegal on the mesh data=4 x model=2"),
        ({"choices": {0: ((0, 1), (-1, -1))}}, "op 0.*illegal"),
        ({"choices": {0: ((2, 7), (-1, -1))}}, "op 0.*illegal"),
        ({"choices": {1: ((0, -1), (-1, -1))}}, "op 1, mystery.*illegal"),
        ({"program": Program("f", "abc", 1, 3)}, "it has 1 ops and 3 values, and the program has 2 and 3"),
        ({"program": Program("f", "abc", 2, 9)}, "it has 2 ops and 9 values"),
    ],
    ids=str,
)
def test_decisions_that_the_program_cannot_have_are_refused(changes, pattern):
    """A file that names the right program still cannot hold layouts or choices that its ops do not have."""
    with pytest.raises(StrategyError, match=f"'s' does not fit .*{pattern}"):
        check_program(replace(RECORD, **changes), GRAPH, RULES)


@pytest.mark.parametrize(
    ("changes", "pattern"),
    [
        ({"arguments": RECORD.arguments[:1]}, "with 1 arrays as arguments, and this program has 2"),
        (
            {"arguments": (RECORD.arguments[0], TensorRecord("w", (64, 8), "bfloat16", ()))},
            r"w bfloat16\[64,8\], and this.* w float32\[64,32\]",
        ),
        ({}, "'f' with 2 ops, and 'f' has the same arguments but does something else in 2 ops"),
    ],
    ids=str,
)
def test_a_strategy_of_another_program_says_what_differs(changes, pattern):
    """Another fingerprint is refused with the first thing that differs, and what to do."""
    other = replace(RECORD, program=Program("f", "xyz", 2, 3), **changes)
    with pytest.raises(StrategyError, match=f"{pattern}.*Search again"):
        check_program(other, GRAPH, RULES)
