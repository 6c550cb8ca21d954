"""The search problem: decision variables, their domains and tables of costs, from a program's facts and a cost model."""

from autoshard.problem.cost_tables import Tables
from autoshard.problem.domains import Label
from autoshard.problem.hints import NO_HINTS, Hints
from autoshard.problem.memory_tables import MemoryTables
from autoshard.problem.problem import Problem
from autoshard.problem.variables import Pin
