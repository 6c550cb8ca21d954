"""Attention over a sequence that devices may divide: its primitives, their rule and their work.

Queries are ``[*batch, group, length, width]``, keys and values ``[*batch, length, width]``, sums of exponentials in logarithms
``[*batch, group, length]``. A part of the sequence needs the keys and values of all others. They go round the devices, block by block,
while each device computes with the block that it has; so do the gradients of keys and values (Liu, Zaharia and Abbeel, Ring Attention with
Blockwise Transformers, 2023; `autoshard.lower.ring`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.interpreters import mlir

from autoshard.ir import Factor, Rule, Send, Value
from autoshard.ir.kernel import Kernel
from autoshard.rules.registry import Dim, assemble, rule

FORWARD, BACKWARD = "ring_attention", "ring_attention_gradients"


class Blocks(Protocol):
    """How a device computes with one block of keys and values; a value of which equal ones compute the same.

    Attributes:
        causal: whether positions see none that come later.
        granule: the lengths that it takes are multiples of this.
    """

    @property
    def causal(self) -> bool: ...

    @property
    def granule(self) -> int: ...

    def forward(self, q: Any, k: Any, v: Any, *, causal: bool) -> tuple[Any, Any]:
        """The outputs, and the logarithms of the sums of exponentials in float32."""
        ...

    def backward(self, q: Any, k: Any, v: Any, out: Any, sums: Any, cotangent: Any, *, causal: bool) -> tuple[Any, Any, Any]:
        """The parts of the gradients of queries, keys and values, by the outputs and sums over all blocks."""
        ...

    def kernel(self, gradients: bool) -> Kernel:
        """The work of each pair of a query and a key, seen or not."""
        ...


def _forward_types(q: Any, k: Any, v: Any, *, blocks: Blocks, interpret: bool) -> list[Any]:
    return [q.update(shape=(*q.shape[:-1], v.shape[-1])), q.update(shape=q.shape[:-1], dtype=jnp.dtype("float32"))]


def _backward_types(q: Any, k: Any, v: Any, out: Any, sums: Any, cotangent: Any, *, blocks: Blocks, interpret: bool) -> list[Any]:
    return [x.update(dtype=jnp.dtype("float32")) for x in (q, k, v)]


def _forward(q: Any, k: Any, v: Any, *, blocks: Blocks, interpret: bool) -> list[Any]:
    return [*blocks.forward(q, k, v, causal=blocks.causal)]


def _backward(*operands: Any, blocks: Blocks, interpret: bool) -> list[Any]:
    return [x.astype(jnp.float32) for x in blocks.backward(*operands, causal=blocks.causal)]


def _primitive(name: str, types: Any, function: Any) -> Primitive:
    """A primitive that computes the whole attention where nothing divides the sequence."""
    made = Primitive(name)
    made.multiple_results = True
    made.def_abstract_eval(types)
    mlir.register_lowering(made, mlir.lower_fun(function, multiple_results=True))
    return made


forward_p = _primitive(FORWARD, _forward_types, _forward)
backward_p = _primitive(BACKWARD, _backward_types, _backward)


def attention(q: Any, k: Any, v: Any, blocks: Blocks, interpret: bool) -> Any:
    """Attention of queries (scaled as blocks take them), keys and values, whose sequence may be divided."""

    @jax.custom_vjp
    def attend(q: Any, k: Any, v: Any) -> Any:
        return forward_p.bind(q, k, v, blocks=blocks, interpret=interpret)[0]

    def forward(q: Any, k: Any, v: Any) -> tuple[Any, tuple]:
        out, sums = forward_p.bind(q, k, v, blocks=blocks, interpret=interpret)
        return out, (q, k, v, out, sums)

    def backward(kept: tuple, cotangent: Any) -> tuple:
        made = backward_p.bind(*kept, cotangent, blocks=blocks, interpret=interpret)
        return tuple(x.astype(each.dtype) for x, each in zip(made, kept, strict=False))

    attend.defvjp(forward, backward)
    return attend(q, k, v)


@rule(FORWARD, BACKWARD)
def ring(q: Value, k: Value, v: Value, *others: Value, results: tuple[Value, ...], blocks: Blocks, **_: Any) -> Rule:
    """``([b, g, t, w], [b, t, w], [b, t, w])->([b, g, t, w], [b, g, t])``: examples and key heads are independent.

    The sequence sends keys and values round. Under a causal mask, parts of it change places before and after, so that each device has as
    much to compute.
    """
    batch, n = [Factor(size) for size in k.shape[:-2]], 3 + len(others)
    granule = blocks.granule * (2 if blocks.causal else 1)
    moved = [*range(n), *range(n, n + len(results))] if blocks.causal else []
    sends = [Send("ring", 1, 0), Send("ring", 2, 0)]
    if others:
        sends += [Send(kind, n + 1 + each, 0) for each in (0, 1) for kind in ("ring", "collective_permute")]
    sends += [Send("zigzag", each, 0) for each in moved]
    parts = Factor(max(k.shape[-2] // granule, 1), "permutation", sends=tuple(sends))
    length: Dim = (parts, Factor(k.shape[-2] // parts.size, "need_replication"))
    group, width, value_width = (Factor(size, "need_replication") for size in (q.shape[-3], q.shape[-1], v.shape[-1]))
    queries, out = [*batch, group, length, width], [*batch, group, length, value_width]
    keys: list[list[Dim]] = [[*batch, length, width], [*batch, length, value_width]]
    if not others:
        return assemble([queries, *keys], [out, out[:-1]])
    return assemble([queries, *keys, out, out[:-1], out], [queries, *keys])


def work(name: str, params: Any, operands: Sequence[Any]) -> Kernel:
    """The work of a call on arrays of these types."""
    (*_, length, _), q = operands[1].shape, operands[0]
    pairs = length
    for size in q.shape[:-1]:
        pairs *= size
    each: Kernel = params["blocks"].kernel(name == BACKWARD)
    scaled = {name: getattr(each, name) * pairs for name in ("matrix_flops", "vector_flops", "nbytes")}
    return replace(each, **scaled, interpreted=params["interpret"])
