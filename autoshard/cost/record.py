"""What a strategy costs, as the judge says it."""

from __future__ import annotations

from dataclasses import dataclass

from autoshard.ir import Collective


@dataclass(frozen=True, slots=True)
class Cost:
    """The predicted cost of one step on one device; devices are alike.

    Attributes:
        objective_seconds: the additive function that searchers minimise: all compute and all communication, nothing overlapped, and every
            collective as it is planned.
        makespan_seconds: the predicted step time, overlap included.
        compute_seconds: time computing.
        communication_seconds: time of all collectives.
        exposed_communication_seconds: the part of it that nothing hides.
        peak_bytes: memory at the fullest moment.
        flops: floating point operations of matrix products and convolutions, which is what model flops utilisation counts.
        collectives: what is sent, in program order.
    """

    objective_seconds: float
    makespan_seconds: float
    compute_seconds: float
    communication_seconds: float
    exposed_communication_seconds: float
    peak_bytes: float
    flops: float
    collectives: tuple[Collective, ...] = ()
