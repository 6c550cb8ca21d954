"""Attention over a divided sequence: what one device computes, while keys and values go round all devices.

Blocks are computed one after the other, and each one's outputs are joined with those before by their sums of exponentials. The next block
is sent meanwhile. Each device adds to the gradients of the keys and values that it has, and they are sent home at the end.

*Causal masks.* Of 2n halves of the parts of n devices, device ``i`` computes half ``i`` and half ``2n - 1 - i`` of the queries (zigzag), so
that each has as much to compute. Of the keys and values of another device ``j`` it then sees two quarters, and all of both: the later half
of queries sees the earlier half of keys; and the earlier halves see each other where ``j < i``, else the later ones.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from autoshard.ir import Rule
from autoshard.lower.element_types import permute
from autoshard.rules.ring import BACKWARD, FORWARD, Blocks

SUMS = 4  # which operand of the backward pass they are


def _body(gradients: bool) -> Callable[..., list[Any]]:
    """The body of one device, forward or backward."""

    def body(bind: Any, params: Mapping[str, Any], rule: Rule, splits: Sequence[Any], *operands: Any) -> list[Any]:
        (split,), blocks = splits, params["blocks"]
        found = _Ring(blocks, split.axes, split.shards)
        if blocks.causal:
            operands = tuple(found.spread(x, -1 if k == SUMS else -2) for k, x in enumerate(operands))
        made = found.backward(*operands) if gradients else found.forward(*operands)
        if blocks.causal:
            made = [found.gathered(x, -1 if not gradients and k == 1 else -2) for k, x in enumerate(made)]
        return [*made]

    return body


class _Ring:
    """The computation of one of ``n`` devices on these mesh axes."""

    def __init__(self, blocks: Blocks, axes: tuple[str, ...], n: int):
        self.blocks, self.axes, self.n = blocks, axes, n
        self.place = lax.axis_index(axes)

    # -- halves of a causal sequence ----------------------------------------------------------------------------------

    def _owner(self, half: int) -> int:
        return half if half < self.n else 2 * self.n - 1 - half

    def spread(self, x: Any, at: int) -> Any:
        """The halves that this device computes, of a sequence of which each device has two that follow each other."""
        even, odd = (self._moved(half, [(i, self._owner(2 * i + k)) for i in range(self.n)]) for k, half in enumerate(jnp.split(x, 2, at)))
        first = self.place % 2 == 0  # half i is an even one there
        return jnp.concatenate([jnp.where(first, even, odd), jnp.where(first, odd, even)], at)

    def gathered(self, x: Any, at: int) -> Any:
        """The inverse of `spread`."""
        low, high = jnp.split(x, 2, at)
        first = self.place % 2 == 0
        sent = jnp.where(first, low, high), jnp.where(first, high, low)
        made = [self._moved(half, [(self._owner(2 * i + k), i) for i in range(self.n)]) for k, half in enumerate(sent)]
        return jnp.concatenate(made, at)

    def _moved(self, x: Any, pairs: list[tuple[int, int]]) -> Any:
        return permute(x, self.axes, pairs)

    def _next(self, arrays: Sequence[Any]) -> tuple[Any, ...]:
        """The arrays of the device before this one."""
        return tuple(self._moved(x, [(i, (i + 1) % self.n) for i in range(self.n)]) for x in arrays)

    # -- forward -------------------------------------------------------------------------------------------------------

    def forward(self, q: Any, k: Any, v: Any) -> list[Any]:
        """The outputs and the sums of exponentials."""
        coming = self._next((k, v))
        out, sums = self.blocks.forward(q, k, v, causal=self.blocks.causal)
        state = out.astype(jnp.float32), sums

        def step(trip: Any, carry: tuple) -> tuple:
            (k, v), state = carry
            return self._next((k, v)), self._joined(state, q, k, v, trip)

        (k, v), state = lax.fori_loop(1, self.n - 1, step, (coming, state))
        out, sums = self._joined(state, q, k, v, self.n - 1)
        return [out.astype(q.dtype), sums]

    def _joined(self, state: tuple, q: Any, k: Any, v: Any, trip: Any) -> tuple:
        """The outputs and sums with those of one more block."""
        if not self.blocks.causal:
            return _join(state, self.blocks.forward(q, k, v, causal=False))
        halves = [jnp.split(x, 2, axis) for x, axis in zip((q, k, v, *state), (-2, -2, -2, -2, -1), strict=True)]
        (q0, q1), (k0, k1), (v0, v1), (out0, out1), (sums0, sums1) = halves
        earlier = self.place >= trip  # whose keys these are
        second = _join((out1, sums1), self.blocks.forward(q1, k0, v0, causal=False))
        mine = _choose(earlier, (q0, k0, v0), (q1, k1, v1))
        joined = _join(_choose(earlier, (out0, sums0), second), self.blocks.forward(*mine, causal=False))
        (out0, sums0), (out1, sums1) = _choose(earlier, joined, (out0, sums0)), _choose(earlier, second, joined)
        return jnp.concatenate([out0, out1], -2), jnp.concatenate([sums0, sums1], -1)

    # -- backward ------------------------------------------------------------------------------------------------------

    def backward(self, q: Any, k: Any, v: Any, out: Any, sums: Any, cotangent: Any) -> list[Any]:
        """The gradients of queries, keys and values, in float32."""
        rest = q, out, sums, cotangent
        coming = self._next((k, v))
        dq, *dkv = (x.astype(jnp.float32) for x in self.blocks.backward(q, k, v, out, sums, cotangent, causal=self.blocks.causal))

        def step(trip: Any, carry: tuple) -> tuple:
            (k, v), dkv, dq = carry
            following, arrived = self._next((k, v)), self._next(dkv)
            return following, *self._added(rest, k, v, arrived, dq, trip)

        (k, v), dkv, dq = lax.fori_loop(1, self.n - 1, step, (coming, tuple(dkv), dq))
        dkv, dq = self._added(rest, k, v, self._next(dkv), dq, self.n - 1)
        return [dq, *self._next(dkv)]

    def _added(self, rest: tuple, k: Any, v: Any, dkv: tuple, dq: Any, trip: Any) -> tuple:
        """The gradients with those of one more block."""
        q, *others = rest
        if not self.blocks.causal:
            made = self.blocks.backward(q, k, v, *others, causal=False)
            return tuple(a + b for a, b in zip(dkv, made[1:], strict=True)), dq + made[0]
        arrays = (q, k, v, *others)
        first, second = zip(*(jnp.split(x, 2, -1 if n == SUMS else -2) for n, x in enumerate(arrays)), strict=True)
        earlier = self.place >= trip
        across = self.blocks.backward(second[0], first[1], first[2], *second[3:], causal=False)
        along = self.blocks.backward(*_choose(earlier, first, second), causal=False)
        along = tuple(x.astype(jnp.float32) for x in along)
        nothing = tuple(map(jnp.zeros_like, along))
        low, high = _choose(earlier, along, nothing), _choose(earlier, nothing, along)
        made = jnp.concatenate([low[0], across[0] + high[0]], -2)
        keys = [jnp.concatenate([across[n] + low[n], high[n]], -2) for n in (1, 2)]
        return tuple(a + b for a, b in zip(dkv, keys, strict=True)), dq + made


def _choose(which: Any, some: Sequence[Any], others: Sequence[Any]) -> tuple[Any, ...]:
    return tuple(jnp.where(which, a, b) for a, b in zip(some, others, strict=True))


def _join(one: tuple, other: tuple) -> tuple:
    """The outputs and sums over the keys of both."""
    (a, first), (b, second) = one, other
    sums = jnp.logaddexp(first, second)
    weights = (jnp.exp(each - sums)[..., None] for each in (first, second))
    return sum(jax.tree.map(jnp.multiply, (a, b.astype(jnp.float32)), tuple(weights))), sums


BODIES: Mapping[str, Callable[..., list[Any]]] = {FORWARD: _body(False), BACKWARD: _body(True)}
