"""Rules of primitives that slide a window, pooling and its gradients, and the geometry of windows, shared with convolutions."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from autoshard.ir import Factor, Rule, Send, Value
from autoshard.rules.registry import Dim, assemble, free_but, resized, rule


@dataclass(frozen=True, slots=True)
class Window:
    """A window that slides along a dimension: step ``o`` reads the positions from ``o * stride - low`` on.

    Attributes:
        span: positions from its first element to its last, its dilation included.
        stride: positions per step.
        spread: positions per element of the dimension (its dilation).
        low: positions of padding before the first element.
    """

    span: int
    stride: int
    spread: int
    low: int

    def even(self, size: int, steps: int) -> bool:
        """Whether all shards of the dimension, with as many shards of the steps, need halos of the same size."""
        return 0 < size * self.spread == steps * self.stride

    @property
    def halo(self) -> tuple[int, int]:
        """The number of elements that the steps of a shard read of the previous shard, and of the next."""
        return max(self.low // self.spread, 0), max((self.span - 1 - self.stride - self.low) // self.spread + 1, 0)

    def padding(self, size: int, steps: int) -> tuple[int, int]:
        """The padding, cropping where it is negative, with which these steps cover a shard of this size and its halos."""
        before, behind = self.halo
        low = self.low - before * self.spread
        length = (before + size + behind - 1) * self.spread + 1
        return low, (steps - 1) * self.stride + self.span - length - low

    def dims(self, size: int, steps: int, sends: tuple[Send, ...], operator: str | None = None) -> tuple[Dim, Dim]:
        """The factors of the dimension and of the steps: their common part is shared and sends halos, and is reduced by an operator."""
        if not self.even(size, steps):
            return Factor(size, "need_replication"), Factor(steps, "need_replication")
        common = math.gcd(size, steps)
        shared = Factor(common, "reduction" if operator else "permutation" if sends else "pass_through", operator, sends)
        return (shared, Factor(size // common, "need_replication")), (shared, Factor(steps // common, "need_replication"))

    def sends(self, *tensors: int) -> tuple[Send, ...]:
        """The sends of these tensors' halos, from the previous shard and from the next."""
        return tuple(Send("collective_permute", tensor, count) for tensor in tensors for count in self.halo if count)


def pool_window(params: Mapping[str, Any], dim: int) -> Window:
    """The window along a dimension, from the parameters of a pooling primitive."""

    def of(name: str) -> int:
        return params[name][dim] if params.get(name) is not None else 1

    return Window(
        (params["window_dimensions"][dim] - 1) * of("window_dilation") + 1,
        params["window_strides"][dim],
        of("base_dilation"),
        params["padding"][dim][0],
    )


@rule("reduce_window", "reduce_window_sum", "reduce_window_max", "reduce_window_min", "select_and_gather_add")
def pool(*operands: Value, results: tuple[Value, ...], **params: Any) -> Rule:
    """A windowed dimension is its steps times their stride: ``([ij])->([i])``; scalars are initial values.

    Its shards exchange halos where windows overlap; it stays whole where halos differ in size, and under an arbitrary
    function, whose neutral element for the positions beyond the ends is unknown.
    """
    arrays = [j for j, operand in enumerate(operands) if operand.rank]
    read, made = [], []
    for d, (size, steps) in enumerate(zip(operands[0].shape, results[0].shape, strict=True)):
        window = pool_window(params, d)
        before, after = window.dims(size, steps, window.sends(*arrays))
        if len(arrays) < len(operands) and any(window.halo):
            before, after = Factor(size, "need_replication"), Factor(steps, "need_replication")
        read.append(before)
        made.append(after)
    return assemble([read if operand.rank else [] for operand in operands], [made] * len(results))


@rule("select_and_scatter_add")
def select_and_scatter_add(source: Value, x: Value, /, *, results: tuple[Value, ...], **params: Any) -> Rule:
    """The gradient of max pooling, ``([i], [ij])->([ij])``: halos of the pooled array are received, and their sums returned."""
    steps, read = [], []
    for d, (size, n) in enumerate(zip(x.shape, source.shape, strict=True)):
        window = pool_window(params, d)
        before, after = window.dims(size, n, window.sends(1, 2))
        read.append(before)
        steps.append(after)
    return assemble([steps, read], [read])


@rule("select_and_scatter")
def select_and_scatter(*operands: Value, results: tuple[Value, ...], **params: Any) -> Rule:
    """Windowed dimensions stay whole, the others pass through; scalars are initial values."""
    x = results[0]
    moved = [d for d in range(x.rank) if pool_window(params, d) != Window(1, 1, 1, 0)]
    dims = free_but(x.shape, moved)
    return assemble([resized(dims, v.shape) if v.rank else [] for v in operands], [dims])
