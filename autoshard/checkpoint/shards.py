"""Which part of an array each device of a cluster has under a strategy, by numbers alone: no devices are needed."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from autoshard.ir import entry_axes
from autoshard.lower import STAGE_AXIS, device_numbers
from autoshard.strategy import BY_ROWS, Record, TensorRecord


@dataclass(frozen=True, slots=True)
class Shards:
    """The parts of an array, which is divided equally along each dimension.

    Attributes:
        shape: the array's.
        counts: into how many parts each dimension is divided.
        chunks: per device of the cluster the number of its part, row-major over ``counts``; -1 where it has none.
    """

    shape: tuple[int, ...]
    counts: tuple[int, ...]
    chunks: np.ndarray

    @classmethod
    def of(cls, record: Record, leaf: int) -> Shards:
        """Those of an argument leaf."""
        names, numbers = _places(record, leaf)
        tensor: TensorRecord = record.arguments[leaf]
        sizes = dict(zip(names, numbers.shape, strict=True))
        split = [entry_axes(entry) for entry in (*tensor.spec, *(None,) * (len(tensor.shape) - len(tensor.spec)))]
        counts = tuple(math.prod(sizes[name] for name in axes) for axes in split)
        at = dict(zip(names, np.indices(numbers.shape).reshape(len(names), -1), strict=True))
        chunk = np.zeros(numbers.size, int)
        for axes in split:
            for name in axes:
                chunk = chunk * sizes[name] + at[name]
        chunks = np.full(record.mesh.size, -1)
        chunks[numbers.reshape(-1)] = chunk
        return cls(tensor.shape, counts, chunks)

    def common(self, other: Shards) -> np.ndarray:
        """Elements that each part has in common with each part of other shards of the array: (parts, parts of the other)."""
        found = np.ones((1, 1))
        for size, ours, theirs in zip(self.shape, self.counts, other.counts, strict=True):
            (first, last), (begin, end) = _bounds(size, ours), _bounds(size, theirs)
            both = np.minimum(last[:, None], end) - np.maximum(first[:, None], begin)
            found = np.kron(found, np.maximum(both, 0))
        return found


def _places(record: Record, leaf: int) -> tuple[tuple[str, ...], np.ndarray]:
    """The mesh axes of a leaf's mesh, and its devices by their numbers in the cluster."""
    stages = record.part_meshes
    firsts = np.cumsum([0, *(mesh.size for mesh in stages)])
    numbers = [device_numbers(mesh) + first for mesh, first in zip(stages, firsts, strict=False)]
    place = record.argument_places[leaf]
    if place != BY_ROWS:
        part = 0 if record.pipeline is None else record.pipeline.part(place)
        return stages[part].all_names, numbers[part]
    own = tuple(name for name in stages[0].all_names if name != STAGE_AXIS)
    return (STAGE_AXIS, *own), np.stack(numbers).reshape(len(stages), *(dict(stages[0].shape)[name] for name in own))


def _bounds(size: int, parts: int) -> tuple[np.ndarray, np.ndarray]:
    """The first element of each part of a dimension, and the one after its last."""
    each = -(-size // parts)
    first = np.minimum(np.arange(parts) * each, size)
    return first, np.minimum(first + each, size)
