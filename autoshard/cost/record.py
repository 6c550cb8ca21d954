"""What a strategy costs, as the judge says it."""

from __future__ import annotations

from dataclasses import dataclass

from autoshard.ir import Collective


@dataclass(frozen=True, slots=True)
class Recomputation:
    """What a compiler computes again so that a program fits.

    Attributes:
        kernels: how many of them run twice in a step.
        peak_bytes: memory at the fullest moment then.
        seconds: what that adds to the step.
    """

    kernels: int
    peak_bytes: float
    seconds: float


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
        peak_bytes: memory at the fullest moment, as scheduled.
        flops: floating point operations of matrix products and convolutions, which is what model flops utilisation counts.
        collectives: what is sent, in program order.
        recomputation: what the compiler computes again so that the program fits its device; None where it need not, where nobody asked, and
            where it may not manage. No other figure counts it.
    """

    objective_seconds: float
    makespan_seconds: float
    compute_seconds: float
    communication_seconds: float
    exposed_communication_seconds: float
    peak_bytes: float
    flops: float
    collectives: tuple[Collective, ...] = ()
    recomputation: Recomputation | None = None

    @property
    def compiled_peak_bytes(self) -> float:
        """Memory at the fullest moment once the compiler has computed again what it does."""
        return self.peak_bytes if self.recomputation is None else self.recomputation.peak_bytes
