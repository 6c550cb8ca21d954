"""Attribution has words, all of them made in one module."""

from __future__ import annotations

import doctest

from autoshard.ir import Collective, MovedValue, Origin, Reason, ServedOp, Split, words
from autoshard.ir.attribution import REASONS, VALUES

W = MovedValue("argument", "w", "float32", (8, 8))
OP = ServedOp("cumsum", 3, Origin("model.py", 7, "loss"))
PARTS = {
    "before": ("data", None),
    "after": (),
    "splits": (Split("i", 8, "reduced"),),
    "operator": "max",
    "dims": (1,),
    "argument": "state['w']",
}


def test_every_kind_of_reason_has_its_own_words():
    """No two kinds read alike, and each names what it has: the op, both layouts, the argument, what is split."""
    found = {
        kind: Collective("all_gather", ("data",), 1.0, 1, OP, W, Reason(kind, **{name: PARTS[name] for name in parts})).cause
        for kind, parts in REASONS.items()
    }
    assert found["read"] == "kept as P('data', None), read whole: cumsum splits reduced i=8 over 'data'"
    assert found["combined"] == "cumsum splits reduced i=8 over 'data': partial maxima, each device keeps its slice of dim 1"
    assert found["exchanged"] == "cumsum splits reduced i=8 over 'data', and needs data of other shards"
    assert "state['w']" in found["replaced"] and "cumsum" in found["held"] and "no sharding rule" in found["unruled"]
    assert len(set(found.values())) == len(REASONS) and all(found.values())


def test_every_kind_of_value_has_its_own_words():
    """An argument is called by its path, an op's result by the op, what has no name by what it is."""
    assert len({words.value_name(MovedValue(kind, "x", "float32", ())) for kind in VALUES}) == len(VALUES)
    assert Collective("all_gather", ("data",), 1.0, value=W).tensor == "w float32[8,8]"


def test_factors_are_told_apart_by_mesh_axis():
    """Axes that split one factor are named together, those that split nothing too."""
    reason = Reason("read", (), ("data",), (Split("i", 8), None, Split("i", 8), None))
    found = Collective("all_gather", ("a", "b", "c", "d"), 1.0, 1, OP, W, reason).cause
    assert found == "kept whole, read as P('data', None): cumsum splits i=8 over 'a', 'c' and nothing over 'b', 'd'"


def test_what_is_not_known_has_no_words():
    """A collective that only says what is sent has empty words; one found in a compiled module the name that it has there."""
    bare = Collective("all_gather", ("data",), 1.0)
    assert (bare.source, bare.tensor, bare.cause) == ("", "", "")
    assert Collective("all_gather", ("data",), 1.0, 1, ServedOp(name="jit(f)/dot")).source == "jit(f)/dot"


def test_examples_in_the_docstrings_hold():
    """The examples hold."""
    assert doctest.testmod(words).failed == 0
