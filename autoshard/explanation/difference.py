"""Two strategies set against each other as data: what differs, and what it costs."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, replace

from autoshard.cluster import Cluster
from autoshard.explanation.breakdown import layers
from autoshard.explanation.build import ROUNDING, explanation_of, rounded
from autoshard.explanation.data import Place
from autoshard.explanation.groups import common_ending, joined, shard_bytes
from autoshard.explanation.program import Judged
from autoshard.ir import Spec
from autoshard.ir.naming import components, starred
from autoshard.strategy import Record


@dataclass(frozen=True, slots=True)
class Figures:
    """The figures of one side.

    Attributes:
        cluster, mesh_words, n_devices: where it runs.
        step_seconds, compute_seconds, exposed_seconds, hidden_seconds: predicted, of a step; see `StepTime`.
        peak_bytes, flops: of one device.
        sent_bytes, n_collectives: of all collectives of one device in a step.
        microbatches: in how many parts of its batch a step computes its gradients.
        recomputes: whether its backward pass was rewritten to compute values of the forward pass again.
    """

    cluster: str
    mesh_words: str
    n_devices: int
    step_seconds: float
    compute_seconds: float
    exposed_seconds: float
    hidden_seconds: float
    peak_bytes: float
    flops: float
    sent_bytes: float
    n_collectives: int
    microbatches: int
    recomputes: bool


@dataclass(frozen=True, slots=True)
class TensorChange:
    """Arguments of one pattern of paths whose specs differ.

    Attributes:
        name, n, alike: the pattern, how many are named so, and how many more mirror them, as an optimizer's moments do.
        before, after: the specs.
        before_bytes, after_bytes: of all of them, on a device.
    """

    name: str
    n: int
    alike: int
    before: Spec
    after: Spec
    before_bytes: float
    after_bytes: float


@dataclass(frozen=True, slots=True)
class Change:
    """A figure of both sides by name: seconds of a layer, or of collectives of one kind with their bytes and number."""

    name: str
    before_seconds: float
    after_seconds: float
    before_bytes: float = 0.0
    after_bytes: float = 0.0
    before_count: int = 0
    after_count: int = 0


@dataclass(frozen=True, slots=True)
class Difference:
    """Two strategies, and where they differ.

    Attributes:
        names: of the two.
        same_program: whether both are of one program; in microbatches or with recomputation, of one whose arguments are alike.
        same_arguments: whether the programs' arguments have equal paths; those of equal paths are compared.
        n_common: how many arguments have the same path in both.
        before, after: the figures.
        tensors: arguments whose specs differ, the most bytes first.
        only: paths of arguments that one of the two alone has, at most a few.
        collectives: by kind; layers: by layer, where both programs are at hand, or kept in the files; the largest differences first.
    """

    names: tuple[str, str]
    same_program: bool
    same_arguments: bool
    n_common: int
    before: Figures
    after: Figures
    tensors: tuple[TensorChange, ...]
    only: tuple[str, ...]
    collectives: tuple[Change, ...]
    layers: tuple[Change, ...]


def difference_of(
    before: Record, after: Record, names: tuple[str, str], judged: tuple[Judged | None, Judged | None] = (None, None)
) -> Difference:
    """The difference of two strategies; layers too where both programs are at hand, or the files keep what reports show."""
    ours, theirs = ({tensor.path for tensor in record.arguments} for record in (before, after))
    return Difference(
        names=names,
        same_program=same_program(before, after),
        same_arguments=ours == theirs,
        n_common=len(ours & theirs),
        before=_figures(before),
        after=_figures(after),
        tensors=_tensors(before, after),
        only=_only(before, after),
        collectives=_collectives(before, after),
        layers=_layers(before, after, *judged),
    )


def same_program(before: Record, after: Record) -> bool:
    """Whether two records are of one program; of programs that are rewritten otherwise, whether they look so."""
    one, two = before.program, after.program
    if one.fingerprint == two.fingerprint:
        return True
    piped = (before.pipeline is None) != (after.pipeline is None)
    if one.name != two.name or (one.rewrites == two.rewrites and not piped):
        return False
    padded = [[each for each in program.rewrites if each.kind == "padding"] for program in (one, two)]
    of_shape = tuple if padded[0] == padded[1] else len  # padding lengthens dimensions
    types = ([(tensor.path, of_shape(tensor.shape), tensor.dtype) for tensor in record.arguments] for record in (before, after))
    return next(types) == next(types)


def _figures(record: Record) -> Figures:
    cost = record.cost
    return Figures(
        cluster=Cluster.from_dict(record.cluster).name,
        mesh_words=str(record.mesh),
        n_devices=record.mesh.size,
        step_seconds=cost.makespan_seconds,
        compute_seconds=cost.compute_seconds,
        exposed_seconds=cost.exposed_communication_seconds,
        hidden_seconds=rounded(cost.communication_seconds - cost.exposed_communication_seconds, cost.communication_seconds),
        peak_bytes=cost.peak_bytes,
        flops=cost.flops,
        sent_bytes=sum(each.bytes * each.count for each in cost.collectives),
        n_collectives=sum(each.count for each in cost.collectives),
        microbatches=record.program.microbatches,
        recomputes=record.program.remat is not None,
    )


def _tensors(before: Record, after: Record) -> tuple[TensorChange, ...]:
    there = {tensor.path: tensor for tensor in after.arguments}
    groups: dict[tuple, list[str]] = defaultdict(list)
    total = Counter(starred(tensor.path) for tensor in before.arguments)
    for tensor in before.arguments:
        other = there.get(tensor.path)
        if other is not None and _told(tensor.spec) != _told(other.spec):
            groups[starred(tensor.path), tensor.shape, other.shape, tensor.dtype, tensor.spec, other.spec].append(tensor.path)
    found: list[TensorChange] = []
    for (path, shape, other_shape, dtype, spec, other_spec), paths in sorted(groups.items(), key=lambda item: len(components(item[0][0]))):
        n, name = len(paths), joined(paths, len(paths) == total[path])
        one, two = shard_bytes(shape, dtype, spec, before.mesh), shard_bytes(other_shape, dtype, other_spec, after.mesh)
        change = TensorChange(name, n, 0, spec, other_spec, n * one, n * two)
        like = next((at for at, each in enumerate(found) if _mirrors(change, each)), None)
        if like is None:
            found.append(change)
        else:
            each = found[like]
            more = {"before_bytes": each.before_bytes + change.before_bytes, "after_bytes": each.after_bytes + change.after_bytes}
            found[like] = replace(each, alike=each.alike + n, **more)
    return tuple(sorted(found, key=lambda change: (-max(change.before_bytes, change.after_bytes), change.name)))


def _mirrors(change: TensorChange, other: TensorChange) -> bool:
    """Whether a change is that of, say, an optimizer's moments of the parameters that the other one is of."""
    deeper = len(components(change.name)) > len(components(other.name)) and common_ending(change.name, other.name)
    same = (change.before, change.after) == (other.before, other.after)
    return deeper and same and change.before_bytes * (other.n + other.alike) == other.before_bytes * change.n


