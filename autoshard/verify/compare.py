"""Comparison of predicted collectives with actual ones."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace

from autoshard.ir import Collective

_TWINS = {"all_reduce": "reduce_scatter", "reduce_scatter": "all_reduce"}


@dataclass(frozen=True, slots=True)
class Row:
    """All collectives of one kind over the same axes: executions and bytes per step on one device.

    Attributes:
        kind, mesh_axes: as those of `Collective`.
        predicted_count, actual_count: executions.
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
    """A row for each kind and axes of either side, sorted.

    An all_reduce and a reduce_scatter of the same tensor differ in whether readers slice the result, which compilers express
    in many ways: so an actual one counts as the other kind where the prediction has an unmatched one of that.

    >>> compare([Collective("all_gather", ("x",), 64.0, 3)], [Collective("all_gather", ("x",), 64.0, 2)])[0].agrees
    False
    """
    predicted = tuple(predicted)
    sums: dict[tuple[str, tuple[str, ...]], list[float]] = {}
    for side, collectives in enumerate((predicted, matched(predicted, tuple(actual)))):
        for collective in collectives:
            row = sums.setdefault((collective.kind, collective.mesh_axes), [0, 0, 0.0, 0.0])
            row[side] += collective.count
            row[2 + side] += collective.bytes * collective.count
    return tuple(Row(*key, int(row[0]), int(row[1]), row[2], row[3]) for key, row in sorted(sums.items()))


def matched(predicted: tuple[Collective, ...], actual: tuple[Collective, ...]) -> list[Collective]:
    """The actual collectives, an all_reduce as a reduce_scatter, or the reverse, where the prediction has an unmatched one of that kind."""
    left = Counter[tuple]()
    for sign, collectives in ((1, predicted), (-1, actual)):
        for collective in collectives:
            left[_key(collective, collective.kind)] += sign * collective.count
    found = []
    for collective in actual:
        own, twin = (_key(collective, kind) for kind in (collective.kind, _TWINS.get(collective.kind, "")))
        if 0 < collective.count <= min(-left[own], left[twin]):
            left[own] += collective.count
            left[twin] -= collective.count
            collective = replace(collective, kind=twin[0])
        found.append(collective)
    return found


def _key(collective: Collective, kind: str) -> tuple:
    return kind, collective.mesh_axes, collective.bytes
