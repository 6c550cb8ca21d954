"""Why a collective is there, as data: the value that moves, the op it serves, and the reason. `autoshard.ir.words` puts it in words."""

from __future__ import annotations

from dataclasses import dataclass, field

from autoshard.ir.graph import Origin
from autoshard.ir.layout import Spec

VALUES = ("argument", "result", "entering", "constant", "unknown")
"""What a value is to the program: its argument, an op's result, what enters a loop's or branch's body, a constant."""

REASONS = {
    "read": ("before", "after", "splits"),
    "unruled": ("before", "after"),
    "held": ("before", "after"),
    "replaced": ("before", "after", "argument"),
    "ahead": ("before", "after"),
    "combined": ("splits", "operator", "dims"),
    "exchanged": ("splits",),
    "circulated": (),
    "accumulated": (),
}
"""The kinds of reasons, each with the attributes of `Reason` that it has."""

ROLES = ("", "reduced", "contracted")
"""Of a factor: none of the following, reduced over, or reduced over by a product."""


@dataclass(frozen=True, slots=True)
class MovedValue:
    """The value that a collective moves.

    Attributes:
        kind: one of `VALUES`.
        name: an argument's path, or the primitive of the op that makes the value or whose body it enters.
        dtype, shape: of the whole value.
        moves: of an argument that is moved or sliced first: the primitives, the last one first; ``scan`` hands in one slice a trip.
    """

    kind: str
    name: str
    dtype: str
    shape: tuple[int, ...]
    moves: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class ServedOp:
    """The op that a collective serves.

    Attributes:
        primitive: of a traced op; empty where only a name is known.
        index: the op's number in the graph.
        origin: its source line.
        name: the path of the result that is served instead of an op, or what a compiled module calls the collective.
    """

    primitive: str = ""
    index: int = -1
    origin: Origin = field(default_factory=Origin)
    name: str = ""


@dataclass(frozen=True, slots=True)
class Split:
    """A factor that an op splits over a mesh axis: its letter in Shardy's notation, its whole size and one of `ROLES`."""

    factor: str
    size: int
    role: str = ""


@dataclass(frozen=True, slots=True)
class Reason:
    """Why a collective is there.

    Attributes:
        kind: one of `REASONS`. A value is resharded because an op reads it as its splits want (``read``) or has no rule (``unruled``), a
            loop's or branch's body keeps it so (``held``), it is an argument's new value (``replaced``), or a scan's next trip reads it
            (``ahead``). Partial results are ``combined``; shards that need each other's data are ``exchanged``; blocks of a windowed
            product are ``circulated``, or its partial results ``accumulated`` from device to device.
        before, after: the specs of a resharded value, one entry a dimension; empty where it is whole on every device.
        splits: per mesh axis of the collective what the op splits over it; None where that is nothing.
        operator: what combines partial results, ``sum`` for instance.
        dims: the dimensions of which each device keeps its slice then; none where all keep the whole result.
        argument: the path of the argument whose new value this is.
    """

    kind: str
    before: Spec = ()
    after: Spec = ()
    splits: tuple[Split | None, ...] = ()
    operator: str = ""
    dims: tuple[int, ...] = ()
    argument: str = ""
