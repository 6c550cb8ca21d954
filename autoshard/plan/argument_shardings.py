"""The sharding that each argument keeps, of those that it has: that of its array on a mesh, and that of its Flax metadata.

Metadata comes before an array that is whole on every device, as all are that are made under `jax.set_mesh`. Where both split an argument,
otherwise than each other, that is an error.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from jax.sharding import PartitionSpec

from autoshard.errors import ShardingError
from autoshard.ir import Graph
from autoshard.trace import Annotation, axes_of

Annotations = Mapping[int, tuple[Annotation, ...]]
"""By argument position the shardings that it has."""


def kept_shardings(graph: Graph, annotations: Annotations) -> tuple[dict[int, Annotation], list[str]]:
    """By argument position the sharding that it keeps, and notes on those that are not kept.

    Raises:
        ShardingError: two of an argument contradict each other, or there are no rules for its logical axes.
    """
    kept: dict[int, Annotation] = {}
    notes: dict[str, list[str]] = {}
    for position, found in annotations.items():
        path, shape = graph.argument_paths[position], graph.values[graph.arguments[position]].shape
        chosen = _chosen([each for each in found if _fits(each, shape)], path)
        if chosen is not None:
            kept[position] = chosen
        for each in found:
            if reason := _reason(each, chosen, shape):
                notes.setdefault(reason, []).append(path)
    return kept, [f"{reason}: {some(paths)}" for reason, paths in notes.items()]


def _chosen(found: Sequence[Annotation], path: str) -> Annotation | None:
    """Of the annotations of one argument the one that counts."""
    arrays = [each for each in found if each.is_array and each.spec is not None]
    named = [each for each in found if not each.is_array]
    ruled = [each for each in named if each.spec is not None]
    if named and not ruled and not (arrays and arrays[0].axes):
        name = named[0].unruled[0]
        raise ShardingError(
            f"logical axes stand for mesh axes by rules, and {path} ({named[0].source}) has {quoted(named[0].unruled)} without any. Search "
            f"in `with nn.logical_axis_rules((({name!r}, 'model'), ...)):`, where None splits nothing, or give the metadata rules."
        )
    if arrays and ruled and arrays[0].axes and arrays[0].spec != ruled[0].spec:
        raise ShardingError(
            f"an argument keeps one sharding, and {path} has two: {spec_words(arrays[0].spec)} by {arrays[0].source}, and "
            f"{spec_words(ruled[0].spec)} by {ruled[0].source}. Put the array where its metadata says, or say which one counts: "
            f"pins=('arguments', {{{path!r}: ...}})."
        )
    return next(iter([*ruled, *arrays]), None)


def _fits(found: Annotation, shape: Sequence[int]) -> bool:
    """Whether a spec has no more entries than a shape, and splits no dimension of size one, unlike state that inherits another's."""
    spec = found.spec or ()
    return len(spec) <= len(shape) and all(size > 1 for entry, size in zip(spec, shape, strict=False) if any(axes_of((entry,))))


def _reason(found: Annotation, chosen: Annotation | None, shape: Sequence[int]) -> str:
    """Why an annotation is not kept, or not whole; empty where it is."""
    if not _fits(found, shape):
        return "Flax metadata of another shape is not kept, such as optimizer state inherits from a parameter"
    if found.is_array and found.spec is None:
        return f"{found.source} names no axes of a mesh, and is not kept"
    if found.unruled and not {*found.unruled} & {*found.axes} and (found is chosen or chosen is None):
        return f"there is no rule for logical axis {quoted(found.unruled)}, which is left unsharded, as by Flax"
    if chosen is not None and found.is_array and found.spec != chosen.spec:
        return "arrays that are whole on every device are split as their Flax metadata says"
    return ""


def spec_words(spec: Sequence[Any] | None) -> str:
    """A spec as users write it.

    >>> spec_words((None, ("data", "model")))
    "P(None, ('data', 'model'))"
    """
    return f"P({', '.join('P.UNCONSTRAINED' if entry is PartitionSpec.UNCONSTRAINED else repr(entry) for entry in spec or ())})"


def quoted(names: Iterable[str]) -> str:
    """Names in quotes, with commas."""
    return ", ".join(map(repr, names))


def some(paths: Sequence[str]) -> str:
    """The first few paths, and how many more there are."""
    return ", ".join(paths[:3]) + (f" and {len(paths) - 3} more" if len(paths) > 3 else "")
