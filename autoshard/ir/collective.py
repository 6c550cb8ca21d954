"""One collective of a program, predicted or found in a compiled module."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from autoshard.ir.attribution import MovedValue, Reason, ServedOp
from autoshard.ir.words import op_words, reason_words, value_words

KINDS = ("all_gather", "all_reduce", "reduce_scatter", "all_to_all", "collective_permute")


@dataclass(frozen=True, slots=True)
class Collective:
    """Data moved between the devices along some mesh axes.

    Attributes:
        kind: its HLO name in snake case, one of `KINDS`.
        mesh_axes: the axes whose devices take part, in mesh order; ``("?",)`` where the groups fit no subset of axes.
        bytes: the larger of operand and result on one device, in one execution.
        count: how often it runs in one step, loop trips included.
        op: the operation it serves; None where that is not known.
        value: what is moved; None where that is not known.
        reason: the choice that asks for it; None where that is not known.
        seconds: predicted time of one execution; 0.0 where nothing is predicted.
        exposed_seconds: the part of it that no compute hides.
        compiled: what the cluster's compiler is expected to make of it; None: just this.
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
        """What is moved, in words: an argument by its path, else by the op that makes it; with dtype and shape."""
        return "" if self.value is None else value_words(self.value)

    @property
    def cause(self) -> str:
        """The choice that asks for it, in words."""
        if self.reason is None:
            return ""
        return reason_words(self.reason, self.op or ServedOp(), self.mesh_axes, len(self.value.shape) if self.value else 0)


def as_compiled(planned: Iterable[Collective]) -> tuple[Collective, ...]:
    """What the cluster's compiler is expected to make of planned collectives."""
    return tuple(made for each in planned for made in ((each,) if each.compiled is None else each.compiled))
