"""One collective of a program, predicted or found in a compiled module."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

KINDS = ("all_gather", "all_reduce", "reduce_scatter", "all_to_all", "collective_permute")


@dataclass(frozen=True, slots=True)
class Collective:
    """Data moved between the devices along some mesh axes.

    Attributes:
        kind: its HLO name in snake case, one of `KINDS`.
        mesh_axes: the axes whose devices take part, in mesh order; ``("?",)`` where the groups fit no subset of axes.
        bytes: the larger of operand and result on one device, in one execution.
        count: how often it runs in one step, loop trips included.
        source: the operation it serves and its source line, in words.
        tensor: what is moved: an argument by its path, else by the op that makes it; with dtype and shape.
        seconds: predicted time of one execution; 0.0 where nothing is predicted.
        exposed_seconds: the part of it that no compute hides.
        cause: the choice that asks for it, in words.
        compiled: what the cluster's compiler is expected to make of it; None: just this.
    """

    kind: str
    mesh_axes: tuple[str, ...]
    bytes: float
    count: int = 1
    source: str = ""
    tensor: str = ""
    seconds: float = 0.0
    cause: str = ""
    exposed_seconds: float = 0.0
    compiled: tuple[Collective, ...] | None = None


def as_compiled(planned: Iterable[Collective]) -> tuple[Collective, ...]:
    """What the cluster's compiler is expected to make of planned collectives."""
    return tuple(made for each in planned for made in ((each,) if each.compiled is None else each.compiled))
