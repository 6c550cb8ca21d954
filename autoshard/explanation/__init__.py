"""The explanation of a strategy as data, and its text. `autoshard.explanation.data` has the shape of the data."""

from autoshard.explanation.build import explanation_of
from autoshard.explanation.data import Explanation, Stages, TensorGroup
from autoshard.explanation.program import Judged
