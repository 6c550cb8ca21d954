"""Tracing of functions to graphs, and the numbering of equations that the lowering shares."""

from autoshard.trace.constraints import constraint_spec
from autoshard.trace.modules import SplitModules
from autoshard.trace.structure import subjaxprs
from autoshard.trace.traced import Traced, function_name, trace

__all__ = ["SplitModules", "Traced", "constraint_spec", "function_name", "subjaxprs", "trace"]
