"""Tracing of functions to graphs, and the numbering of equations that the lowering shares."""

from autoshard.trace.constraints import constraint_spec, outside_mesh
from autoshard.trace.modules import SplitModules
from autoshard.trace.statics import Held, Static, held, is_static
from autoshard.trace.structure import subjaxprs, types_of
from autoshard.trace.traced import Traced, function_name, rebuilt, trace

__all__ = [
    "Held",
    "SplitModules",
    "Static",
    "Traced",
    "constraint_spec",
    "function_name",
    "held",
    "is_static",
    "outside_mesh",
    "rebuilt",
    "subjaxprs",
    "trace",
    "types_of",
]
