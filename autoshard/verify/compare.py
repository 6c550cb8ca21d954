"""Predicted collectives next to actual ones."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from autoshard.ir import Collective


@dataclass(frozen=True, slots=True)
class Row:
    """All collectives of one kind over the same axes: executions and bytes a step, on one device.

    Attributes:
        predicted_bytes, actual_bytes: bytes of one execution times executions, summed.
    """

    kind: str
    mesh_axes: tuple[str, ...]
    predicted_count: int
    actual_count: int
    predicted_bytes: float
    actual_bytes: float

    @property
    def agrees(self) -> bool:
        return self.predicted_bytes == self.actual_bytes


def compare(predicted: Iterable[Collective], actual: Iterable[Collective]) -> tuple[Row, ...]:
    """A row for each kind and axes that either side has, in that order.

    >>> compare([Collective("all_gather", ("x",), 64.0, 3)], [Collective("all_gather", ("x",), 64.0, 2)])[0].agrees
    False
    """
    sums: dict[tuple[str, tuple[str, ...]], list[float]] = {}
    for side, collectives in enumerate((predicted, actual)):
        for collective in collectives:
            row = sums.setdefault((collective.kind, collective.mesh_axes), [0, 0, 0.0, 0.0])
            row[side] += collective.count
            row[2 + side] += collective.bytes * collective.count
    return tuple(Row(*key, int(row[0]), int(row[1]), row[2], row[3]) for key, row in sorted(sums.items()))
