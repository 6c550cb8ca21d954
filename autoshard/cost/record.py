"""The predicted cost of a strategy, as a record."""

from __future__ import annotations

from dataclasses import dataclass

from autoshard.ir import Collective


@dataclass(frozen=True, slots=True)
class Recomputation:
    """The rematerialisation by which a compiler makes a program fit its device.

    Attributes:
        kernels: how many kernels run twice in a step.
        peak_bytes: peak memory with it.
        seconds: the time that it adds to the step.
    """

    kernels: int
    peak_bytes: float
    seconds: float


@dataclass(frozen=True, slots=True)
class Cost:
    """The predicted cost of one step on one device; devices are alike.

    Attributes:
        objective_seconds: the additive function that searchers minimise: all compute and all planned collectives, without overlap.
        makespan_seconds: the predicted step time, overlap included.
        compute_seconds: time of all compute.
        communication_seconds: time of all collectives.
        exposed_communication_seconds: the part of it that no compute hides.
        peak_bytes: peak memory of the schedule.
        flops: floating point operations of matrix products, convolutions and Fourier transforms, as in model flops utilisation; those in
            kernels included.
        collectives: in program order.
        recomputation: the compiler's rematerialisation; None where the program fits without, where it was not predicted, and where it may
            not suffice. No other figure counts it.
        kernel_flops: those in users' kernels, which compilers do not count.
        transform_flops: those of Fourier transforms, 5 n log2 n for n points, half of it for real numbers.
        low_share, high_share: between these multiples of the predicted time eight in ten published steps on such devices took; 0.0: none
            is published.
        late_share: by how many times the hidden communication a step may take longer than ``high_share`` says.
        skipped_flops: what compilers count of grouped products beyond ``flops``: rows times other groups' matrices, which kernels skip.
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
    kernel_flops: float = 0.0
    transform_flops: float = 0.0
    skipped_flops: float = 0.0
    low_share: float = 0.0
    high_share: float = 0.0
    late_share: float = 0.0

    @property
    def interval_seconds(self) -> tuple[float, float] | None:
        """The step times between which a measured one is expected in eight of ten runs; None for devices of which no runs are published."""
        if not self.high_share:
            return None
        late = self.late_share * max(self.communication_seconds - self.exposed_communication_seconds, 0.0)
        return self.makespan_seconds * self.low_share, self.makespan_seconds * self.high_share + late

    @property
    def compiled_flops(self) -> float:
        """Floating point operations of products as compilers count them: without kernels and Fourier transforms, with what is skipped."""
        return self.flops - self.kernel_flops - self.transform_flops + self.skipped_flops

    @property
    def compiled_peak_bytes(self) -> float:
        """Peak memory with the compiler's rematerialisation."""
        return self.peak_bytes if self.recomputation is None else self.recomputation.peak_bytes
