"""Predictions for a pipeline next to its compiled programs: each task, and what runs before and after the loop, is compiled by itself."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from autoshard.ask.reduced_numbers import Numbers, numbers_parts
from autoshard.pipeline.lowered import LoweredProgram
from autoshard.render import Heading, Paragraph, Part, Report, Reported


@dataclass(frozen=True, slots=True)
class PipelineVerification(Reported):
    """Predicted against actual, stage by stage.

    Attributes:
        program, target: the pipeline's program, and the compiler.
        stages: a `Verification` for each, of all its microbatches; collectives and FLOPs are those of its programs together, and memory
            that of the program in which it is fullest, with what the stage has beside.
        numbers: of its kernels, next to those of the program as it is written.
    """

    program: str
    target: str
    stages: tuple[Any, ...]
    numbers: tuple[Numbers, ...] = ()

    @property
    def exact(self) -> bool:
        """Whether every stage's collectives are the predicted ones."""
        return all(stage.exact for stage in self.stages)

    @property
    def near(self) -> bool:
        """Whether every stage fits and is near what was predicted."""
        return all(stage.near for stage in self.stages)

    @property
    def as_predicted(self) -> bool:
        """Whether every stage is as predicted, and kernels' numbers agree."""
        return all(stage.as_predicted for stage in self.stages) and all(each.agree for each in self.numbers)

    @property
    def fits(self) -> bool | None:
        """Whether every stage fits; None where that is not known of one."""
        known = [stage.fits for stage in self.stages]
        return None if None in known else all(known)

    def report(self) -> Report:
        """The comparison as a table a stage, for terminals and notebooks."""
        parts: list[Part] = [Paragraph(f"Each of {len(self.stages)} stages by itself; all its microbatches, on one device.")]
        for number, stage in enumerate(self.stages):
            parts += [Heading(f"Stage {number}, mesh {stage.mesh}"), *stage.report().parts]
        parts += numbers_parts(self.numbers)
        return Report(f"{self.program}, a pipeline, held against {self.target}", tuple(parts))

    def to_json(self) -> dict[str, Any]:
        """All of it as plain JSON values."""
        verdict = {"exact": self.exact, "near": self.near, "as_predicted": self.as_predicted, "fits": self.fits}
        stages, numbers = [stage.to_json() for stage in self.stages], [asdict(each) for each in self.numbers]
        return {"program": self.program, "target": self.target, **verdict, "stages": stages, "numbers": numbers}


def together(found: Sequence[tuple[LoweredProgram, Any]]) -> Any:
    """The compiled figures of a stage, from those of each of its programs."""
    last = found[-1][1]

    def most(name: str) -> float | None:
        values = [(program, getattr(actual, name)) for program, actual in found]
        return None if any(value is None for _, value in values) else max(value + program.held_bytes for program, value in values)

    flops = None
    if all(actual.flops is not None for _, actual in found):
        pairs = [(program.count, actual.flops) for program, actual in found]
        flops = replace(
            pairs[0][1],
            total=sum(count * each.total for count, each in pairs),
            rematerialised=sum(count * each.rematerialised for count, each in pairs),
        )
    seconds = [(program.count, actual.compute_seconds) for program, actual in found]
    fits = [actual.fits for _, actual in found]
    sent = tuple(replace(each, count=each.count * program.count) for program, actual in found for each in actual.collectives)
    return replace(
        last,
        collectives=sent,
        flops=flops,
        compute_seconds=None if any(each is None for _, each in seconds) else sum(count * each for count, each in seconds),
        peak_bytes=most("peak_bytes"),
        needed_bytes=most("needed_bytes"),
        fits=None if None in fits else all(fits),
        text="\n".join(actual.text for _, actual in found),
    )
