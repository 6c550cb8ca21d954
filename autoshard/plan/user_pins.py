"""The user's pins: specs that are given, shardings that arguments have, constraints inside the function, and the axes of the batch.

What a call gives, by path or as ``batch_axes``, comes before what the arguments have, with a note where the two differ.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from jax.sharding import PartitionSpec

from autoshard.errors import ShardingError
from autoshard.ir import Assignment, Graph, Layout, Mesh, Spec, check_divides, layout_to_spec, spec_to_layout
from autoshard.ir.naming import matches_of, matching
from autoshard.lower import STAGE_AXIS
from autoshard.pipeline.stages import Stage
from autoshard.plan.argument_shardings import kept_shardings, quoted, some, spec_words
from autoshard.problem import Pin
from autoshard.rewrite import Padding
from autoshard.trace import Annotation, Batch, axes_of, checked_batch, constraint_spec

ARGUMENTS = "arguments"
_OPEN = PartitionSpec.UNCONSTRAINED

Specs = Mapping[str, PartitionSpec]
Pins = Specs | str | Sequence[Specs | str]
"""Specs by argument path or pattern; ``"arguments"`` for the shardings that the arguments have; or a tuple of both."""


@dataclass(frozen=True, slots=True)
class Asked:
    """The pins that a call asks for.

    Attributes:
        specs: by argument path or pattern.
        arguments: whether the shardings that arguments have are pins.
        batch_axes: the mesh axes that split the batch; empty where that is searched.
        batch: the arguments that hold examples, by path or position; empty where they are found.
        padding: of how many elements each device's shard of state is a multiple, whether it is padded or not.
    """

    specs: Specs = field(default_factory=dict)
    arguments: bool = False
    batch_axes: tuple[str, ...] = ()
    batch: tuple[str | int, ...] = ()
    padding: Padding = field(default_factory=Padding)

    @classmethod
    def of(cls, pins: Pins | None, batch_axes: str | Sequence[str] | None = None, batch: Batch = None) -> Asked:
        """The pins of a call, and what it says of the batch.

        >>> Asked.of(("arguments", {"batch*": PartitionSpec("data")}), "data").axes
        ('data',)

        Raises:
            ShardingError: they are no pins.
            TraceError: the batch is neither paths nor positions.
        """
        specs: dict[str, PartitionSpec] = {}
        several = pins if isinstance(pins, tuple | list) else () if pins is None else (pins,)
        for part in several:
            if isinstance(part, Mapping):
                specs |= _checked(part)
            elif not isinstance(part, str) or part != ARGUMENTS:
                raise ShardingError(
                    "pins map argument paths or patterns to PartitionSpecs, as in {'state.params*': P('data')}; or are 'arguments', which "
                    f"keeps the shardings that arguments have; or a tuple of both. Got {part!r}."
                )
        return cls(specs, any(isinstance(part, str) for part in several), _axes(batch_axes), checked_batch(batch))

    @property
    def axes(self) -> tuple[str, ...]:
        """The mesh axes that are named, the batch's first."""
        return tuple(dict.fromkeys((*self.batch_axes, *(axis for spec in self.specs.values() for axis in axes_of(spec)))))

    def check(self, paths: Sequence[str]) -> None:
        """Raises `ShardingError` for a pattern that matches no argument."""
        for pattern in self.specs:
            matching(pattern, paths)

    def among(self, paths: Sequence[str]) -> Asked:
        """Those of some arguments alone."""
        return replace(self, specs={pattern: spec for pattern, spec in self.specs.items() if matches_of(pattern, paths)})


def _checked(specs: Mapping[Any, Any]) -> dict[str, PartitionSpec]:
    for path, spec in specs.items():
        if not isinstance(path, str):
            raise ShardingError(f"pins map argument paths or patterns to PartitionSpecs, as in {{'state*': P('data')}}; got {path!r}.")
        if not isinstance(spec, PartitionSpec):
            raise ShardingError(f"a pin is a PartitionSpec, got {spec!r} for {path!r}. Write P('data', None), or P() for a replicated one.")
    return dict(specs)


