"""The rules by which microbatches are carried through operations: the sharding rules, and what holds in time alone.

A microbatch has every ``n``-th example. Where a batch is joined to another one, padded or taken apart at multiples of ``n`` examples, every
``n``-th example of the result is what the operation makes of every ``n``-th one that it reads, with sizes divided by ``n``. A device of a
mesh has consecutive examples, and would have to exchange them. Groups of a convolution are parts of a feature dimension, which XLA's
partitioner does not split.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from autoshard.ir import Factor, Graph, Op, Rule, Value
from autoshard.microbatch.mapped import on_shards
from autoshard.rules import rules_of
from autoshard.rules.registry import Dim, assemble, reduced, whole


def batch_rules(graph: Graph) -> tuple[Rule | None, ...]:
    """The rule by which a microbatch is carried through each op, by op index: in shard_maps that of the op on one device."""
    rules = zip(graph.walk(), rules_of(graph), strict=True)
    return tuple(_in_time(op, graph) or (on_shards(op, rule, graph) if op.mapped else rule) for op, rule in rules)


def _in_time(op: Op, graph: Graph) -> Rule | None:
    """The rule of an op that holds in time alone; None for others."""
    arrays = [tuple(graph.values[value] for value in side) for side in (op.operands, op.results)]
    match op.primitive:
        case "conv_general_dilated" if max(op.params["feature_group_count"], op.params["batch_group_count"]) > 1:
            return _grouped(op, *arrays)
        case "triangular_solve":
            return _solved(op, *arrays)
    return _in_blocks(op, graph)


def _grouped(op: Op, operands: Sequence[Value], results: Sequence[Value]) -> Rule:
    """The rule of a grouped convolution, whose groups are examples where it is the derivative of one by `jax.vmap`."""
    (lhs, rhs), (out,) = operands, results
    left, right, result = (list[Dim](whole(value.shape)) for value in (lhs, rhs, out))
    (batch, channels, *_), (features, depth, *_), (out_batch, out_features, *_) = _specs(op)
    groups = Factor(max(op.params["feature_group_count"], op.params["batch_group_count"]))
    right[features] = result[out_features] = (groups, Factor(rhs.shape[features] // groups.size))
    left[batch] = result[out_batch] = Factor(out.shape[out_batch])
    left[channels] = right[depth] = reduced(rhs.shape[depth], "sum", out.dtype)
    grouped = channels if op.params["feature_group_count"] > 1 else batch
    left[grouped] = (groups, left[grouped])  # type: ignore[assignment]
    return assemble([left, right], [result])


def regrouped(op: Op, rule: Rule, factor: int, n: int) -> dict[str, int]:
    """The parameters that a convolution has instead of its own on one of ``n`` parts of a factor: fewer groups where it has them."""
    counts = ("feature_group_count", "batch_group_count")
    if op.primitive != "conv_general_dilated" or max(op.params[name] for name in counts) == 1:
        return {}
    (batch, channels, *_), (features, *_), _ = _specs(op)
    name, dim = (counts[0], channels) if op.params[counts[0]] > 1 else (counts[1], batch)
    is_split = factor in rule.operands[0][dim] and factor in rule.operands[1][features]
    return {name: op.params[name] // n} if is_split else {}


def _specs(op: Op) -> tuple[Sequence[int], Sequence[int], Sequence[int]]:
    """The dimensions of a convolution's operands and result: batch or output features, features or input features, and space."""
    numbers = op.params["dimension_numbers"]
    return numbers.lhs_spec, numbers.rhs_spec, numbers.out_spec


def _solved(op: Op, operands: Sequence[Value], results: Sequence[Value]) -> Rule:
    """The rule of a triangular solve, whose right-hand sides do not depend on each other."""
    matrix, given = operands
    dims = [Factor(size) for size in given.shape]
    at = -2 if op.params["left_side"] else -1
    dims[at] = Factor(given.shape[at], "need_replication")
    return assemble([[*dims[:-2], *whole(matrix.shape[-2:])], dims], [dims])


def _in_blocks(op: Op, graph: Graph) -> Rule | None:
    """The rule of an op that joins, pads or takes apart dimensions; None for others.

    All sizes and positions along such a dimension are multiples of one, whose factor passes through: ``([a, k], [b, k])->([c, k])``.
    """
    operands, results = ([graph.values[value] for value in side] for side in (op.operands, op.results))
    match op.primitive:
        case "concatenate" | "split":
            positions = [()] * operands[0].rank
        case "pad":
            positions = [(low, high, int(interior > 0)) for low, high, interior in op.params["padding_config"]]
        case "slice":
            strides = op.params["strides"] or (1,) * operands[0].rank
            positions = [(start, int(stride > 1)) for start, stride in zip(op.params["start_indices"], strides, strict=True)]
        case _:
            return None
    arrays = [value for value in (*operands, *results) if value.rank == len(positions)]
    shared = [Factor(math.gcd(*places, *(value.shape[d] for value in arrays)) or 1) for d, places in enumerate(positions)]

    def dims(value: Value) -> list[Dim]:
        return [(Factor(n // each.size, "need_replication"), each) for n, each in zip(value.shape, shared[: value.rank], strict=True)]

    return assemble([dims(value) for value in operands], [dims(value) for value in results])
