"""The user's `with_sharding_constraint`s: traced without a mesh, and read back from the graph."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import jax
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from autoshard.ir import Op

# JAX 0.10's errors for a bare PartitionSpec without a mesh, and for an axis that the mesh lacks.
_NO_MESH = "requires a non-empty mesh in context"
_NO_AXIS = re.compile(r"Resource axis: (?P<axis>.+?) of .* is not found in mesh", re.DOTALL)


def constraint_spec(op: Op) -> tuple[tuple, dict[str, int] | None]:
    """The spec of a ``sharding_constraint`` op, and the mesh shape it fixes; None where it only names axes.

    Entries are None, an axis, a tuple of axes, or ``PartitionSpec.UNCONSTRAINED``.
    """
    sharding = op.params["sharding"]
    if not isinstance(sharding, NamedSharding):
        return (), None
    spec: list[Any] = list(sharding.spec)
    for dim in sorted(op.params.get("unconstrained_dims") or ()):
        spec += [None] * (dim + 1 - len(spec))
        spec[dim] = PartitionSpec.UNCONSTRAINED
    return tuple(spec), mesh_shape(sharding.mesh)


def mesh_shape(mesh: Mesh | AbstractMesh) -> dict[str, int] | None:
    """Axis sizes by name; None for the placeholder mesh of `with_axes`."""
    placeholder = isinstance(mesh, AbstractMesh) and mesh.size == 1
    return None if placeholder else dict(mesh.shape)


def with_axes(traced: Callable[[], Any], axis_names: Sequence[str]) -> Any:
    """The result of ``traced()``; where it constrains to axes without a mesh, under a placeholder mesh of one device.

    The placeholder's axes are ``axis_names`` and those that JAX's errors name.
    """
    axes: list[str] | None = None
    while True:
        try:
            with nullcontext() if axes is None else jax.sharding.use_abstract_mesh(_placeholder(axes)):
                return traced()
        except (RuntimeError, ValueError) as error:
            missing = _NO_AXIS.search(str(error))
            if axes is None and _NO_MESH in str(error):
                axes = list(dict.fromkeys(axis_names)) or ["unnamed"]
            elif axes is not None and missing and missing["axis"] not in axes:
                axes.append(missing["axis"])
            else:
                raise


def _placeholder(axes: Sequence[str]) -> AbstractMesh:
    return AbstractMesh((1,) * len(axes), tuple(axes), axis_types=(AxisType.Auto,) * len(axes))
