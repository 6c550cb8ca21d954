"""The collectives that a program has itself, inside a user's `jax.shard_map`, as steps on the mesh that it is searched for."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from autoshard.cost.collectives import Communication, Groups
from autoshard.cost.reshard import Step
from autoshard.ir import Mesh, Op, Value, axes_of_product
from autoshard.primitives import primitive


def own_collectives(
    op: Op, values: Sequence[Value], shares: Mapping[int, float], mesh: Mesh, communication: Communication
) -> tuple[Step, ...]:
    """The collectives of an op of a shard_map's body, one for each of its arrays; none where the mesh is not the shard_map's.

    Groups of devices of an axis (``axis_index_groups``) communicate as a part of the axis, where they are regular; else as all of it.

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
    groups = _groups(op) if len(axes) == 1 else None
    layout, steps = (-1,) * len(mesh.axes), []
    for read, made in zip(op.operands, op.results, strict=False):
        nbytes = max(values[read].nbytes, values[made].nbytes)
        if made in shares and nbytes:
            sent = nbytes * shares[made]
            seconds = float(communication.seconds(kind, sent, axes, groups))
            steps.append(Step(kind, axes, layout, layout, nbytes, seconds, compiled_nbytes=0.0 if sent == nbytes else sent, groups=groups))
    return tuple(steps)


def _names(op: Op) -> tuple[str, ...]:
    """The axes of the shard_map's mesh that a collective is over."""
    found = op.params.get("axes", op.params.get("axis_name", ()))
    return tuple(name for name in (found if isinstance(found, tuple | list) else (found,)) if isinstance(name, str))


def _groups(op: Op) -> Groups | None:
    """The size of a collective's groups of devices of an axis, and the distance of their devices; None where they have none."""
    listed = op.params.get("axis_index_groups")
    if not listed or len(listed[0]) < 2:
        return None
    size, stride = len(listed[0]), listed[0][1] - listed[0][0]
    wanted = {tuple(range(start, start + size * stride, stride)) for start, *_ in listed} if stride > 0 else set()
    return (size, stride) if wanted == set(map(tuple, listed)) else None
