"""A cost model for meshes of many small axes, on which the reshards between all layouts cannot be tabulated: ``5 ** 9`` of a matrix of
matrices over nine axes of two.

*Reshards.* Axes that only the target has are sliced first, for nothing; then all axes that move to another dimension do so in one
all_to_all, and all axes that leave are gathered in one all_gather; or all of both are gathered at once and sliced again, if that is
cheaper. That is the cheapest path of `autoshard.cost.reshard` where axes leave from the end of their dimensions and arrive at the end of
others; elsewhere that one permutes as well, or finds a cheaper order.
"""

from __future__ import annotations

import math

import numpy as np

from autoshard.ir import layout_dims
from autoshard.judge.model import ALL_TO_ALL_PASSES, CostModel


class ManyAxesModel(CostModel):
    """The costs of a mesh of many axes: a `CostModel` but for reshards, which `reshard_seconds` computes one by one, equal ones once."""

    def reshard_seconds(
        self, shape: tuple[int, ...], itemsize: float, portable: bool, sources: np.ndarray, targets: np.ndarray
    ) -> np.ndarray:
        key = shape, itemsize, portable, sources.shape, sources.tobytes(), targets.shape, targets.tobytes()
        if (found := self._matrices.get(key)) is None:
            found = self._matrices[key] = self._computed(shape, itemsize, portable, sources, targets)
        return found

    def _computed(self, shape: tuple[int, ...], itemsize: float, portable: bool, sources: np.ndarray, targets: np.ndarray) -> np.ndarray:
        rank, n_axes = len(shape), len(self.mesh.axes)
        sizes, bits = np.array(self.mesh.sizes, float), 1 << np.arange(n_axes)
        source, target = layout_dims(sources, rank, n_axes), layout_dims(targets, rank, n_axes)
        shards, whole = source >= 0, math.prod(shape) * itemsize
        stays = target >= 0
        elsewhere = shards & stays & (source != target)
        moves, leaves = elsewhere @ bits, (shards & ~stays) @ bits
        after = whole / np.where(stays, sizes, 1.0).prod(axis=-1)
        seconds = self._seconds_of("all_gather", leaves, np.broadcast_to(after, moves.shape))
        if moves.any():
            sliced = whole / np.where(shards | stays, sizes, 1.0).prod(axis=-1)
            seconds += self._seconds_of("all_to_all", moves, sliced) + np.where(moves, ALL_TO_ALL_PASSES * self._byte_seconds * sliced, 0.0)
            gathered = whole / np.where(stays & ~elsewhere, sizes, 1.0).prod(axis=-1)
            seconds = np.where(moves, np.minimum(seconds, self._seconds_of("all_gather", moves | leaves, gathered)), seconds)
        if not portable:
            held, before = after * self._byte_seconds, whole * self._byte_seconds / np.where(shards, sizes, 1.0).prod(axis=-1)
            seconds += np.where(seconds > 0, 2 * held, np.where(before == held, 0.0, before + held))
        return seconds

    def _seconds_of(self, kind: str, masks: np.ndarray, nbytes: np.ndarray) -> np.ndarray:
        """The seconds of a collective over axes that are given as bits, none where there are none."""
        seconds = np.zeros(masks.shape)
        for mask in set(masks.ravel().tolist()) - {0}:
            axes = tuple(axis for axis in range(len(self.mesh.axes)) if mask >> axis & 1)
            np.copyto(seconds, self.communication.seconds(kind, nbytes, axes), where=masks == mask)
        return seconds
