"""Inlining of a user's `jax.shard_map` into a manual program over the same devices.

Its body is interpreted inside the program's manual computation, which does not track which values vary over the mesh, with its collectives
over the program's axes: each axis of its mesh is one or several of those.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.core import Tracer
from jax.extend.core import JaxprEqn
from jax.sharding import AbstractMesh

from autoshard.ir import Op, axes_of_product
from autoshard.lower.interpret import Interpreter, Path
from autoshard.lower.xla_workarounds import bind_in_range

Mesh = jax.sharding.Mesh | AbstractMesh
Nested = Callable[[JaxprEqn, list[Any], Path], list[Any]]


def axes_of(inner: Mesh, ours: Mesh) -> dict[str, tuple[str, ...]] | None:
    """Per axis of a shard_map's mesh, the program's axes whose product it is; None where the meshes do not match."""
    devices = [each.devices.flat for each in (inner, ours) if not isinstance(each, AbstractMesh)]
    if inner.size != ours.size or (len(devices) == 2 and list(devices[0]) != list(devices[1])):
        return None
    matched, names = axes_of_product([*inner.shape.values()], [*ours.shape.values()]), [*ours.shape]
    if matched is None:
        return None
    return {axis: tuple(names[number] for number in numbers) for axis, numbers in zip(inner.shape, matched, strict=True)}


class Inside(Interpreter):
    """The interpreter of a user's shard_map body, where JAX does not track which values vary over the mesh.

    Attributes:
        axes: per axis of its mesh, the program's axes.
        ops: by path, those of the program. Equations without one are not read, and of these no collective is made.
        nested: evaluates a shard_map inside, from its equation, its operands and its path.
    """

    is_final = True

    def __init__(self, axes: Mapping[str, tuple[str, ...]], ops: Mapping[Path, Op], nested: Nested):
        super().__init__(ops, differentiable=False)
        self.axes = axes
        self.nested = nested

    def region(self) -> Inside:
        return self

    def context(self, eqn: JaxprEqn) -> AbstractContextManager[Any]:
        return nullcontext()

    def mapped(self, eqn: JaxprEqn, operands: list[Any], path: Path) -> list[Any]:
        return self.nested(eqn, operands, path)

    def op(self, op: Op, eqn: JaxprEqn, operands: list[Any]) -> list[Any]:
        operands = [x if isinstance(x, Tracer) else np.asarray(x) for x in operands]  # literals have a mesh
        named = {name: renamed(eqn.params[name], self.axes) for name in ("axes", "axis_name") if name in eqn.params}
        if eqn.primitive.name in _INSTEAD:
            return _INSTEAD[eqn.primitive.name](operands, {**eqn.params, **named})
        # A reduction's ``axes`` are dimensions, for which `renamed` gives none.
        return bind_in_range(eqn, operands, **{name: axes for name, axes in named.items() if axes or not eqn.params[name]})


def renamed(names: Any, axes: Mapping[str, tuple[str, ...]]) -> tuple[str, ...]:
    """The program's axes for one or several names of a shard_map's axes, or for none."""
    listed = names if isinstance(names, tuple | list) else (names,)
    return tuple(ours for name in listed if name in axes for ours in axes[name])


# Equivalents, without tracking, of primitives that track varying values; and of one that takes a single axis.
_INSTEAD: dict[str, Callable[[list[Any], Mapping[str, Any]], list[Any]]] = {
    "axis_index": lambda operands, params: [lax.axis_index(params["axis_name"])],
    "pvary": lambda operands, params: operands,
    "psum_invariant": lambda operands, params: [lax.psum(x, params["axes"]) for x in operands],
    "all_gather_invariant": lambda operands, params: [
        lax.all_gather(x, params["axis_name"], axis=params["all_gather_dimension"], tiled=params["tiled"]) for x in operands
    ],
}
