"""From a profiled program and a cost model to what searchers see: nodes, labels and tables."""

from autoshard.problem.budgets import BUDGETS, Budgets
from autoshard.problem.folding import Folded, folded
from autoshard.problem.hints import NO_HINTS, Hints, Messages
from autoshard.problem.holding import Holding
from autoshard.problem.nodes import Pin
from autoshard.problem.problem import Label, Problem, Tables

__all__ = ["BUDGETS", "NO_HINTS", "Budgets", "Folded", "Hints", "Holding", "Label", "Messages", "Pin", "Problem", "Tables", "folded"]
