"""A user's `jax.shard_map` in a loop over microbatches: each device computes on what its shards have of a microbatch.

A microbatch has every ``n``-th example. So has each shard of a dimension that the specs split, where ``n`` divides the shard: an operand
that is sliced and then taken apart is the same as one that is taken apart and then sliced. The body is an ordinary program on shards, of
which collectives carry on whatever dimension they do not exchange.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

from autoshard.ir import Factor, Graph, Op, Rule, Value
from autoshard.primitives import is_collective
from autoshard.rules.registry import Dim, assemble, rule_of
from autoshard.trace.mapped import ENTERING, MAPPED


def shard_maps(ops: Sequence[Op]) -> Iterator[tuple[Op, ...]]:
    """The ops of a program in order, each by itself, those of a shard_map together."""
    start = 0
    while start < len(ops):
        end, path = start + 1, ops[start].path
        if ops[start].primitive == MAPPED and path[-2] == ENTERING:
            end = next((k for k in range(end, len(ops)) if ops[k].path[: len(path) - 2] != path[:-2]), len(ops))
        yield tuple(ops[start:end])
        start = end


def on_shards(op: Op, rule: Rule | None, graph: Graph) -> Rule | None:
    """The rule of an op of a shard_map on the shards of one device."""
    if op.bodies:
        return rule
    operands, results = (tuple(graph.values[value] for value in side) for side in (op.operands, op.results))
    if op.primitive == MAPPED:
        return None if rule is None else replace(rule, factors=tuple(Factor(factor.size) for factor in rule.factors))
    if is_collective(op.primitive) or op.primitive == "pvary":
        return _collective(op, operands, results)
    return rule_of(op.primitive, op.params, operands, results)


def _collective(op: Op, operands: Sequence[Value], results: Sequence[Value]) -> Rule | None:
    """The rule of a collective on one device's arrays, of which other devices have others."""
    params = op.params
    exchanges = params.keys() & {"all_gather_dimension", "scatter_dimension", "split_axis"}
    if not exchanges:
        dims = [[Factor(size) for size in value.shape] for value in operands]
        return assemble(dims, dims) if [x.shape for x in operands] == [x.shape for x in results] else None
    if len(operands) != 1 or len(exchanges) != 1:
        return None
    read: list[Dim] = [Factor(size) for size in operands[0].shape]
    made, devices = list(read), Factor(_group_size(op), "need_replication")
    if "all_gather_dimension" in params:
        at = params["all_gather_dimension"]
        made[at : at + 1] = [(devices, read[at])] if params["tiled"] else [devices, read[at]]  # type: ignore[list-item]
        return assemble([read], [made])
    at = params[exchanges.pop()]
    part = Factor(operands[0].shape[at] // devices.size)
    read[at] = (devices, part)
    if "scatter_dimension" in params:
        made[at : at + 1] = [part] if params["tiled"] else []
    elif params["concat_axis"] == at:
        made[at] = (devices, part)
    else:
        made[at], made[params["concat_axis"]] = part, (devices, made[params["concat_axis"]])  # type: ignore[assignment]
    return assemble([read], [made])


def _group_size(op: Op) -> int:
    """The number of devices that exchange data in a collective."""
    if op.params.get("axis_index_groups"):
        return len(op.params["axis_index_groups"][0])
    names = op.params["axis_name"]
    sizes = dict(op.mapped)
    return math.prod(sizes[name] for name in (names if isinstance(names, tuple | list) else (names,)))
