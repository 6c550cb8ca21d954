"""The finalists of a search while a compiler, or devices, decide among them."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax

from autoshard.cluster import Cluster
from autoshard.compilers.corrections import NO_CORRECTIONS, Corrections
from autoshard.errors import OutOfTime
from autoshard.plan.agreement import everyones
from autoshard.plan.corrections import Difference
from autoshard.plan.plan import Plan
from autoshard.progress import Progress
from autoshard.run.padded import PaddedArguments
from autoshard.run.stage_programs import LoweredPart, lowered_parts
from autoshard.run.step import Step
from autoshard.strategy import Finalist

MOST_WORDS = 300  # characters of what a compiler says that go into a note


@dataclass(slots=True)
class Board:
    """What is known of each finalist so far, and what limits there are.

    Attributes:
        strategies: the finalists, in the order of their predicted step times.
        finders: per finalist the name of the searcher whose answer it is.
        fn, args: their program.
        memory_limit_bytes: the user's limit of a device's memory; None where it is the device's own.
        until: on `time.perf_counter`'s clock, when the time is over; None: never.
        together: whether all processes decide on the finalists together, and so end together.
        progress: called with what is being done and the fraction that is done.
        found: per finalist what there is to record of it; one that was accepted is "slower" until it is taken.
        ended: whether the time, or Ctrl-C, ended the decision.
        compilations: how many were begun.
        corrections: what was learned of kernels from those that were compiled to the end.
        differences: of each of these, by its number, the compute of its operations beside the predicted.
    """

    strategies: Sequence[Plan]
    finders: Sequence[str]
    fn: Callable[..., Any]
    args: tuple[Any, ...]
    memory_limit_bytes: float | None
    until: float | None
    progress: Progress
    together: bool = False
    found: list[Finalist] = field(init=False)
    ended: bool = field(default=False, init=False)
    compilations: int = field(default=0, init=False)
    corrections: Corrections = field(default=NO_CORRECTIONS, init=False)
    differences: dict[int, list[Difference]] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        self.found = [
            Finalist(finder, replace(strategy.record.mesh, placement=None), strategy.cost.makespan_seconds, "not reached")
            for finder, strategy in zip(self.finders, self.strategies, strict=True)
        ]

    @property
    def cluster(self) -> Cluster:
        return Cluster.from_dict(self.strategies[0].record.cluster)

    @property
    def limit(self) -> float:
        """Bytes that a device may hold, as compiled."""
        return self.memory_limit_bytes or self.cluster.memory_limit_bytes

    @property
    def accepted(self) -> list[int]:
        """The numbers of those that may be taken, in the order of their predicted step times."""
        return [number for number, each in enumerate(self.found) if each.outcome == "slower"]

    def keep(self, numbers: Sequence[int]) -> None:
        """Leaves out all finalists but some."""
        self.strategies, self.finders = [self.strategies[k] for k in numbers], [self.finders[k] for k in numbers]
        self.found = [self.found[k] for k in numbers]

    def note(self, number: int, **changes: Any) -> None:
        """Records something of a finalist."""
        self.found[number] = replace(self.found[number], **changes)

    def failed(self, number: int, error: Exception) -> None:
        """Records that it could not be lowered, compiled or run."""
        self.note(number, outcome="failed", reason=in_words(error))

    def exceeds(self, peak_bytes: float | None) -> bool:
        """Whether so large a peak is beyond the user's limit."""
        return None not in (peak_bytes, self.memory_limit_bytes) and peak_bytes > self.memory_limit_bytes  # pyright: ignore

    def lowered(self, number: int, platform: str, mesh: jax.sharding.Mesh | None = None) -> jax.stages.Lowered:
        """The finalist's program as `Strategy.apply` lowers it."""
        record = self.strategies[number].record
        return Step(self.fn, record, mesh).lower(*PaddedArguments(record).as_stored(self.args), platform=platform)

    def programs(self, number: int, platform: str) -> list[LoweredPart]:
        """The programs that a finalist consists of, lowered for a platform."""
        strategy = self.strategies[number]
        stored = PaddedArguments(strategy.record).as_stored(self.args)
        return list(lowered_parts(self.fn, stored, strategy.record, strategy._traced, platform))

    def of_parts(self, number: int, seconds: Sequence[float]) -> float:
        """The step time of a finalist, of what its one program takes, or each stage of a pipeline: as the busiest part of the devices'."""
        record = self.strategies[number].record
        if (pipeline := record.pipeline) is None:
            [found] = seconds
            return found
        stages = [(own.part(number), stage) for own in pipeline.passes for number, stage in enumerate(own.stages)]
        predicted = [stage.record.cost.makespan_seconds for _, stage in stages]
        busiest, was = (
            max(sum(x for x, (at, _) in zip(each, stages, strict=True) if at == part) for part in range(pipeline.n_parts))
            for each in (seconds, predicted)
        )
        return record.cost.makespan_seconds * busiest / was

    def tell(self, doing: str, number: int, done: float) -> None:
        """Shows what is being done with a finalist, and how many are done.

        Raises:
            OutOfTime: the time is over.
        """
        self.check_time()
        each, n = self.found[number], len(self.found)
        self.progress(f"{doing}, {number + 1} of {n}: {each.found_by} on mesh {each.mesh}", done / n)

    def check_time(self) -> None:
        """Raises `OutOfTime` where the time is over, of any process of those that decide together."""
        is_over = self.until is not None and time.perf_counter() > self.until
        if any(everyones(is_over)) if self.together else is_over:
            raise OutOfTime("the time that confirming was given is over.")


def needed_bytes(found: Finalist) -> float | None:
    """The bytes that a finalist needs as compiled, fragmentation included where the compiler says it; None: unknown."""
    return max((known for known in (found.needed_bytes, found.peak_bytes) if known is not None), default=None)


def in_words(error: Exception) -> str:
    """The beginning of an error's message as one line that a file and a terminal can show."""
    text = " ".join(str(error).split()) or type(error).__name__
    text = "".join(character for character in text if character.isprintable())
    return text if len(text) <= MOST_WORDS else f"{text[:MOST_WORDS]}..."