def _axes(batch_axes: Any) -> tuple[str, ...]:
    found = () if batch_axes is None else (batch_axes,) if isinstance(batch_axes, str) else batch_axes
    if not isinstance(found, tuple | list) or not all(isinstance(axis, str) and axis for axis in found) or len({*found}) < len(found):
        raise ShardingError(f"batch_axes is a mesh axis, or several different ones, got {batch_axes!r}. Write 'data' or ('data', 'fsdp').")
    return tuple(found)


@dataclass(frozen=True, slots=True)
class Place:
    """A constraint inside the function: the value that it makes, the one that it reads, and where, in words."""

    value: int
    operand: int
    what: str


def constraints(graph: Graph) -> Iterator[tuple[Place, tuple[Any, ...], dict[str, int] | None]]:
    """The user's constraints inside the function, their specs, and the shapes of their meshes, as `constraint_spec` has them."""
    for op in graph.walk():
        if op.primitive == "sharding_constraint" and not op.mapped:
            yield Place(op.results[0], op.operands[0], f"the value constrained at {op.origin}"), *constraint_spec(op)


@dataclass(frozen=True, slots=True, eq=False)
class UserPins:
    """The pins of one program.

    Attributes:
        asked: those of the call.
        graph: the program.
        given: by argument position the spec that the call gives.
        kept: by argument position the sharding that it has and keeps.
        left: by argument position one that it has and that the call does not keep.
        batch: by argument position the dimension of the batch; empty where no axes for it are given, or before it was looked for.
        notes: on shardings that are not kept, in words.
        stacked: positions of arguments whose first dimension no axis splits, such as one of microbatches.
        fixed: layouts of values, on a mesh that is given.
    """

    asked: Asked
    graph: Graph
    given: Mapping[int, PartitionSpec] = field(default_factory=dict)
    kept: Mapping[int, Annotation] = field(default_factory=dict)
    left: Mapping[int, Annotation] = field(default_factory=dict)
    batch: Mapping[int, int] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    stacked: tuple[int, ...] = ()
    fixed: Mapping[int, Layout] = field(default_factory=dict)

    @property
    def axes(self) -> tuple[str, ...]:
        """The mesh axes that are named, those of constraints without a mesh included."""
        of_arguments = (axis for found in self.kept.values() for axis in found.axes)
        of_constraints = (axis for _, spec, mesh in constraints(self.graph) if mesh is None for axis in axes_of(spec))
        return tuple(dict.fromkeys((*self.asked.axes, *of_arguments, *of_constraints)))

    @property
    def specs(self) -> list[PartitionSpec]:
        """The spec of each argument that is given or kept; of others one that shards nothing."""
        kept = {at: PartitionSpec(*(None if entry is _OPEN else entry for entry in found.spec or ())) for at, found in self.kept.items()}
        return [self.given.get(at, kept.get(at, PartitionSpec())) for at in range(len(self.graph.arguments))]

    def again(self, asked: Asked, graph: Graph) -> UserPins:
        """The pins of the program traced again, with others of some arguments, which come before."""
        given = {position: spec for pattern, spec in asked.specs.items() for position in matching(pattern, graph.argument_paths)}
        kept = {at: each for at, each in self.kept.items() if at not in given}
        return replace(self, asked=asked, graph=graph, given={**self.given, **given}, kept=kept)

    def ordering(self) -> Iterator[tuple[str, Any]]:
        """The specs that say in which order axes split a dimension, with what each is on, in words."""
        for position, spec in enumerate(self.specs):
            yield self.graph.argument_paths[position], spec
        for place, spec, _ in constraints(self.graph):
            yield place.what, spec

    def on(self, mesh: Mesh) -> dict[int, Pin]:
        """The pins by value number on a mesh.

        Raises:
            ShardingError: one is illegal there, or two contradict each other.
        """
        found = self._of_arguments(mesh)
        self._check_batch(mesh)
        for position, dim in self.batch.items():
            value, split = self.graph.arguments[position], self._split(position, mesh)
            pin = [both & one for both, one in zip(found.get(value, split), split, strict=True)]
            if not all(pin) and position in self.given:
                raise ShardingError(
                    f"pins and batch_axes agree on the batch: batch_axes={self.asked.batch_axes} splits dimension {dim} of "
                    f"{self.graph.argument_paths[position]} over these axes alone, and its spec in pins does not. Leave out one of the two."
                )
            found[value] = tuple(both or one for both, one in zip(pin, split, strict=True))
        for position in self.stacked:
            value = self.graph.arguments[position]
            found[value] = (frozenset(range(-1, self.graph.values[value].rank)) - {0},) * len(mesh.axes)
        found.update((value, tuple(frozenset((dim,)) for dim in layout)) for value, layout in self.fixed.items())
        for place, spec, _ in constraints(self.graph):
            found[place.value] = _pin(tuple(spec), mesh, self.graph.values[place.value].shape, place.what)
            if STAGE_AXIS in axes_of(spec):  # what one stage has it does not send to be put together and taken apart again
                found.setdefault(place.operand, found[place.value])
        found.update(self._in_blocks(mesh, found))
        return found

    def _in_blocks(self, mesh: Mesh, pins: Mapping[int, Pin]) -> Iterator[tuple[int, Pin]]:
        """The pins of state whose shards are of whole blocks: of each dimension some axes whose sizes divide the number of its blocks."""
        for position in sorted(self.graph.state):
            value, path = self.graph.arguments[position], self.graph.argument_paths[position]
            if (quantum := self.asked.padding.quantum_of(path)) == 1:
                continue
            shape = self.graph.values[value].shape
            pin = pins.get(value, (frozenset(range(-1, len(shape))),) * len(mesh.axes))
            fitting = [_fitting(size // quantum if size % quantum == 0 else 1, dim, mesh, pin) for dim, size in enumerate(shape)]
            within = [{-1, *(dim for dim, axes in enumerate(fitting) if axis in axes)} for axis in range(len(mesh.axes))]
            found = tuple(both & one for both, one in zip(pin, within, strict=True))
            if not all(found):
                raise ShardingError(
                    f"each device's shard of {path} is a multiple of {quantum} elements, as padding= says, and its pin splits its shape "
                    f"{shape} otherwise on the mesh {mesh}. Pin it over fewer devices, or give it another quantum."
                )
            yield value, found

    def _of_arguments(self, mesh: Mesh) -> dict[int, Pin]:
        """The pins of arguments, but for the batch's axes."""
        graph, found = self.graph, {}
        for position, kept in self.kept.items():
            value, path = graph.arguments[position], graph.argument_paths[position]
            _check_logical(kept, mesh, path)
            found[value] = _pin(kept.spec or (), mesh, graph.values[value].shape, f"{path} (by {kept.source})")
        for position, spec in self.given.items():
            value = graph.arguments[position]
            found[value] = _pin(tuple(spec), mesh, graph.values[value].shape, graph.argument_paths[position])
        return found

    def _split(self, position: int, mesh: Mesh) -> Pin:
        """The pin of an array of the batch: its dimension is split over the batch's axes, and over no others."""
        dim, everywhere = self.batch[position], frozenset(range(-1, self.graph.values[self.graph.arguments[position]].rank))
        return tuple(frozenset((dim,)) if name in self.asked.batch_axes else everywhere - {dim} for name in mesh.names)

    def _check_batch(self, mesh: Mesh) -> None:
        axes = self.asked.batch_axes
        for axis in axes:
            if axis not in mesh.all_names:
                raise ShardingError(
                    f"batch_axes are axes of the mesh, got {axis!r}, and the mesh has {mesh}. Use some of {list(mesh.all_names)}, or give "
                    "a mesh that has it."
                )
        count = math.prod(size for name, size in mesh.axes if name in axes)
        for position, dim in self.batch.items():
            if (n := self.graph.values[self.graph.arguments[position]].shape[dim]) % count:
                raise ShardingError(
                    f"batch_axes divide the batch: {quoted(axes)} of the mesh {mesh} split it into {count}, and dimension {dim} of "
                    f"{self.graph.argument_paths[position]} has size {n}. Use axes whose sizes divide {n}, or another batch size."
                )

    # -- notes -------------------------------------------------------------------------------------------------------

    def remarks(self, mesh: Mesh, assignment: Assignment) -> list[str]:
        """Notes on what gave way to what, and what was not kept, given the answer."""
        return [*self.notes, *self._of_batch(mesh), *self._whole(), *self._constrained(mesh), *self._not_asked(mesh, assignment)]

    def _of_batch(self, mesh: Mesh) -> Iterator[str]:
        """What was taken for the batch, and the shardings of arguments that gave way."""
        paths, pins = self.graph.argument_paths, self._of_arguments(mesh)
        if self.batch:
            members, dim = some([paths[position] for position in self.batch]), next(iter(self.batch.values()))
            yield f"batch_axes: the batch is dimension {dim} of {members}, and is split over {' and '.join(self.asked.batch_axes)}"
        for position in self.batch:
            kept, pin = self.kept.get(position), pins.get(self.graph.arguments[position])
            if kept and pin and not all(both & one for both, one in zip(pin, self._split(position, mesh), strict=True)):
                yield f"{paths[position]} is split as batch_axes say, not {spec_words(kept.spec)} by {kept.source}"

    def _whole(self) -> Iterator[str]:
        """The arguments without state that stay whole, as their arrays are."""
        free = [at for at, kept in self.kept.items() if kept.is_array and not kept.axes and at not in self.graph.state]
        whole = [self.graph.argument_paths[at] for at in free if at not in self.batch]
        if whole:
            yield (
                f"{some(whole)} stay{'s' * (len(whole) == 1)} whole on every device of the mesh, where the arrays are: to split them pass "
                "batch_axes=, or pins=('arguments', {path: spec})"
            )

    def _constrained(self, mesh: Mesh) -> Iterator[str]:
        """The constraints right on pinned arguments that say otherwise: both are kept."""
        pins, paths = self.on(mesh), dict(zip(self.graph.arguments, self.graph.argument_paths, strict=True))
        for place, _, _ in constraints(self.graph):
            pin = pins.get(place.operand) if place.operand in paths else None
            if pin is not None and not all(a & b for a, b in zip(pin, pins[place.value], strict=True)):
                yield f"{paths[place.operand]} is pinned otherwise than {place.what}: it is resharded there in every step"

    def _not_asked(self, mesh: Mesh, assignment: Assignment) -> Iterator[str]:
        """The shardings that arguments have, and get another: pins say so, or nobody asked to keep them."""
        graph, differ = self.graph, {}
        for position, found in self.left.items():
            value, path = graph.arguments[position], graph.argument_paths[position]
            layout, rank = assignment.layout(value), graph.values[value].rank
            if found.spec is None or not _same(found, layout, mesh, rank):
                here = layout_to_spec(layout, mesh.names, rank)
                had = f"logical axes {quoted(found.unruled)}" if found.spec is None else spec_words(found.spec)
                differ.setdefault((found.is_array, position in self.given), []).append(
                    f"{path}, which has {had} and gets {spec_words(here)}"
                )
        for (is_array, given), members in differ.items():
            n, what = len(members), "shardings on a mesh" if is_array else "Flax metadata"
            why = "pins say so" if given else "nobody asked to keep it; pass pins='arguments' for that"
            yield f"{n} argument{'s' * (n > 1)} with {what} {'are' if n > 1 else 'is'} sharded otherwise, such as {members[0]}: {why}"


def user_pins(asked: Asked, graph: Graph, annotations: Sequence[tuple[Annotation, ...]], is_searched: bool) -> UserPins:
    """The pins of a program, given the annotations of each argument; the batch is not looked for yet.

    Args:
        is_searched: whether the mesh is, so that pins name its axes.

    Raises:
        ShardingError: a pattern matches nothing, an argument has two shardings that contradict each other, or logical axes without rules.
    """
    given = {position: spec for pattern, spec in asked.specs.items() for position in matching(pattern, graph.argument_paths)}
    found = {at: each for at, each in enumerate(annotations) if each and graph.values[graph.arguments[at]].rank}
    left = {at: each[-1] for at, each in found.items() if not each[-1].is_array or each[-1].axes}
    if not asked.arguments:
        return UserPins(asked, graph, given, left=left)
    kept, notes = kept_shardings(graph, {at: each for at, each in found.items() if at not in given})
    if not found:
        notes.append("pins='arguments' keeps nothing: no argument is an array that was put on a mesh, or has Flax metadata")
    if names := _named_alone(kept.values()) if is_searched else ():
        notes.append(
            f"metadata without rules names {quoted(names)}, taken for axes of the mesh: of logical axes give rules, as for jax.jit"
        )
    return UserPins(asked, graph, given, kept, {at: each for at, each in left.items() if at in given}, notes=tuple(notes))


def stage_pins(asked: Asked, stage: Stage, is_searched: bool) -> UserPins:
    """The pins of a stage's program, in which the messages of all microbatches keep their first dimension whole.

    Args:
        is_searched: as for `user_pins`.
    """
    graph, first = stage.traced.graph, len(stage.arguments)
    stacked = tuple(first + k for k, message in enumerate(stage.receives) if message.kind == "loop")
    return replace(user_pins(asked.among(graph.argument_paths), graph, [], is_searched), stacked=stacked)


def _named_alone(kept: Iterable[Annotation]) -> list[str]:
    """The axes that metadata names that could have rules, on no mesh; the usual ones are axes of a mesh for sure."""
    return sorted({name for each in kept if each.mesh is None for name in {*each.unruled} & {*each.axes}} - {"data", "model"})


def with_batch(pins: UserPins, batch: Mapping[int, int]) -> UserPins:
    """The pins with the batch that was found, by value numbers.

    Raises:
        ShardingError: there is none.
    """
    if not batch:
        raise ShardingError(
            f"batch_axes split the batch, arguments that hold no state, and {pins.graph.name!r} has none that can be split. Name the "
            "batch, as in batch='x', or pin arguments by path: pins={'batch*': P('data')}."
        )
    return replace(pins, batch={at: batch[value] for at, value in enumerate(pins.graph.arguments) if value in batch})


def _check_logical(kept: Annotation, mesh: Mesh, path: str) -> None:
    """Raises `ShardingError` for a logical axis of NNX that has no rule and is no axis of the mesh."""
    for name in {*kept.unruled} & {*kept.axes} - {*mesh.all_names}:
        raise ShardingError(
            f"names in metadata are mesh axes or have a rule, and {name!r} of {path} ({kept.source}) is neither: the mesh has {mesh}. "
            f"Add a rule, ({name!r}, None) or one with a mesh axis in place of None, or give a mesh that has this axis."
        )


def _fitting(blocks: int, dim: int, mesh: Mesh, pin: Pin) -> set[int]:
    """Mesh axes that may together split a dimension of so many blocks: those that are pinned to it first, and then large ones."""
    found, parts = set[int](), 1
    for axis in sorted(range(len(mesh.axes)), key=lambda axis: (pin[axis] != {dim}, -mesh.sizes[axis])):
        if blocks % (parts * mesh.sizes[axis]) == 0:
            parts *= mesh.sizes[axis]
            found.add(axis)
    return found


def _pin(spec: tuple, mesh: Mesh, shape: tuple[int, ...], what: str) -> Pin:
    open_dims = frozenset(dim for dim, entry in enumerate(spec) if entry is _OPEN)
    layout = spec_to_layout([None if dim in open_dims else entry for dim, entry in enumerate(spec)], mesh, len(shape), what)
    check_divides(layout, shape, mesh, what)
    return tuple(frozenset((dim,)) if dim >= 0 or not open_dims else open_dims | {-1} for dim in layout)


def written(graph: Graph, specs: Sequence[PartitionSpec], mesh: Mesh) -> dict[int, Spec]:
    """By argument position the spec as the user wrote it, where it names axes of size 1, which layouts do not have."""
    idle, found = {name for name, size in mesh.shape if size == 1}, {}
    for position, spec in enumerate(specs):
        if not idle.isdisjoint(axes_of(spec)):
            entries = [tuple(axes_of((entry,))) for entry in spec]
            whole = [None if not axes else axes[0] if len(axes) == 1 else axes for axes in entries]
            found[position] = (*whole, *[None] * (graph.values[graph.arguments[position]].rank - len(whole)))
    return found


def _same(found: Annotation, layout: Layout, mesh: Mesh, rank: int) -> bool:
    """Whether an annotation is this layout on the mesh; axes of size 1 split nothing."""
    ours = dict(mesh.shape)
    theirs = ours if found.mesh is None else dict(found.mesh)
    here = [[*axes_of((entry,))] for entry in layout_to_spec(layout, mesh.names, rank)]
    there = [[axis for axis in axes_of((entry,)) if theirs.get(axis) != 1] for entry in found.spec or ()]
    return there + [[]] * (rank - len(there)) == here and all(ours[axis] == theirs[axis] for axes in here for axis in axes)
