"""Pure records: graph, rule, layout, assignment. Nothing here imports JAX."""

from autoshard.ir.assignment import (
    Assignment,
    Choice,
    computed_layout,
    legal,
    operand_layout,
    reductions,
    result_layout,
)
from autoshard.ir.collective import Collective
from autoshard.ir.graph import Body, Flow, Graph, Holder, Op, Origin, Value
from autoshard.ir.layout import (
    Layout,
    Mesh,
    Spec,
    check_divides,
    divides,
    layout_number,
    layout_to_spec,
    layouts,
    replicated,
    shard_counts,
    shards,
    shift_layout,
    spec_to_layout,
)
from autoshard.ir.rule import Dims, Factor, Rule, factor_names

__all__ = [
    "Assignment",
    "Body",
    "Choice",
    "Collective",
    "Dims",
    "Factor",
    "Flow",
    "Graph",
    "Holder",
    "Layout",
    "Mesh",
    "Op",
    "Origin",
    "Rule",
    "Spec",
    "Value",
    "check_divides",
    "computed_layout",
    "divides",
    "factor_names",
    "layout_number",
    "layout_to_spec",
    "layouts",
    "legal",
    "operand_layout",
    "reductions",
    "replicated",
    "result_layout",
    "shard_counts",
    "shards",
    "shift_layout",
    "spec_to_layout",
]
