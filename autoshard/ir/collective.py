"""One collective of a program, predicted or found in a compiled module."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from autoshard.ir.attribution import MovedValue, Reason, ServedOp
from autoshard.ir.words import op_words, reason_words, value_words

KINDS = ("all_gather", "all_reduce", "reduce_scatter", "all_to_all", "collective_permute")


@dataclass(frozen=True, slots=True)
class Collective:
    """A collective over some mesh axes.

    Attributes:
        kind: its HLO name in snake case, one of `KINDS`.
        mesh_axes: the axes of its device groups, in mesh order; also of groups of some of an axis' devices. ``("?",)`` where it has none.
        bytes: the larger of operand and result on one device, in one execution.
        count: executions in one step, loop trips included.
        op: the operation it serves; None if unknown.
        value: the value it moves; None if unknown.
        reason: why it is needed; None if unknown.
        seconds: predicted time of one execution; 0.0 where nothing is predicted.
        exposed_seconds: the part of it that no compute hides.
        compiled: the collectives that the cluster's compiler is expected to make of it; None: this one unchanged.
    """

    kind: str
    mesh_axes: tuple[str, ...]
    bytes: float
    count: int = 1
    op: ServedOp | None = None
    value: MovedValue | None = None
    reason: Reason | None = None
    seconds: float = 0.0
    exposed_seconds: float = 0.0
    compiled: tuple[Collective, ...] | None = None

    @property
    def source(self) -> str:
        """The operation it serves and its source line, in words."""
        return "" if self.op is None else op_words(self.op)

    @property
    def tensor(self) -> str:
        """The value it moves, in words: an argument by its path, any other by the op that makes it; with dtype and shape."""
        return "" if self.value is None else value_words(self.value)

    @property
    def cause(self) -> str:
        """Why it is needed, in words."""
        if self.reason is None:
            return ""
        return reason_words(self.reason, self.op or ServedOp(), self.mesh_axes, len(self.value.shape) if self.value else 0)


def as_compiled(planned: Iterable[Collective]) -> tuple[Collective, ...]:
    """The collectives that the cluster's compiler is expected to make of planned ones."""
    return tuple(made for each in planned for made in ((each,) if each.compiled is None else each.compiled))
