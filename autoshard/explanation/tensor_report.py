"""The report on a tensor's layout, in a step or in a stage of a pipeline."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass

from autoshard.explanation import Judged
from autoshard.explanation.named import found_by
from autoshard.explanation.program import Searched
from autoshard.explanation.tensor import TensorExplanation
from autoshard.explanation.tensor import explain_tensor as tensor_explanation
from autoshard.explanation.tensor_text import tensor_parts
from autoshard.ir import Spec
from autoshard.render import Paragraph, Report
from autoshard.strategy.record import plain


@dataclass(frozen=True, slots=True)
class TensorReport(Report):
    """Why a tensor is sharded as it is; ``data`` is the same as numbers and names."""

    data: TensorExplanation

    def to_json(self) -> str:
        """The explanation as JSON."""
        return json.dumps(plain(self.data), indent=1, allow_nan=False)


def explain_tensor(judged: Judged, name: str, searched: Searched, spec: Spec | None = None, details: bool = False) -> TensorReport:
    """The report on a tensor's layout.

    Args:
        judged: the program.
        name: of the tensor.
        searched: the strategy's problem, and the hints of its search.
        spec: the layout in question.
        details: whether all layouts are searched.
    """
    assert searched.problem is not None, "made for the first question"
    data = tensor_explanation(judged, name, searched.problem, searched.hints, spec, details)
    return TensorReport(f"{data.group.name} on mesh {judged.record.mesh}", tuple(tensor_parts(data)), data)


def explain_tensor_of_stages(
    stages: Mapping[str, tuple[Judged, Searched]], name: str, spec: Spec | None = None, details: bool = False
) -> TensorReport:
    """The report on a tensor's layout in the first stage of a pipeline that has it.

    Args:
        stages: the program of each stage, and its problem, by what the stage is called.
        name, spec, details: as for `explain_tensor`.

    Raises:
        StrategyError: no stage has it, or one has several of that name.
    """
    having = [stage for stage, (judged, _) in stages.items() if found_by(judged, name)]
    first = having[0] if having else next(iter(stages))
    judged, searched = stages[first]
    found = explain_tensor(judged, name, searched, spec, details)
    others = f" Others that have tensors of that name, too: {', '.join(having[1:])}." if having[1:] else ""
    said = f"In {first}, whose seconds are of all microbatches, without those in which it waits for other stages.{others}"
    return TensorReport(f"{found.title}, {first}", (found.parts[0], Paragraph(said), *found.parts[1:]), found.data)
