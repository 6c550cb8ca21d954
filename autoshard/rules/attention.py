"""The rule and the work of cuDNN's attention, as `jax.nn.dot_product_attention` calls it: examples and heads are independent.

Query heads that share a key head are two factors, ``[kg]`` of the key heads and of each group. Lengths, widths and packed or paged examples
stay whole, and so does everything under dropout: a shard would drop what the whole does not.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from autoshard.ir import Factor, Rule, Value
from autoshard.ir.kernel import Kernel
from autoshard.rules.registry import Dim, assemble, rule, whole

FORWARD, BACKWARD = "dot_product_attention_fwd_wrapper", "dot_product_attention_bwd_wrapper"
HEADS_FIRST = 1  # of JAX's two layouts: batch, heads, length, width; the other one has lengths before heads
CAUSAL = {2, 3}  # of JAX's masks, those that leave out what comes later


@rule(FORWARD, BACKWARD)
def attention(*operands: Value, results: tuple[Value, ...], layout: int, dropout_rate: float, variadic_args: Sequence[bool], **_) -> Rule:
    """``([b, t, kg, h], [b, s, k, h], [b, s, k, h], ...)->([b, t, kg, h], ...)``, with lengths and widths whole."""
    q, k, _, bias, *lengths = operands[:6]
    first = 1 if layout == HEADS_FIRST else 2
    groups = k.shape[first]
    free = not dropout_rate and all(value.size == 0 for value in operands[6:10]) and all(value.rank <= 1 for value in lengths)
    summed = [d for d in (0, 1) if variadic_args[1] and bias.shape[d] == 1]  # the gradient of a bias adds over what shares it
    batch = Factor(q.shape[0], "pass_through" if free and 0 not in summed else "need_replication")
    kind = "pass_through" if free and 1 not in summed else "need_replication"
    shared, each = Factor(groups, kind), Factor(q.shape[first] // groups, kind)

    def array(value: Value, heads: Dim) -> list[Dim]:
        dims: list[Dim] = [batch, *whole(value.shape[1:])]
        dims[first] = heads
        return dims

    def scores(value: Value) -> list[Dim]:
        """A bias, or the statistics of a softmax: batch and heads where it has them, then lengths."""
        if value.rank < 3:
            return [*whole(value.shape)]
        sizes = (batch.size, groups * each.size)
        named = [dim if size == n else () for dim, size, n in zip((batch, (shared, each)), sizes, value.shape, strict=False)]
        return [*named, *whole(value.shape[2:])]

    own, others = (shared, each), shared
    read: list[Sequence[Dim]] = [array(q, own), *(array(x, others) for x in operands[1:3]), scores(bias)]
    read += [[batch] if value.shape == (batch.size,) else whole(value.shape) for value in operands[4:10]]
    if len(operands) == 10:
        return assemble(read, [array(results[0], own), *map(scores, results[1:])])
    read += [scores(operands[10]), *(array(x, own) for x in operands[11:])]
    return assemble(read, [array(results[0], own), *(array(x, others) for x in results[1:3]), *map(scores, results[3:])])


def attention_kernel(name: str, params: Mapping[str, Any], operands: Sequence[Any], results: Sequence[Any]) -> Kernel:
    """The work of a call on arrays of these types: two products, and five for the gradients; what a mask leaves out does not count."""
    q, k, v = operands[:3]
    first = params["layout"] == HEADS_FIRST
    heads, length = (q.shape[1], q.shape[2]) if first else (q.shape[2], q.shape[1])
    read = k.shape[2] if first else k.shape[1]
    pairs = length * read / 2 if _value(params["mask_type"]) in CAUSAL else length * read
    if params["sliding_window_length"]:
        pairs = min(pairs, length * params["sliding_window_length"])
    widths = q.shape[3] + v.shape[3] if name == FORWARD else 3 * q.shape[3] + 2 * v.shape[3]
    scores = q.shape[0] * heads * pairs
    nbytes = sum(math.prod(x.shape) * x.dtype.itemsize for x in (*operands, *results))
    return Kernel(2 * scores * widths, 4 * scores, q.dtype.name, nbytes)


def _value(mask: Any) -> Any:
    return getattr(mask, "value", mask)
