"""Rules of the ops of a user's `jax.shard_map`: its specs fix what is split, and its body computes on shards as they are.

An operand is taken apart by the op ``([ij])->([j])``, whose factor ``i`` is split over the axes that its spec names, and a result is put
together by ``([j])->([ij])``. An op of the body has only factors that need replication: the arrays of each device are whole to it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from autoshard.ir import Factor, Op, Rule, Value
from autoshard.rules.registry import rule_of, whole


def mapped_rule(op: Op, operands: Sequence[Value], results: Sequence[Value]) -> Rule:
    """The rule of an op of a shard_map.

    Args:
        op: with ``mapped`` axes, and without bodies.
        operands, results: its values.
    """
    if "entries" in op.params:
        return _boundary(op, (operands if op.params["enters"] else results)[0].shape)
    found = rule_of(op.primitive, op.params, operands, results)
    if found is not None:
        return replace(found, factors=tuple(Factor(factor.size, "need_replication") for factor in found.factors))
    factors: list[Factor] = []
    tensors = []
    for value in (*operands, *results):
        tensors.append(tuple((len(factors) + dim,) for dim in range(value.rank)))
        factors += whole(value.shape)
    return Rule(tuple(factors), tuple(tensors[: len(operands)]), tuple(tensors[len(operands) :]))


def _boundary(op: Op, shape: tuple[int, ...]) -> Rule:
    """The rule of a shard_map's operand or result, of this shape as a whole."""
    numbers, factors = dict[str, int](), list[Factor]()
    sizes = dict(op.mapped)
    sharded, local = [], []
    for names, n in zip(op.params["entries"], shape, strict=True):
        dim = []
        for name in names:
            numbers[name] = len(factors)
            dim.append(len(factors))
            factors.append(Factor(sizes[name]))
        rest = (len(factors),)
        factors.append(Factor(n // max(1, math.prod(sizes[name] for name in names)), "need_replication"))
        sharded.append((*dim, *rest))
        local.append(rest)
    given = tuple((size, numbers.get(name, -1) if size > 1 and in_order(op) else -1) for name, size in op.mapped)
    read, made = (sharded, local) if op.params["enters"] else (local, sharded)
    return Rule(tuple(factors), (tuple(read),), (tuple(made),), given)


def in_order(op: Op) -> bool:
    """Whether the axes that split a dimension are in the order of the shard_map's mesh, so that a layout can say it."""
    order = [name for name, _ in op.mapped]
    return all([*map(order.index, names)] == sorted(map(order.index, names)) for names in op.params["entries"])