def _told(spec: Spec) -> Spec:
    """The spec without what shards nothing at its end."""
    n = max((number for number, entry in enumerate(spec, 1) if entry is not None), default=0)
    return spec[:n]


def _only(before: Record, after: Record) -> tuple[str, ...]:
    paths = {tensor.path for tensor in before.arguments} ^ {tensor.path for tensor in after.arguments}
    return tuple(sorted(paths)[:5])


def _collectives(before: Record, after: Record) -> tuple[Change, ...]:
    def by_kind(record: Record) -> dict[str, tuple[float, float, int]]:
        found: dict[str, tuple[float, float, int]] = {}
        for each in record.cost.collectives:
            seconds, nbytes, count = found.get(each.kind, (0.0, 0.0, 0))
            found[each.kind] = seconds + each.count * each.seconds, nbytes + each.count * each.bytes, count + each.count
        return found

    one, two, none = by_kind(before), by_kind(after), (0.0, 0.0, 0)
    pairs = [(kind, one.get(kind, none), two.get(kind, none)) for kind in {**one, **two}]
    return _ranked(Change(kind, a[0], b[0], a[1], b[1], a[2], b[2]) for kind, a, b in pairs)


def _layers(before: Record, after: Record, one: Judged | None, two: Judged | None) -> tuple[Change, ...]:
    first, second = ({place.name: place.seconds for place in _places(*each)} for each in ((before, one), (after, two)))
    return _ranked(Change(name, first.get(name, 0.0), second.get(name, 0.0)) for name in {**first, **second}) if first and second else ()


def _places(record: Record, judged: Judged | None) -> tuple[Place, ...]:
    """The seconds of layers, by the program or by what the file keeps of it; () where neither is at hand."""
    if judged is not None:
        return layers(record, judged)
    return explanation_of(record).layers if record.report else ()


def _ranked(changes: Iterable[Change]) -> tuple[Change, ...]:
    """The changes, the largest first; seconds that differ by rounding are equal."""

    def equal(change: Change) -> bool:
        return math.isclose(change.before_seconds, change.after_seconds, rel_tol=ROUNDING)

    snapped = (replace(change, after_seconds=change.before_seconds) if equal(change) else change for change in changes)
    return tuple(sorted(snapped, key=lambda change: (-abs(change.after_seconds - change.before_seconds), change.name)))
