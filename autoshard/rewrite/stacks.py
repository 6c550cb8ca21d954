"""Which scans of a step are stacks of layers that stages can share out."""

from __future__ import annotations

from autoshard.errors import PipelineError
from autoshard.ir import Graph, Op
from autoshard.ir.scan import num_carry, num_consts
from autoshard.microbatch.plan import Loop
from autoshard.microbatch.provenance import Provenance
from autoshard.rewrite.ticks import Order


def stacks_of(graph: Graph, loop: Loop, order: Order) -> tuple[Op, ...]:
    """The scans that carry examples through layers: they read stacked weights, or make their gradients.

    Raises:
        PipelineError: the stages do not divide the layers of one, or layers have a shard_map.
    """
    found = tuple(op for op in graph.ops if op.primitive == "scan" and _carries_examples(op, loop) and _has_weights(graph, op, loop))
    for op in found:
        if op.equation.params["length"] % (order.stages * order.rounds):
            rounds = f" in {order.rounds} rounds" if order.rounds > 1 else ""
            raise PipelineError(
                f"stages of one program have as many layers each{rounds}: the scan at {op.origin} has {op.equation.params['length']}, got "
                f"stages={order.stages}. Use a number of stages that divides the layers{rounds}."
            )
    mapped = next((one for op in found for one in op.walk() if one.mapped), None)
    if mapped is not None:
        raise PipelineError(
            "stages of one program compute their layers at the same time, as array operations with a dimension of stages, and the "
            f"shard_map at {mapped.origin} has a mesh of its own without an axis for it. Write its work with sharding constraints instead, "
            "or leave stages out."
        )
    grouped = next((inner for op in found for inner in op.walk() if inner.primitive == "ragged_dot_general"), None)
    if grouped is not None and any(_keeps_order(graph, op, loop) for op in found):
        raise PipelineError(
            "stages of one program keep what layers hand on in the examples' order, and layers with the grouped product at "
            f"{grouped.origin} hand on rows in the order of their groups. Put jax.checkpoint around the layer, which then sorts them "
            "again, or use another schedule than 'one_program'."
        )
    return found


def _keeps_order(graph: Graph, op: Op, loop: Loop) -> bool:
    """Whether layers hand on rows in the order of a sort, or the sizes of their groups in a microbatch."""
    known = Provenance(graph)
    counts = (v for v in op.bodies[0].outputs[num_carry(op.params) :] if loop.status(v).kind == "partial" and known.is_count(v))
    return any(loop.status(value).kind == "rows" for value in op.bodies[0].outputs) or any(True for _ in counts)


def _carries_examples(op: Op, loop: Loop) -> bool:
    first, n = num_consts(op.params), num_carry(op.params)
    inputs = op.bodies[0].inputs[first : first + n]
    return loop.phases[op.index] == "inside" and any(loop.status(value).kind == "slice" for value in inputs)


def _has_weights(graph: Graph, op: Op, loop: Loop) -> bool:
    first, body = num_consts(op.params) + num_carry(op.params), op.bodies[0]
    read = [value for value in body.inputs[first:] if loop.status(value).is_whole]
    made = [value for value in body.outputs[num_carry(op.params) :] if loop.status(value).kind == "partial"]
    return any(graph.values[value].rank and "float" in graph.values[value].dtype for value in (*read, *made))


def scans_in(graph: Graph) -> str:
    inner = [op for op in graph.walk() if op.primitive == "scan"]
    return f"scans, but none that does so, such as that at {inner[0].origin}" if inner else "no scan"
