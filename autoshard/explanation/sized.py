"""The same plan at another size, from a strategy's file alone: another batch, or more or fewer devices of the kind it is for.

The mesh axis that splits the batch grows or shrinks with the number of devices; all shardings stay. Kernels of the forward and the backward
pass, activations, and the collectives that move them grow with a device's part of the batch, but for the time that each kernel takes to
start. Parameters and their gradients stay; what the axis splits of the state, and of its update, is divided further. Collectives are
charged on the new mesh, and as much of them is hidden as there is compute to hide it. A search of the program finds other plans.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any

from autoshard.cluster import Cluster
from autoshard.cost.record import Cost
from autoshard.errors import StrategyError
from autoshard.explanation.data import Axis
from autoshard.explanation.groups import state_positions
from autoshard.explanation.stored import unpacked
from autoshard.ir import Collective, Mesh, Spec, entry_axes
from autoshard.judge.model import CostModel
from autoshard.strategy import Record, TensorRecord

NAME_IT = "Name the program, and it is searched again: autoshard what-if FILE MODULE:FUNCTION --args MODULE:NAME."
NOTE = "estimated from the file, with the same shardings: autoshard what-if FILE MODULE:FUNCTION --args MODULE:NAME searches again"


@dataclass(frozen=True, slots=True)
class _Change:
    """What changes.

    Attributes:
        record: the strategy.
        axis: the mesh axis that splits the batch, and how much of the state it splits; None: each device has the whole batch.
        growth: of this axis; batch: of the whole batch.
        before, after: the costs of collectives on the mesh, and on the other one.
    """

    record: Record
    axis: Axis | None
    growth: Fraction
    batch: Fraction
    before: CostModel
    after: CostModel

    @property
    def part(self) -> float:
        """A device's part of the batch, in multiples of what it is."""
        return float(self.batch / self.growth)

    @property
    def state(self) -> float:
        """A device's part of the state, in multiples of what it is."""
        share = 0.0 if self.axis is None else self.axis.state_share
        return 1 - share + share / float(self.growth)

    def dim(self, at: int) -> int | None:
        """The dimension of an argument that is the batch: the one that the axis splits, or the first; None: it has none."""
        tensor = self.record.arguments[at]
        if at in state_positions(self.record, None) or not tensor.shape:
            return None
        return 0 if self.axis is None else _dim(tensor.spec, self.axis.name)


def sized(record: Record, cluster: Cluster | None = None, batch: int | None = None) -> Record:
    """The record of the same plan with another batch, or on another number of the same devices; its figures are estimates.

    Args:
        record: of a file that keeps what reports show.
        cluster: None: the strategy's.
        batch: examples of the whole batch; None: as many.

    Raises:
        StrategyError: the file does not tell, or the plan has no such size; says what to do.
    """
    if not record.report or record.pipeline is not None:
        lacks = "does not keep what that rests on" if record.pipeline is None else "has a pipeline, whose stages would be others"
        raise StrategyError(f"another size is estimated from a strategy's file, and this one {lacks}. {NAME_IT}")
    explanation, page = unpacked(record.report)
    axis = next((each for each in explanation.mesh if each.splits_inputs), None)
    change = _change(record, axis, cluster or Cluster.from_dict(record.cluster), batch)
    return replace(
        record,
        cluster=change.after.cluster.to_dict(),
        mesh=change.after.mesh,
        arguments=_sized_inputs(change),
        cost=_cost(change, page),
        lower_bound_seconds=0.0,
        assumptions=(NOTE, *record.assumptions),
        confirmation=None,
        report="",
    )


def _cost(change: _Change, page: Mapping[str, Any]) -> Cost:
    """The estimated figures."""
    cost, compute = change.record.cost, _compute(change, page)
    waiting = max(0.0, cost.makespan_seconds - cost.compute_seconds - cost.exposed_communication_seconds)
    ratio = compute / (cost.compute_seconds or 1.0)
    collectives = tuple(_hidden(each, _sized_collective(change, each), ratio) for each in cost.collectives)
    sent, exposed = (sum(each.count * getattr(each, name) for each in collectives) for name in ("seconds", "exposed_seconds"))
    return replace(
        cost,
        objective_seconds=compute + sent,
        makespan_seconds=compute + exposed + waiting * ratio,
        compute_seconds=compute,
        communication_seconds=sent,
        exposed_communication_seconds=exposed,
        peak_bytes=_peak(change, page["memory"]),
        flops=cost.flops * change.part,
        collectives=collectives,
        recomputation=None,
    )


def _change(record: Record, axis: Axis | None, cluster: Cluster, batch: int | None) -> _Change:
    own = Cluster.from_dict(record.cluster)
    if cluster.device.name != own.device.name:
        raise StrategyError(f"another size is of the same devices, {own.device.name}, got {cluster.device.name}. {NAME_IT}")
    growth = Fraction(cluster.n_devices, own.n_devices)
    mesh = record.mesh if growth == 1 else _grown(record.mesh, axis, growth)
    before, after = CostModel(own, record.mesh), CostModel(cluster, mesh)
    found = _Change(record, axis, growth, Fraction(1), before, after)
    return found if batch is None else replace(found, batch=Fraction(batch, _batch(found)))


