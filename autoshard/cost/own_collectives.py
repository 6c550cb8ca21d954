"""The collectives that a program has itself, inside a user's `jax.shard_map`, as steps on the mesh that it is searched for."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from autoshard.cost.collectives import Communication
from autoshard.cost.reshard import Step
from autoshard.ir import Mesh, Op, Value, axes_of_product
from autoshard.primitives import primitive


def own_collectives(
    op: Op, values: Sequence[Value], shares: Mapping[int, float], mesh: Mesh, communication: Communication
) -> tuple[Step, ...]:
    """The collectives of an op of a shard_map's body, one for each of its arrays; none where the mesh is not the shard_map's.

    A collective among groups of devices of an axis counts as one over the axis.

    Args:
        op: any op with ``mapped`` axes.
        values: of the program.
        shares: per result that anything reads, the share of its bytes that the compiler sends.
    """
    kind = primitive(op.primitive).collective
    matched = axes_of_product([size for _, size in op.mapped], mesh.sizes)
    if not kind or matched is None:
        return ()
    by_name = {name: axes for (name, _), axes in zip(op.mapped, matched, strict=True)}
    axes = tuple(sorted(axis for name in _names(op) for axis in by_name.get(name, ())))
    if math.prod(mesh.sizes[axis] for axis in axes) == 1:
        return ()
    layout, steps = (-1,) * len(mesh.axes), []
    for read, made in zip(op.operands, op.results, strict=False):
        nbytes = max(values[read].nbytes, values[made].nbytes)
        if made in shares and nbytes:
            sent = nbytes * shares[made]
            seconds = float(communication.seconds(kind, sent, axes))
            steps.append(Step(kind, axes, layout, layout, nbytes, seconds, compiled_nbytes=0.0 if sent == nbytes else sent))
    return tuple(steps)


def _names(op: Op) -> tuple[str, ...]:
    """The axes of the shard_map's mesh that a collective is over."""
    found = op.params.get("axes", op.params.get("axis_name", ()))
    return tuple(name for name in (found if isinstance(found, tuple | list) else (found,)) if isinstance(name, str))
