"""The record of a solution for a traced program."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, is_dataclass, replace
from types import MappingProxyType
from typing import Any

import jax
import numpy as np

from autoshard.cluster import Cluster
from autoshard.ir import Layout, Mesh, Spec, layout_to_spec, result_layouts, spec_to_layout
from autoshard.ir.rewrites import Rewrite
from autoshard.run.structure import describe
from autoshard.run.tracing import TracedOnce
from autoshard.search import Solution
from autoshard.strategy import Program, Provenance, Record, SearcherRecord, TensorRecord
from autoshard.trace import SplitModules, Traced
from autoshard.version import __version__

Call = tuple[Callable[..., Any], tuple[Any, ...]]
"""A function and its arguments."""

WRITTEN_BACK = "result and updates of NNX objects"


def abstract_call(fn: Callable[..., Any], args: tuple[Any, ...], rewrites: tuple[Rewrite, ...] = ()) -> Call:
    """The call with the types of its arrays, also of those in NNX and Equinox modules, so that no array is kept alive.

    Args:
        rewrites: what the function's program is rewritten by, where it does not know that itself.
    """

    def typed(x: Any) -> Any:
        is_array = isinstance(x, jax.Array | np.ndarray | jax.ShapeDtypeStruct)
        return jax.ShapeDtypeStruct(x.shape, x.dtype, weak_type=getattr(x, "weak_type", False)) if is_array else x

    split = SplitModules(args)
    own = fn.alone if isinstance(fn, TracedOnce) else TracedOnce(fn, rewrites).alone  # which may be called with other arguments
    return own, split.rebuild(jax.tree.map(typed, split.states))


def record_of(
    traced: Traced,
    cluster: Cluster,
    mesh: Mesh,
    solution: Solution,
    searcher: Any,
    notes: Sequence[str] = (),
    written: Mapping[int, Spec] = MappingProxyType({}),
) -> Record:
    """The record of a solution for a traced program.

    Args:
        written: by argument position the spec as the user wrote it, where it names axes of size 1 as well; what replaces it has the same.
    """
    graph, assignment = traced.graph, solution.assignment

    def tensor(path: str, value: int, layout: Layout, argument: int) -> TensorRecord:
        found = graph.values[value]
        spec, own = written.get(argument), layout_to_spec(layout, mesh.names, found.rank)
        same = spec is not None and len(spec) == found.rank and spec_to_layout(spec, mesh, found.rank, path) == layout
        return TensorRecord(path, found.shape, found.dtype, spec if same and spec is not None else own)

    replaced = dict(graph.aliases)
    results = zip(graph.result_paths, graph.results, result_layouts(graph, assignment), strict=True)
    arguments, nowhere = zip(graph.argument_paths, graph.arguments, strict=True), (-1,) * len(mesh.axes)
    return Record(
        name=f"{graph.name}_{searcher.name}",
        program=Program(
            name=graph.name,
            fingerprint=graph.fingerprint,
            n_ops=len(graph.walk()),
            n_values=len(graph.values),
            rewrites=traced.rewrites,
            batch=traced.batch,
        ),
        cluster=cluster.to_dict(),
        mesh=mesh,
        arguments=tuple(tensor(path, v, assignment.layout(v), k) for k, (path, v) in enumerate(arguments)),
        results=tuple(tensor(path, v, layout, replaced.get(k, -1)) for k, (path, v, layout) in enumerate(results)),
        argument_structure=describe(traced.in_tree),
        result_structure=result_structure(traced),
        choices={op: choice for op, choice in assignment.choices.items() if any(factor >= 0 for factor, _ in choice)},
        layouts={value: layout for value, layout in assignment.layouts.items() if layout != nowhere},
        copies=dict(assignment.copies),
        ahead=dict(assignment.ahead),
        windows=dict(assignment.windows),
        cost=solution.judgement.cost,
        searcher=SearcherRecord(searcher.name, _options(searcher)),
        lower_bound_seconds=solution.lower_bound_seconds,
        donate_argnums=traced.donate_argnums,
        assumptions=(*graph.assumptions, *notes, *solution.notes),
        stats=solution.stats,
        provenance=Provenance(autoshard=__version__, jax=jax.__version__),
    )


def _options(searcher: Any) -> dict[str, Any]:
    """The fields of a searcher that is a dataclass; none of another."""
    return {each.name: getattr(searcher, each.name) for each in fields(searcher)} if is_dataclass(searcher) else {}


def result_structure(traced: Traced) -> Any:
    """The structure of the results; what is written back into NNX objects stands beside the function's own."""
    own, everything = traced.out_tree.num_leaves, len(traced.graph.results)
    structure = describe(traced.out_tree)
    if traced.modules is None:
        return structure
    return {"node": WRITTEN_BACK, "keys": ["result", "updates"], "children": [structure, {"list": list(range(own, everything))}]}


def lasting(record: Record) -> Record:
    """The record without what varies from run to run: how long things took."""
    stats = {key: value for key, value in record.stats.items() if not key.endswith("_seconds")}
    confirmation = record.confirmation
    if confirmation is not None:
        found = (replace(each, seconds=None) if each.measure == "timed" else each for each in confirmation.finalists)
        confirmation = replace(confirmation, finalists=tuple(found))
    return replace(record, stats=stats, confirmation=confirmation)
