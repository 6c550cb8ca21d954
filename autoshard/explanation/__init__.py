"""The explanation of a strategy as data, and its text. `autoshard.explanation.data` has the shape of the data."""

from autoshard.explanation.build import explanation_of
from autoshard.explanation.data import (
    Axis,
    CollectiveGroup,
    Explanation,
    MemoryGroup,
    Place,
    RepeatedWork,
    Stages,
    StepTime,
    TensorGroup,
)
from autoshard.explanation.program import Judged

__all__ = [
    "Axis",
    "CollectiveGroup",
    "Explanation",
    "Judged",
    "MemoryGroup",
    "Place",
    "RepeatedWork",
    "Stages",
    "StepTime",
    "TensorGroup",
    "explanation_of",
]
