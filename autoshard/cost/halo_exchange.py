"""The collectives by which the shards of an op exchange data, such as halos, with bytes and seconds."""

from __future__ import annotations

import math
from collections.abc import Sequence

from autoshard.cost.collectives import SHIFT, Communication
from autoshard.cost.reshard import Step
from autoshard.ir import Choice, Mesh, Rule, Value, computed_layout, exchanges, operand_layout, shard_counts

PERMUTE = "collective_permute"


def exchange_steps(
    mesh: Mesh, communication: Communication, rule: Rule, choice: Choice, tensors: Sequence[Value], wanted: Sequence[bool]
) -> tuple[Step, ...]:
    """The collectives between the shards of an op, factor by factor.

    Args:
        mesh, communication: the mesh, and the cost of collectives on it.
        rule, choice: the op's rule and choice.
        tensors: the op's operands, then its results.
        wanted: per tensor whether it is read; an unread result is not sent.
    """
    layouts_of = [
        *(operand_layout(rule, choice, j) for j in range(len(rule.operands))),
        *(computed_layout(rule, choice, k) for k in range(len(rule.results))),
    ]
    local = [
        [n // count for n, count in zip(value.shape, shard_counts(layout, value.rank, mesh.sizes), strict=True)]
        for value, layout in zip(tensors, layouts_of, strict=True)
    ]
    steps = []
    for factor, axes in exchanges(rule, choice, mesh.sizes):
        for send in (send for send in rule.factors[factor].sends if wanted[send.tensor]):
            shape, dims = list(local[send.tensor]), (*rule.operands, *rule.results)[send.tensor]
            if (dim := next((d for d, members in enumerate(dims) if factor in members), -1)) >= 0 and send.count:
                shape[dim] = send.count
                if send.kind == PERMUTE:
                    local[send.tensor][dim] += send.count
            sent = tensors[send.tensor].itemsize * math.prod(shape)
            nbytes = sent * math.prod(mesh.sizes[axis] for axis in axes) if send.kind == "all_gather" else sent
            layout = layouts_of[send.tensor]
            if send.kind == "ring":
                hops = math.prod(mesh.sizes[axis] for axis in axes) - 1
                seconds = hops * float(communication.seconds(SHIFT, sent, axes))
                steps.append(Step(PERMUTE, axes, layout, layout, sent, seconds, hops=hops))
            elif send.kind == "zigzag":
                steps += 2 * [Step(PERMUTE, axes, layout, layout, sent / 2, float(communication.seconds(PERMUTE, sent / 2, axes)))]
            else:
                steps.append(Step(send.kind, axes, layout, layout, nbytes, float(communication.seconds(send.kind, nbytes, axes))))
    return tuple(steps)
