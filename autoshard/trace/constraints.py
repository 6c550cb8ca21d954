"""The user's `with_sharding_constraint`s: traced without a mesh, and read back from the graph."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from autoshard.ir import Op

# JAX 0.10's errors for a bare PartitionSpec or a shard_map without a mesh, and Flax 0.12's for a variable that is made with metadata;
# JAX's for an axis that the mesh lacks.
_NO_MESH = ("requires a non-empty mesh in context", "context mesh cannot be empty", "auto mesh context or metadata is required")
_NO_AXIS = re.compile(r"Resource axis: (?P<axis>.+?) of .* is not found in mesh", re.DOTALL)

_EMPTY = AbstractMesh((), ())


def constraint_spec(op: Op) -> tuple[tuple[Any, ...], dict[str, int] | None]:
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


@contextmanager
def outside_mesh(keep_auto: bool = False) -> Iterator[None]:
    """A context without the mesh of `jax.set_mesh`, under which operations on any other mesh are errors.

    The mesh stays in force where it has Manual axes, inside `jax.shard_map`; with ``keep_auto`` also where no axis is Explicit, since
    constraints of the program may name its axes.
    """
    with _outside(jax.sharding.get_abstract_mesh().axis_types, keep_auto):
        yield


def _outside(types: Sequence[AxisType], keep_auto: bool) -> AbstractContextManager[Any]:
    if AxisType.Manual in types or (keep_auto and AxisType.Explicit not in types):
        return nullcontext()
    if not keep_auto:
        with suppress(ValueError):  # JAX has no mesh of devices inside `jax.jit`
            return nullcontext() if jax.sharding.get_mesh().empty else jax.set_mesh(Mesh(np.empty((), object), ()))
    return jax.sharding.use_abstract_mesh(_EMPTY)


def with_axes(traced: Callable[[], Any], axes: Mapping[str, int], always: bool = False) -> Any:
    """The result of ``traced()``, under an abstract mesh where it constrains to axes without one, or ``always``.

    That is the mesh of `jax.set_mesh`, with Auto axes for Explicit ones; without such a mesh, one of ``axes`` and, of size one, of all that
    JAX's errors name. A mesh of one device is a placeholder.
    """
    users = mesh_in_force()
    found: dict[str, int] | None = None
    mesh: AbstractMesh | None = None
    if always and AxisType.Manual not in users.axis_types:
        found = None if users.axis_names else dict(axes) or {"unnamed": 1}
        mesh = _with_auto(users) if found is None else _auto_mesh(found)
    while True:
        try:
            with outside_mesh(keep_auto=True) if mesh is None else jax.sharding.use_abstract_mesh(mesh):
                return traced()
        except (RuntimeError, ValueError) as error:
            missing = _NO_AXIS.search(str(error))
            if mesh is None and any(text in str(error) for text in _NO_MESH):
                if users.axis_names:
                    mesh = _with_auto(users)
                    continue
                found = dict(axes) or {"unnamed": 1}
            elif found is not None and missing and missing["axis"] not in found:
                found[missing["axis"]] = 1
            else:
                raise
            mesh = _auto_mesh(found)


def mesh_in_force() -> AbstractMesh:
    """The mesh of `jax.set_mesh`, also within `outside_mesh`; the empty mesh where there is none."""
    abstract = jax.sharding.get_abstract_mesh()
    with suppress(ValueError):  # which JAX raises inside `jax.jit`
        return abstract if abstract.axis_names else jax.sharding.get_mesh().abstract_mesh
    return abstract


def _with_auto(mesh: AbstractMesh) -> AbstractMesh:
    return mesh.update(axis_types=(AxisType.Auto,) * len(mesh.axis_names))


def _auto_mesh(axes: Mapping[str, int]) -> AbstractMesh:
    return AbstractMesh(tuple(axes.values()), tuple(axes), axis_types=(AxisType.Auto,) * len(axes))