def _grown(mesh: Mesh, axis: Axis | None, growth: Fraction) -> Mesh:
    """The mesh with more or fewer devices along the axis that splits the batch."""
    if axis is None:
        raise StrategyError(f"more devices are those of the mesh axis that splits the batch, and no axis of {mesh} does. {NAME_IT}")
    size = axis.size * growth
    if size.denominator != 1:
        raise StrategyError(
            f"mesh axis {axis.name} has {axis.size} of {mesh.size} devices, which {mesh.size * growth} do not divide alike. Choose a "
            f"multiple of {mesh.size // axis.size} devices, or n{NAME_IT[1:]}"
        )
    return Mesh.of({**dict(mesh.axes), axis.name: int(size)})


def _batch(change: _Change) -> int:
    """The size of the whole batch."""
    dims = ((tensor, change.dim(at)) for at, tensor in enumerate(change.record.arguments))
    sizes = {tensor.shape[dim] for tensor, dim in dims if dim is not None}
    if len(sizes) != 1:
        raise StrategyError(f"the arguments that are no state have one batch, and here their sizes are {sorted(sizes)}. {NAME_IT}")
    return sizes.pop()


def _dim(spec: Spec, axis: str) -> int | None:
    """The dimension that a mesh axis splits."""
    return next((dim for dim, entry in enumerate(spec) if axis in entry_axes(entry)), None)


def _sized_inputs(change: _Change) -> tuple[TensorRecord, ...]:
    """The arguments, inputs with the new batch."""
    found = []
    for at, tensor in enumerate(change.record.arguments):
        dim = change.dim(at)
        if dim is not None:
            size, entry = tensor.shape[dim] * change.batch, tensor.spec[dim] if dim < len(tensor.spec) else None
            shards = math.prod(n for name, n in change.after.mesh.axes if name in entry_axes(entry))
            if size.denominator != 1 or size % shards:
                raise StrategyError(f"dim {dim} of {tensor.path} would have {float(size):g} rows on {shards} devices. Use a multiple.")
            tensor = replace(tensor, shape=(*tensor.shape[:dim], int(size), *tensor.shape[dim + 1 :]))
        found.append(tensor)
    return tuple(found)


def _compute(change: _Change, page: Mapping[str, Any]) -> float:
    """The compute of the step: its events, each larger or smaller, but for the time that its kernel takes to start."""
    start, texts = change.after.cluster.device.kernel_overhead_seconds, page["texts"]

    def seconds(loop: Mapping[str, Any], grows: bool) -> float:
        total = 0.0
        for k, (duration, kind, stage) in enumerate(zip(loop["duration"], loop["kind"], loop["pass"], strict=True)):
            if (inner := loop["loops"].get(str(k))) is not None:
                total += seconds(inner, grows)
            elif texts[kind] == "compute":
                factor = change.state if texts[stage] == "update" else change.part
                fixed = min(start, duration / 1e9)
                total += fixed + (duration / 1e9 - fixed) * (factor if grows else 1.0)
        return loop["trips"] * total

    return change.record.cost.compute_seconds * seconds(page["timeline"], True) / (seconds(page["timeline"], False) or 1.0)


def _sized_collective(change: _Change, each: Collective) -> Collective:
    """A collective with what it moves, charged on the new mesh."""
    nbytes = each.bytes * (1.0 if _is_of_state(change, each) else change.part)
    axes = tuple(change.record.mesh.names.index(name) for name in each.mesh_axes if name in change.record.mesh.names)
    then = change.before.communication.seconds(each.kind, each.bytes, axes)
    now = change.after.communication.seconds(each.kind, nbytes, axes)
    seconds = each.seconds * now / then if then else each.seconds
    return replace(each, bytes=nbytes, seconds=seconds, compiled=None)


def _is_of_state(change: _Change, each: Collective) -> bool:
    """Whether a collective moves parameters, their gradients or a scalar: as much as a state array has, or a layer's part of one."""
    if each.value is None:
        return False
    size = math.prod(each.value.shape)
    shapes = [change.record.arguments[at].shape for at in state_positions(change.record, None)]
    return size <= 1 or any(size in (math.prod(shape), math.prod(shape[1:])) for shape in shapes)


def _hidden(old: Collective, new: Collective, ratio: float) -> Collective:
    """The new collective with what no compute hides of it, where there is so many times as much compute."""
    hidden = (old.seconds - old.exposed_seconds) * ratio
    return replace(new, exposed_seconds=max(0.0, new.seconds - hidden))


def _peak(change: _Change, memory: Mapping[str, Any]) -> float:
    """The fullest moment: state by its part, what is of the state's size as it is, and all else by the part of the batch."""
    curves = dict(zip(memory["groups"], memory["bytes"], strict=True))
    peaks, before = [0.0], [0.0]
    for k, of_state in enumerate(memory["fixed"]):
        whole, held = sum(curve[k] for curve in curves.values()), curves["parameters"][k] + curves["optimizer state"][k]
        fixed = min(max(of_state, held), whole)
        peaks.append(held * change.state + (fixed - held) + (whole - fixed) * change.part)
        before.append(whole)
    return change.record.cost.peak_bytes * max(peaks) / (max(before) or 1.0)
