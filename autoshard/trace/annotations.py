"""Shardings that arguments bring along: those of arrays on a mesh, and those that Flax's metadata names.

Metadata are that of Linen's boxes (`nn.Partitioned`, `nn.LogicallyPartitioned`) and of NNX's variables (``out_sharding``,
``sharding_rules``). Flax is never imported: an argument has metadata only if somebody did.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import jax
from jax.sharding import AbstractMesh, Mesh, NamedSharding

from autoshard.trace.constraints import mesh_in_force

Rules = tuple[tuple[str, Any], ...]

ARRAY = "its array"
_NNX_NAMES = ("out_sharding", "sharding_names", "sharding")  # the first since Flax 0.12


@dataclass(frozen=True, slots=True)
class Annotation:
    """A sharding that an argument has before the search.

    Attributes:
        spec: an entry a dimension: None, a mesh axis, a tuple of axes, or ``PartitionSpec.UNCONSTRAINED``; None where none follows, since
            there are no rules for its logical axes, or its array's sharding names no axes.
        mesh: names and sizes of the axes of its mesh, in order; None where the spec only names axes.
        source: what says so, in words.
        unruled: its logical axis names without a rule; those of NNX, which may be axes of the mesh, stay in the spec.
    """

    spec: tuple[Any, ...] | None
    mesh: tuple[tuple[str, int], ...] | None
    source: str
    unruled: tuple[str, ...] = ()

    @property
    def is_array(self) -> bool:
        return self.source.startswith(ARRAY)

    @property
    def axes(self) -> tuple[str, ...]:
        """The mesh axes that the spec names."""
        return tuple(dict.fromkeys(axes_of(self.spec or ())))


def annotations_of(args: tuple[Any, ...]) -> list[tuple[Annotation, ...]]:
    """For each array of the arguments its annotations: of its array, if it has one, and of its metadata, if it has some.

    >>> mesh = jax.sharding.AbstractMesh((2, 4), ("data", "model"))
    >>> sharded = jax.ShapeDtypeStruct((8, 8), "float32", sharding=NamedSharding(mesh, jax.P(None, "model")))
    >>> [(found.spec, found.mesh) for found in annotations_of((sharded,))[0]]
    [((None, 'model'), (('data', 2), ('model', 4)))]
    """
    found: list[tuple[Annotation, ...]] = []
    for entry in jax.tree.leaves(args, is_leaf=lambda x: _is_box(x) or _is_variable(x)):
        metadata = _of_metadata(entry)
        found += [(*_of_array(leaf), *metadata) for leaf in jax.tree.leaves(entry)]
    return found


def axes_of(spec: Iterable[Any]) -> Iterator[str]:
    """The mesh axes that a spec names, in order."""
    for entry in spec:
        if isinstance(entry, str):
            yield entry
        elif isinstance(entry, tuple | list):
            yield from entry


def flax_axes(args: tuple[Any, ...], rules: Rules) -> tuple[str, ...] | None:
    """The mesh axes to which Linen's boxes and logical constraints may constrain values, where there are some; else None.

    Flax makes constraints of them only under a mesh.
    """
    boxes = [x for x in jax.tree.leaves(args, is_leaf=_is_box) if _is_box(x)]
    if not boxes and not rules:
        return None
    specs = (found.spec or () for box in boxes for found in _of_metadata(box))
    of_boxes = (axis for spec in specs for axis in axes_of(spec))
    return tuple(dict.fromkeys([*axes_of([axes for _, axes in rules]), *of_boxes]))


def rules_in_force() -> Rules:
    """The rules of `nn.logical_axis_rules`, which are those of `nnx.logical_axis_rules`; none where Flax is not loaded."""
    spmd = sys.modules.get("flax.core.spmd")
    return () if spmd is None else tuple((name, axes) for name, axes in spmd.get_logical_axis_rules() or ())


def under_rules(rules: Rules) -> AbstractContextManager[Any]:
    """A context in which these logical axis rules are in force."""
    spmd = sys.modules.get("flax.core.spmd")
    return nullcontext() if spmd is None or not rules else spmd.logical_axis_rules(rules)


def _is_box(x: Any) -> bool:
    meta = sys.modules.get("flax.core.meta")
    return meta is not None and isinstance(x, meta.AxisMetadata)


def _is_variable(x: Any) -> bool:
    nnx = sys.modules.get("flax.nnx")
    return nnx is not None and isinstance(x, nnx.Variable)


def _of_array(x: Any) -> tuple[Annotation, ...]:
    """That of an array that was put on several devices, or of an abstract one with a sharding."""
    sharding = getattr(x, "sharding", None)
    committed = isinstance(x, jax.ShapeDtypeStruct) or (isinstance(x, jax.Array) and getattr(x, "committed", False))
    if sharding is None or not committed or sharding.num_devices == 1:
        return ()
    if not isinstance(sharding, NamedSharding):
        return (Annotation(None, None, f"{ARRAY}'s {type(sharding).__name__}"),)
    return (Annotation(_entries(sharding.spec), tuple(sharding.mesh.shape.items()), ARRAY),)


def _of_metadata(x: Any) -> tuple[Annotation, ...]:
    if _is_variable(x):
        found = _of_variable(x.get_metadata())
    elif _is_box(x) and hasattr(x, "get_partition_spec"):
        found = _of_box(x)
    else:
        return ()
    return () if found is None else (found,)


def _of_box(box: Any) -> Annotation:
    names, mesh = tuple(box.get_partition_spec()), getattr(box, "mesh", None)
    source = f"its nn.{type(box).__name__} metadata"
    if not hasattr(box, "rules"):
        return _named(names, mesh, source)
    rules = tuple(box.rules or ()) or rules_in_force()
    unruled = tuple(name for name in names if isinstance(name, str) and name not in dict(rules))
    if not rules:
        return Annotation(None if unruled else (), None, source, unruled)
    return _named(sys.modules["flax.linen.spmd"].logical_to_mesh_axes(names, rules), mesh, source, unruled)


def _of_variable(metadata: Mapping[str, Any]) -> Annotation | None:
    sharding = next((metadata[name] for name in _NNX_NAMES if metadata.get(name)), None)
    sharding = getattr(sharding, "sharding", sharding)  # of a `jax.experimental.layout.Format`
    if sharding is None:
        return None
    mesh = sharding.mesh if isinstance(sharding, NamedSharding) else metadata.get("mesh")
    names = tuple(sharding.spec if isinstance(sharding, NamedSharding) else sharding)
    rules = dict((*rules_in_force(), *(metadata.get("sharding_rules") or ())))
    known = {*rules, *axes_of(tuple(rules.values()))}
    unruled = tuple(name for name in axes_of(names) if name not in known)
    spec = [rules.get(name, name) if isinstance(name, str) else name for name in names]
    return _named(spec, mesh, "its nnx.Variable metadata", unruled)


def _named(spec: Iterable[Any], mesh: Mesh | AbstractMesh | None, source: str, unruled: tuple[str, ...] = ()) -> Annotation:
    """The annotation of a spec; without a mesh of its own its axes are those of the mesh in force, if that has them."""
    entries = _entries(spec)
    on = mesh_in_force() if mesh is None else mesh
    shape = tuple(on.shape.items()) if mesh is not None or {*axes_of(entries)} <= {*on.shape} else ()
    return Annotation(entries, shape or None, source, unruled)


def _entries(spec: Iterable[Any]) -> tuple:
    """The entries of a spec with lists as tuples, an axis alone in one as that axis, and none after the last that says something."""
    entries = [tuple(entry) if isinstance(entry, list | tuple) else entry for entry in spec]
    entries = [(entry[0] if len(entry) == 1 else entry or None) if isinstance(entry, tuple) else entry for entry in entries]
    while entries and entries[-1] is None:
        entries.pop()
    return tuple(entries)
