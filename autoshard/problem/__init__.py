"""From a profiled program and a cost model to what searchers see: nodes, labels and tables."""

from autoshard.problem.folding import Folded, folded
from autoshard.problem.holding import Holding
from autoshard.problem.nodes import Pin
from autoshard.problem.problem import Label, Messages, Problem, Tables

__all__ = ["Folded", "Holding", "Label", "Messages", "Pin", "Problem", "Tables", "folded"]
