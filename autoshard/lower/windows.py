"""Lowering of windowed products (`autoshard.cost.windows`): permutes of blocks, with products between them.

To be called inside `jax.shard_map`. Loops over blocks are unrolled: each permute is independent of the product beside it, so a compiler
with asynchronous permutes hides them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from jax import lax

from autoshard.cost.windows import RESULT, Window
from autoshard.ir import Mesh, Rule
from autoshard.lower.element_types import permute

Product = Callable[[Any, Any], Any]
"""The op bound on parts of its operands."""


def windowed(product: Product, operands: Sequence[Any], window: Window, rule: Rule, mesh: Mesh) -> Any:
    """This device's shard of the product; the windowed operand is given as this device's block, a windowed result is scattered."""
    ring = _Ring(product, list(operands), window, rule, tuple(mesh.names[axis] for axis in window.step.axes if mesh.sizes[axis] > 1))
    return ring.scattered() if window.operand == RESULT else ring.gathered()


class _Ring:
    def __init__(self, product: Product, operands: list[Any], window: Window, rule: Rule, axes: tuple[str, ...]):
        self.product, self.operands, self.window, self.axes, self.n = product, operands, window, axes, window.blocks
        self.place = lax.axis_index(axes)
        self.dims = [next((d for d, factors in enumerate(dims) if window.factor in factors), None) for dims in rule.operands]
        self.made = next((d for d, factors in enumerate(rule.results[0]) if window.factor in factors), None)

    def sent(self, x: Any, by: int) -> Any:
        """The array of the device ``by`` positions before this one in the ring."""
        return permute(x, self.axes, [(device, (device + by) % self.n) for device in range(self.n)])

    def part(self, operand: int, block: Any, size: int) -> Any:
        """The elements of an operand that belong to a block; all of them where it does not have the windowed dimension."""
        x, dim = self.operands[operand], self.dims[operand]
        return x if dim is None else lax.dynamic_slice_in_dim(x, block * size, size, dim)

    def gathered(self) -> Any:
        """The product with every block: this device's own first, then those that arrive from both sides meanwhile."""
        own, window = self.operands[self.window.operand], self.window
        size, total = own.shape[window.dim], None
        blocks = {0: own}
        for distance in range(1, self.n // 2 + 1):
            blocks[-distance] = self.sent(blocks[1 - distance], 1)
            if 2 * distance < self.n:
                blocks[distance] = self.sent(blocks[distance - 1], -1)
        for away, x in blocks.items():
            block = (self.place + away) % self.n
            other = self.part(1 - window.operand, block, size)
            made = self.product(x, other) if window.operand == 0 else self.product(other, x)
            if self.made is None:  # the contracted dimension
                total = made if total is None else total + made
                continue
            if total is None:
                total = lax.empty((*made.shape[: self.made], size * self.n, *made.shape[self.made + 1 :]), made.dtype)
            total = lax.dynamic_update_slice_in_dim(total, made, block * size, self.made)
        return total

    def scattered(self) -> Any:
        """The sum of all devices' partial products of this one's block: each adds its own to the sum it receives, and passes that on."""
        assert self.made is not None, "a scattered dimension is one of the result"
        whole = next(x.shape[dim] for x, dim in zip(self.operands, self.dims, strict=True) if dim is not None)
        size = whole // self.n // self.window.halves
        sums: list[Any] = []
        for half in range(self.window.halves):
            by, total = -1 if half else 1, None
            for step in range(self.n):
                block = (self.place - by * (1 + step)) % self.n
                made = self.product(*(self.part(k, block * self.window.halves + half, size) for k in range(2)))
                total = made if total is None else self.sent(total, by) + made
            sums.append(total)
        return lax.concatenate(sums, self.made) if len(sums) > 1 else sums[0]
