"""Collectives of every kind, value and reason have words, and these name what the records have."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from autoshard.ir import Collective, MovedValue, Origin, Reason, ServedOp, Split, as_compiled
from autoshard.ir.attribution import REASONS, ROLES, VALUES
from autoshard.ir.collective import KINDS

names = st.text("abcxyz['].*0123", min_size=1, max_size=12)
axes = st.lists(st.sampled_from(("data", "model", "expert")), min_size=1, unique=True).map(tuple)
entries = st.none() | st.sampled_from(("data", "model")) | st.just(("data", "model"))
splits = st.builds(Split, st.sampled_from("ijk"), st.integers(1, 4096), st.sampled_from(ROLES))


@st.composite
def collectives(draw, complete: bool = True) -> Collective:
    """A collective with its op, value and reason; or, where it need not be complete, with some of them."""
    over, shape = draw(axes), draw(st.lists(st.integers(1, 64), max_size=3).map(tuple))
    specs = st.lists(entries, max_size=len(shape)).map(tuple)
    served = ServedOp(draw(names), draw(st.integers(0, 99)), draw(st.builds(Origin, names, st.integers(1, 99), names)))
    moved = MovedValue(
        draw(st.sampled_from(VALUES)), draw(names), "float32", shape, draw(st.lists(st.sampled_from(("scan", "transpose"))).map(tuple))
    )
    why = Reason(
        draw(st.sampled_from(list(REASONS))),
        draw(specs),
        draw(specs),
        tuple(draw(st.lists(st.none() | splits, min_size=len(over), max_size=len(over)))),
        draw(st.sampled_from(("sum", "max", "min", "prod", "and", "or"))),
        draw(st.lists(st.integers(0, 2), unique=True).map(tuple)),
        draw(names),
    )
    known = (part if complete or draw(st.booleans()) else None for part in (served, moved, why))
    return Collective(draw(st.sampled_from(KINDS)), over, 1.0, 1, *known)


@given(collectives(complete=False))
def test_whatever_is_known_has_words(found):
    """Op, value and reason have words exactly where they are known, whatever else is missing."""
    known = [part is not None for part in (found.op, found.value, found.reason)]
    assert [bool(found.source), bool(found.tensor), bool(found.cause)] == known


@given(collectives())
def test_words_name_what_the_records_have(found):
    """The value's type and name, the op and its line, the layouts, splits, operators, dimensions and arguments that its reason has."""
    value, reason = found.value, found.reason
    assert found.tensor.endswith(f"float32[{','.join(map(str, value.shape))}]")
    assert value.name in found.tensor or value.kind in ("constant", "unknown")
    for move, words in (("scan", "a slice of "), ("transpose", "transpose of ")):
        assert found.tensor.count(words) == value.moves.count(move)
    assert found.source == f"{found.op.primitive} {found.op.origin}"
    has = REASONS[reason.kind]
    if "splits" in has:
        assert found.op.primitive in found.cause and all(f"'{axis}'" in found.cause for axis in found.mesh_axes)
        assert all(f"{split.role} {split.factor}={split.size}".strip() in found.cause for split in reason.splits if split)
    for name in ("before", "after"):
        assert name not in has or all(repr(entry) in found.cause for entry in getattr(reason, name))
    assert "argument" not in has or reason.argument in found.cause
    assert "dims" not in has or all(str(dim) in found.cause for dim in reason.dims)


kinds = st.sampled_from(KINDS)


@given(st.lists(st.tuples(kinds, st.none() | st.lists(kinds, max_size=3)), max_size=4))
def test_a_compiler_makes_some_of_each(planned):
    """In order, each planned collective itself or those expected of it, which may be none; nothing else is made of those."""
    made = as_compiled(
        Collective(kind, ("a",), 1.0, compiled=None if parts is None else tuple(Collective(part, ("a",), 1.0) for part in parts))
        for kind, parts in planned
    )
    assert [one.kind for one in made] == [part for kind, parts in planned for part in ([kind] if parts is None else parts)]
    assert as_compiled(made) == made
