"""The rules by which microbatches are carried through operations: the sharding rules, and what holds in time alone.

A microbatch has every ``n``-th example. Where a batch is joined to another one, padded or taken apart at multiples of ``n`` examples, every
``n``-th example of the result is what the operation makes of every ``n``-th one that it reads, with sizes divided by ``n``. A device of a
mesh has consecutive examples, and would have to exchange them.
"""

from __future__ import annotations

import math

from autoshard.ir import Factor, Graph, Op, Rule, Value
from autoshard.microbatch.mapped import on_shards
from autoshard.rules import rules_of
from autoshard.rules.registry import Dim, assemble


def batch_rules(graph: Graph) -> tuple[Rule | None, ...]:
    """The rule by which a microbatch is carried through each op, by op index: in shard_maps that of the op on one device."""
    rules = zip(graph.walk(), rules_of(graph), strict=True)
    return tuple(_in_blocks(op, graph) or (on_shards(op, rule, graph) if op.mapped else rule) for op, rule in rules)


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
