"""Functions to graphs: `trace`, and what the lowering needs to number equations as the graph does."""

from autoshard.trace.constraints import constraint_spec
from autoshard.trace.modules import split_modules
from autoshard.trace.structure import CHECKPOINTS, INLINED, subjaxprs
from autoshard.trace.traced import Traced, trace

__all__ = ["CHECKPOINTS", "INLINED", "Traced", "constraint_spec", "split_modules", "subjaxprs", "trace"]
