"""Order of transfers between devices and hosts in a lowered program.

XLA's compilers drop barriers before they schedule, and start each transfer as soon as its operand is there (libtpu 0.0.42): what a
forward pass sends to hosts would leave after it, and all that a backward pass reads would come back before it begins. So a barrier on a
device's value waits for what was sent before. A transfer to the device after a barrier is under a condition, which compilers keep: it
is computed from the products before, and always holds.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import reduce
from operator import or_
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from autoshard.ir import Op, Value
from autoshard.primitives import is_matrix


class Waiting:
    """What transfers of one region wait for, in the order of its ops."""

    def __init__(self) -> None:
        self._sent: list[Any] = []
        self._products: list[Any] = []
        self._held: set[int] = set()
        self._condition: Any = None

    def sent(self, arrays: list[Any]) -> list[Any]:
        """Arrays that were moved to the host, noted."""
        self._sent += arrays
        return arrays

    def computed(self, op: Op, results: list[Any], values: Sequence[Value]) -> list[Any]:
        """The results of an op: of a barrier once all that was sent is on the host, those of products noted."""
        if op.primitive == "optimization_barrier" and len(results) == 1:
            if values[op.results[0]].on_host:
                self._held.update(op.results)
            elif self._sent:
                results = lax.optimization_barrier((*results, *self._sent))[:1]
                self._sent, self._products = [], []
        elif op.primitive == "remat2" or is_matrix(op.primitive):
            self._products += [x for x in results if x is not None and jnp.issubdtype(x.dtype, jnp.floating) and x.size]
        return list(results)

    def fetched(self, value: int, move: Callable[[], Any]) -> Any:
        """The result of a transfer of a value to the device, which begins once the products before it are there if a barrier holds it."""
        if value not in self._held:
            return move()
        if self._products:
            self._condition, self._products = reduce(or_, map(_nothing, self._products)) == 0, []
        if self._condition is None:
            return move()
        made = jax.eval_shape(move)
        return lax.cond(self._condition, move, lambda: jnp.zeros(made.shape, made.dtype))


def _nothing(x: Any) -> Any:
    """Zero, computed from an array so that compilers do not see it: the bits beyond 16 of its first element's 16."""
    first = lax.bitcast_convert_type(x[(0,) * x.ndim].astype(jnp.bfloat16), jnp.uint16)
    return first.astype(jnp.uint32) >> 16
