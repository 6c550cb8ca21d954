"""Tracing of functions to graphs, and the numbering of equations that the lowering shares."""

from autoshard.trace.annotations import Annotation, annotations_of, axes_of
from autoshard.trace.batch import Batch, checked_batch, with_named_batch
from autoshard.trace.constraints import constraint_spec, mesh_in_force, outside_mesh, with_axes
from autoshard.trace.modules import SplitModules
from autoshard.trace.statics import Held, Static, held, is_static
from autoshard.trace.structure import scan_params, subjaxprs, types_of
from autoshard.trace.traced import Traced, function_name, of_jaxpr, rebuilt, trace
