"""From a program's facts and a cost model to the input of searchers: variables, their domains, and tables of costs."""

from autoshard.problem.hints import NO_HINTS, Hints
from autoshard.problem.memory_tables import MemoryTables
from autoshard.problem.problem import Label, Problem, Tables
from autoshard.problem.variables import Pin

__all__ = ["NO_HINTS", "Hints", "Label", "MemoryTables", "Pin", "Problem", "Tables"]
