"""What the elements of rows are: of their own row alone, or positions of rows, and what operations make of these.

A microbatch's positions are others than those among all examples, but in the same order: comparisons of positions in the same rows, and
with what none is below, say the same. Where each example has several rows, so do quotients and remainders by how many.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import Enum

from autoshard.ir import Op, Value
from autoshard.microbatch.provenance import Provenance
from autoshard.primitives import is_rearrangement, of_kind

EXAMPLES = -1  # the order of the examples


@dataclass(frozen=True, slots=True)
class Positions:
    """Elements that are positions of rows.

    Attributes:
        order: the order of the rows they are positions in: the index of a sort, or `EXAMPLES`.
        size: how many rows there are.
        inner: how many of them an example has.
        offset: what is added to each; where it is more than 0, elements may be 0 for no row.
        distinct: whether each row is there once.
    """

    order: int
    size: int
    inner: int
    offset: int = 0
    distinct: bool = True


class Elements(Enum):
    """Elements that are no positions: of their own row alone; computed of positions; or all false."""

    OWN = "own"
    DERIVED = "derived"
    FALSE = "false"


@dataclass(frozen=True, slots=True)
class Coordinates:
    """Elements of indices with several coordinates, which are the last dimension."""

    each: tuple[Content, ...]


Content = Positions | Elements | Coordinates


@dataclass(frozen=True, slots=True, eq=False)
class Made:
    """An op without bodies, and the arrays that it reads and makes."""

    op: Op
    operands: Sequence[Value]
    results: Sequence[Value]
    known: Provenance

    def number(self, place: int) -> float | None:
        """The number that an operand is."""
        return self.known.number(self.op.operands[place])


def elements_of(made: Made, content: Sequence[Content]) -> Content | None:
    """What the elements of an op's results are, by those of its operands; None where it may not read them."""
    if all(each is Elements.OWN for each in content):
        return Elements.OWN
    name = made.op.primitive
    if name == "concatenate" and _is_coordinates(made, content):
        return Coordinates(tuple(content))
    if any(isinstance(each, Coordinates) for each in content):
        return None
    if name == "convert_element_type":
        is_kept = made.results[0].dtype.startswith(("int", "uint", "bool")) and made.results[0].itemsize >= made.operands[0].itemsize
        return content[0] if is_kept else Elements.DERIVED
    if is_rearrangement(name) or name in ("broadcast_in_dim", "copy", "name", "pvary", "stop_gradient"):
        return content[0]
    if name not in _ELEMENTWISE:
        return None
    function = _OF_POSITIONS.get(name)
    found = function(made, content) if function is not None else None
    return Elements.DERIVED if found is None else found


def _is_coordinates(made: Made, content: Sequence[Content]) -> bool:
    """Whether an op joins coordinates of indices, which are the last dimension."""
    at = made.op.params["dimension"]
    known = all(isinstance(each, Positions) or each is Elements.OWN for each in content)
    return known and at == made.results[0].rank - 1 and all(value.shape[at] == 1 for value in made.operands)


_ELEMENTWISE = frozenset(of_kind("elementwise"))

_Function = Callable[[Made, Sequence[Content]], Content | None]


def _is_less(made: Made, content: Sequence[Content]) -> Content | None:
    """``positions < 0`` is nowhere so."""
    number = made.number(1)
    return Elements.FALSE if isinstance(content[0], Positions) and number is not None and number <= 0 else None


def _is_no_less(made: Made, content: Sequence[Content]) -> Content | None:
    """``positions >= 0`` is everywhere so."""
    number = made.number(1)
    return Elements.OWN if isinstance(content[0], Positions) and number is not None and number <= 0 else None


def _is_equal(made: Made, content: Sequence[Content]) -> Content | None:
    """Positions in the same rows are equal where they are of the same row, and 0 where they are of none."""
    one, other = content
    if isinstance(one, Positions) and isinstance(other, Positions):
        same = replace(one, distinct=True) == replace(other, distinct=True)
        return Elements.OWN if same else None
    for place, each in enumerate(content):
        if isinstance(each, Positions) and each.offset > 0 and made.number(1 - place) == 0:
            return Elements.OWN
    return None


def _chosen(made: Made, content: Sequence[Content]) -> Content | None:
    which, *cases = content
    if len(cases) != 2:
        return None
    if which is Elements.FALSE or made.known.is_floor(made.op):
        return cases[0]
    if which is Elements.OWN and isinstance(cases[0], Positions) and cases[0] == cases[1]:
        return replace(cases[0], distinct=False)
    return None


def _divided(made: Made, content: Sequence[Content]) -> Content | None:
    """Which of the rows, several in a row of the same example, of which positions count every so many."""
    found, divisor = content[0], made.number(1)
    if not _divides(found, divisor):
        return None
    assert isinstance(found, Positions) and divisor is not None, "what is divided is positions"
    by = int(divisor)
    return replace(found, size=found.size // by, inner=found.inner // by, distinct=found.distinct and by == 1)


def _divides(found: Content, divisor: float | None) -> bool:
    if not isinstance(found, Positions) or divisor is None or divisor < 1 or divisor != int(divisor):
        return False
    return found.order == EXAMPLES and found.offset == 0 and found.inner % int(divisor) == 0


def _shifted(made: Made, content: Sequence[Content]) -> Content | None:
    bits = made.number(1)
    if bits is None or not _divides(content[0], 2.0**bits):
        return None
    assert isinstance(content[0], Positions), "what is shifted is positions"
    by = int(2**bits)
    return replace(content[0], size=content[0].size // by, inner=content[0].inner // by, distinct=content[0].distinct and by == 1)


def _added(made: Made, content: Sequence[Content]) -> Content | None:
    for place, each in enumerate(content):
        number = made.number(1 - place)
        if isinstance(each, Positions) and number is not None and each.offset == 0 <= number:
            return replace(each, offset=int(number))
    return None


def _largest(made: Made, content: Sequence[Content]) -> Content | None:
    for place, each in enumerate(content):
        number = made.number(1 - place)
        if isinstance(each, Positions) and number is not None and number <= 0:
            return each
    return None


def _clamped(made: Made, content: Sequence[Content]) -> Content | None:
    low, found, high = made.number(0), content[1], made.number(2)
    if low is None or high is None or not isinstance(found, Positions):
        return None
    return found if low <= 0 and high >= found.size - 1 + found.offset else None


_OF_POSITIONS: dict[str, _Function] = {
    "add": _added,
    "and": lambda made, content: Elements.FALSE if Elements.FALSE in content else None,
    "clamp": _clamped,
    "div": _divided,
    "eq": _is_equal,
    "ge": _is_no_less,
    "lt": _is_less,
    "max": _largest,
    "ne": _is_equal,
    "rem": lambda made, content: Elements.OWN if _divides(content[0], made.number(1)) else None,
    "select_n": _chosen,
    "shift_right_arithmetic": _shifted,
    "shift_right_logical": _shifted,
}
