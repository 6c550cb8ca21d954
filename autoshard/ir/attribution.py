"""Attribution of a collective, as data: the value it moves, the op it serves, and the reason. `autoshard.ir.words` renders it as text."""

from __future__ import annotations

from dataclasses import dataclass, field

from autoshard.ir.graph import Origin
from autoshard.ir.layout import Spec

VALUES = ("argument", "result", "entering", "constant", "unknown")
"""A value's role in the program: its argument, an op's result, an input of a loop's or branch's body, a constant."""

REASONS = {
    "read": ("before", "after", "splits"),
    "unruled": ("before", "after"),
    "held": ("before", "after"),
    "replaced": ("before", "after", "argument"),
    "ahead": ("before", "after"),
    "combined": ("splits", "operator", "dims"),
    "exchanged": ("splits",),
    "written": (),
    "circulated": (),
    "accumulated": (),
}
"""The kinds of reasons, each with the attributes of `Reason` that it sets."""

ROLES = ("", "reduced", "contracted")
"""A factor's role: reduced over, reduced over by a product, or neither."""


@dataclass(frozen=True, slots=True)
class MovedValue:
    """The value that a collective moves.

    Attributes:
        kind: one of `VALUES`.
        name: an argument's path, or the primitive of the op that makes the value or whose body it enters.
        dtype, shape: of the whole value.
        moves: the primitives that rearrange or slice an argument first, the last one first; ``scan`` for one slice a trip.
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
        name: the path of a result of the program, where there is no op, or the collective's name in a compiled module.
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
    """The reason for a collective.

    Attributes:
        kind: one of `REASONS`. A value is resharded because the op that reads it is split (``read``) or has no rule (``unruled``), because
            a loop's or branch's body keeps it in that layout (``held``), because it is an argument's new value (``replaced``), or because a
            scan's next trip reads it (``ahead``). Partial results are ``combined``; shards that need each other's data are ``exchanged``;
            a collective of the program's own, inside a `jax.shard_map`, is ``written``;
            blocks of a windowed product are ``circulated``, or its partial results ``accumulated`` from device to device.
        before, after: the specs of a resharded value, one entry a dimension; empty where it is replicated.
        splits: per mesh axis of the collective, the factor that the op splits over it, or None.
        operator: the operator that combines partial results, such as ``sum``.
        dims: the dimensions that a combination scatters; empty where every device gets the whole result.
        argument: the path of the argument whose new value this is.
    """

    kind: str
    before: Spec = ()
    after: Spec = ()
    splits: tuple[Split | None, ...] = ()
    operator: str = ""
    dims: tuple[int, ...] = ()
    argument: str = ""
