"""Estimates of a step's forms from what a search of one of them found."""

from __future__ import annotations

from collections.abc import Sequence

from autoshard.cost.record import Cost
from autoshard.judge.evaluate import Judgement
from autoshard.plan.forms import Estimates, Form
from autoshard.plan.prepared import Prepared

PASSES = 3  # over gradients, that adding up those of one more microbatch takes: two reads and a write


def estimates_of(form: Form, prepared: Prepared, found: Judgement, devices: int, state: Sequence[int], least_fixed: float) -> Estimates:
    """Estimates of other forms from what was found in one.

    Args:
        devices: how many it is for.
        state: the arguments that are optimizer state.
        least_fixed: bytes of the arguments on a device, were each split over all.
    """
    peak, device, arguments = found.peak, prepared.cluster.device, prepared.traced.graph.arguments
    held = dict(zip(peak.alive, peak.held, strict=True))
    replaced = {argument for _, argument in prepared.traced.graph.aliases} - {*state}
    gradients = sum(held.get(arguments[position], 0.0) for position in replaced)
    return Estimates(
        seconds=found.cost.makespan_seconds,
        peak_bytes=peak.nbytes,
        of=form,
        fixed_bytes=sum(held.get(value, 0.0) for value in arguments),
        least_fixed_bytes=least_fixed,
        state_bytes=sum(held.get(arguments[position], 0.0) for position in state),
        adding_seconds=PASSES * gradients / device.memory_rate + _gathering_seconds(found.cost),
        devices=devices,
        host_bytes_per_second=device.host_bandwidth_bytes_per_second,
    )


def _gathering_seconds(cost: Cost) -> float:
    """The seconds of gathers, of weights for instance, which each microbatch repeats."""
    sent = [(each.bytes * each.count, each.kind == "all_gather") for each in cost.collectives]
    total = sum(n for n, _ in sent)
    return cost.communication_seconds * sum(n for n, is_gather in sent if is_gather) / total if total else 0.0
