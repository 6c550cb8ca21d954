"""What a verification found: a strategy's predictions beside what partitioners and compilers made of its program."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

from autoshard.ask.reduced_numbers import Numbers, numbers_parts
from autoshard.ask.verified_operations import OperationDifference, operation_tables
from autoshard.ir import Mesh
from autoshard.render import (
    Paragraph,
    Part,
    Report,
    Reported,
    Table,
    format_bytes,
    format_count,
    format_flops,
    format_percent,
    format_seconds,
)
from autoshard.verify import (
    TARGETS,
    Row,
)

# How near a compiled program is to be: compilers pad what they exchange, and fold some arithmetic away.
BYTES_WITHIN = 0.03
FLOPS_WITHIN = 0.01
PEAK_WITHIN = 0.15  # beyond it the report says so; what decides is whether it fits


@dataclass(frozen=True, slots=True)
class Verification(Reported):
    """Predicted against actual.

    Attributes:
        program, mesh, target: the function's name, mesh axes with their sizes, and the compiler: shardy, cpu, tpu or gpu.
        rows: collectives by kind and mesh axes, counts and bytes of one step on one device.
        n_ops: operations of the program.
        n_constraints: sharding constraints that the lowered program carries.
        predicted_flops: of matrix products and convolutions in one step on one device, as the cost model says.
        predicted_compute_seconds: computing alone, as the cost model says.
        predicted_peak_bytes: memory of a device at the fullest moment, as the cost model says; of ``"tpu"`` with what is computed again.
        actual_flops, rematerialised_flops: as compiled, and what of it XLA itself computes again to save memory; None where it is not
            compiled.
        actual_compute_seconds: of the TPU compiler's schedule, its estimated cycles at the clock, and products at the share of the peak
            that they are predicted at (`Device.matrix_efficiency`); None where not asked for.
        actual_peak_bytes: as the compiler says; None where nothing was compiled, or it was refused.
        needed_bytes: what the compiler's allocator takes, fragmentation included; None where that is not known.
        available_bytes: what a device offers; None where the compiler does not say.
        fits: whether the program fits the device's memory, as the compiler says or by what it needs; None where that is not known.
        predicted_for: the strategy's cluster, where the target compiles for devices of another kind.
        operations: the operations whose compute, or memory at the peak, differs most, where the program is compiled ahead of time.
        numbers: of its kernels, next to those of the program as it is written.
    """

    program: str
    mesh: Mesh
    target: str
    rows: tuple[Row, ...]
    n_ops: int
    n_constraints: int
    predicted_flops: float
    predicted_compute_seconds: float
    predicted_peak_bytes: float
    actual_flops: float | None = None
    rematerialised_flops: float | None = None
    actual_compute_seconds: float | None = None
    actual_peak_bytes: float | None = None
    needed_bytes: float | None = None
    available_bytes: float | None = None
    fits: bool | None = None
    predicted_for: str = ""
    operations: tuple[OperationDifference, ...] = ()
    numbers: tuple[Numbers, ...] = ()

    @property
    def exact(self) -> bool:
        """Whether the actual collectives are the predicted ones in kind, mesh axes, count and bytes."""
        return self.fits is not False and all(row.agrees for row in self.rows)

    @property
    def near(self) -> bool:
        """Whether the program fits and is what was predicted: collective bytes within 3 %, flops within 1 %."""
        return self.fits is not False and abs(self.bytes_ratio - 1) <= BYTES_WITHIN and abs(self.flops_ratio - 1) <= FLOPS_WITHIN

    @property
    def as_predicted(self) -> bool:
        """Whether the collectives are the predicted ones, it fits and kernels' numbers agree; for TPUs and GPUs, `near` is enough, since
        their compilers pad."""
        return (self.exact or (self.near and TARGETS[self.target].pads)) and all(each.agree for each in self.numbers)

    @property
    def flops_ratio(self) -> float:
        """Actual over predicted flops, without what XLA computes again; 1.0 where nothing was compiled, or there are none."""
        if self.actual_flops is None:
            return 1.0
        actual = self.actual_flops - (self.rematerialised_flops or 0.0)
        return actual / self.predicted_flops if self.predicted_flops else 1.0 if not actual else float("inf")

    @property
    def bytes_ratio(self) -> float:
        """Actual over predicted bytes of all collectives; 1.0 where there are none on either side."""
        predicted, actual = (sum(getattr(row, f"{side}_bytes") for row in self.rows) for side in ("predicted", "actual"))
        return actual / predicted if predicted else 1.0 if not actual else float("inf")

    def report(self) -> Report:
        """The comparison as a table, for terminals and notebooks."""
        title = f"{self.program} on mesh {self.mesh}, held against {self.target}"
        manual = f"{format_count(self.n_ops)} operations in one manual computation: nothing is left to the partitioner."
        constrained = f"{format_count(self.n_constraints)} sharding constraints on {format_count(self.n_ops)} operations."
        constraints = Paragraph(constrained if self.n_constraints else manual)
        refusal = [Paragraph(self._refusal())] if self.fits is False else []
        if refusal and self.actual_peak_bytes is None:
            return Report(title, (*refusal, constraints))
        parts: list[Part] = [*refusal, Paragraph(f"The target is {TARGETS[self.target].description}."), Paragraph(self._verdict())]
        if rows := (*map(self._collective_row, self.rows), *self._measure_rows()):
            columns = ("", "mesh axes", ">predicted", ">actual", ">predicted bytes", ">actual bytes", "")
            notes = ("All of it is of one step on one device.", "An all_reduce of which only slices are read is a reduce_scatter.")
            parts.append(Table(columns, rows, notes))
        parts += operation_tables(self.operations)
        if TARGETS[self.target].differs and not self.near:
            parts.append(Paragraph(TARGETS[self.target].differs))
        if self.predicted_for and self._peak_is_far:
            parts.append(Paragraph(f"The peak was predicted for {self.predicted_for}, and compilers of other devices store other arrays."))
        if self.rematerialised_flops:
            parts.append(Paragraph(f"XLA computes {format_flops(self.rematerialised_flops)} of it once more to save memory."))
        if self.needed_bytes is not None and self.fits:
            limit = self.available_bytes
            offered = "the device's memory" if limit is None else f"the {format_bytes(limit)} a program may use"
            parts.append(Paragraph(f"It fits: the compiler takes {format_bytes(self.needed_bytes)} of {offered}, holes included."))
        return Report(title, (*parts, constraints, *numbers_parts(self.numbers)))

    def _verdict(self) -> str:
        """Whether the target does what was predicted, as the command's exit code says it."""
        share = f"{format_percent(self.bytes_ratio)} of the predicted bytes" if math.isfinite(self.bytes_ratio) else "none were predicted"
        sent = "the predicted ones, exactly" if all(row.agrees for row in self.rows) else share
        said = f"collectives {sent}" if self.rows else "no collectives"
        if self.actual_flops is not None:
            said += f", {format_percent(self.flops_ratio)} of the predicted FLOPs" if self.predicted_flops else ""
        if self.actual_peak_bytes is not None:
            said += f", {format_percent(self.actual_peak_bytes / self.predicted_peak_bytes)} of the predicted peak memory"
        verdict = "Collectives as predicted, memory not" if self._peak_is_far else "As predicted"
        said += "" if all(each.agree for each in self.numbers) else "; numbers of kernels differ from those of the program as it is written"
        return f"{verdict if self.as_predicted else 'Not as predicted'}: {said}."

    @property
    def _peak_is_far(self) -> bool:
        """Whether peak memory is far from the predicted one; it does not decide where the program fits."""
        return self.actual_peak_bytes is not None and abs(self.predicted_peak_bytes / self.actual_peak_bytes - 1) > PEAK_WITHIN

    def _collective_row(self, row: Row) -> tuple[str, ...]:
        counts = format_count(row.predicted_count), format_count(row.actual_count)
        sizes = format_bytes(row.predicted_bytes), format_bytes(row.actual_bytes)
        pads = TARGETS[self.target].pads and counts[0] == counts[1]
        agrees = row.agrees or (pads and abs(row.actual_bytes - row.predicted_bytes) <= BYTES_WITHIN * row.predicted_bytes)
        differs = "" if agrees else "differs"
        if differs and sizes[0] == sizes[1]:
            differs += f" by {format_bytes(abs(row.actual_bytes - row.predicted_bytes))}"
        return row.kind, ", ".join(row.mesh_axes), *counts, *sizes, differs

    def _measure_rows(self) -> list[tuple[str, ...]]:
        """The table's rows below the collectives, of what the target tells."""
        rows: list[tuple[str, ...]] = []
        if self.actual_flops is not None:
            differs = "" if abs(self.flops_ratio - 1) <= FLOPS_WITHIN else "differs"
            rows.append(("FLOPs of products", "", format_flops(self.predicted_flops), format_flops(self.actual_flops), "", "", differs))
        if self.actual_compute_seconds is not None:
            seconds = (format_seconds(self.predicted_compute_seconds), format_seconds(self.actual_compute_seconds))
            rows.append(("computing", "", *seconds, "", "", ""))
        if self.actual_peak_bytes is not None:
            sizes = (format_bytes(self.predicted_peak_bytes), format_bytes(self.actual_peak_bytes))
            rows.append(("peak memory", "", "", "", *sizes, "differs" if self._peak_is_far else ""))
        return rows

    def _refusal(self) -> str:
        needed = "more" if self.needed_bytes is None else format_bytes(self.needed_bytes)
        available = "there is" if self.available_bytes is None else f"the {format_bytes(self.available_bytes)} a program may use"
        predicted = format_bytes(self.predicted_peak_bytes)
        return f"Does not fit: the compiler needs {needed} of memory, of {available}; {predicted} were predicted at the peak."

    def to_json(self) -> dict[str, Any]:
        """All of it as plain JSON values."""
        ratios = {"bytes_ratio": self.bytes_ratio, "flops_ratio": self.flops_ratio}
        verdict = {"exact": self.exact, "near": self.near, "as_predicted": self.as_predicted}
        return {**asdict(self), "mesh": dict(self.mesh.shape), **verdict, **ratios}
