"""The report on two strategies: whether they are of one program, what differs, and what it costs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from autoshard.cluster import Cluster
from autoshard.explanation.difference import Difference, difference_of
from autoshard.explanation.difference_text import difference_parts
from autoshard.explanation.program import Judged
from autoshard.ir.layout import STAGE_AXIS
from autoshard.ir.words import array_type
from autoshard.mesh_search.equality import Figures, are_equal, complexity
from autoshard.render import Paragraph, Report, format_percent
from autoshard.strategy import Record
from autoshard.strategy.record import plain


@dataclass(frozen=True, slots=True)
class Comparison(Report):
    """The report on two strategies; ``data`` is the same as numbers and names."""

    data: Difference

    def to_dict(self) -> dict[str, Any]:
        """The difference as plain JSON values."""
        return plain(self.data)


def comparison(
    before: Record, after: Record, names: tuple[str, str], judged: tuple[Judged | None, Judged | None] = (None, None)
) -> Comparison:
    """The report on two strategies; by layer too where their programs are at hand, or their files keep what reports show."""
    found = difference_of(before, after, names, judged)
    told = (_equal if found.same_program else _programs)(before, after, names)
    parts = [Paragraph(told)] if told else []
    return Comparison(f"{names[0]} and {names[1]}", (*parts, *difference_parts(found)), found)


def figures_of_record(record: Record) -> Figures:
    """The cost and the complexity of a plan with stages or without."""
    pipeline, stages = record.pipeline, dict(record.mesh.axes).get(STAGE_AXIS, 1)
    stages = stages if pipeline is None else len(pipeline.stages)
    return record.cost, complexity(record.mesh, record.cost, stages, record.program.microbatches)


def _equal(before: Record, after: Record, names: tuple[str, str]) -> str:
    """In words, that predictions do not tell which of two plans on one kind of devices is faster, and which is simpler; else empty."""
    one, other = (Cluster.from_dict(record.cluster) for record in (before, after))
    error = one.device.pair_error
    alike = (one.device.name, one.n_devices) == (other.device.name, other.n_devices)
    if not (alike and before.cost.makespan_seconds != after.cost.makespan_seconds and are_equal(before.cost, after.cost, error)):
        return ""
    (_, first), (_, second) = figures_of_record(before), figures_of_record(after)
    simpler = "neither is simpler" if first == second else f"{names[first > second]} is the simpler one"
    off = f"of half of the pairs of published runs on {one.device.name} the predicted ratio is off by more than {format_percent(error)}"
    return f"Equal within the model's error: {off}; {simpler}."


def _programs(before: Record, after: Record, names: tuple[str, str]) -> str:
    """In words, how two programs differ."""
    one, two = (f"{record.program.name} ({name})" for record, name in zip((before, after), names, strict=True))
    first, second = ({tensor.path: tensor for tensor in record.arguments} for record in (before, after))
    common = [(tensor, second[path]) for path, tensor in first.items() if path in second]
    other = next(((a, b) for a, b in common if (a.shape, a.dtype) != (b.shape, b.dtype)), None)
    if other is not None:
        a, b = other
        how = f"{a.path} is {array_type(a.dtype, a.shape)} in one and {array_type(b.dtype, b.shape)} in the other"
    elif len(common) < max(len(first), len(second)):
        how = f"of {len(first)} and {len(second)} arguments {len(common)} have the same path"
    else:
        how = "their arguments are alike, and what they compute is not"
    return f"Different programs: {one} and {two}; {how}. So the figures do not tell which sharding is better."
