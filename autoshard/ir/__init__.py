"""Records without JAX: graph, rule, layout, assignment, collective."""

from autoshard.ir.assignment import (
    NOWHERE,
    Assignment,
    Choice,
    are_legal,
    choice_for,
    computed_layout,
    exchanges,
    given_choice,
    legal,
    legal_choices,
    operand_layout,
    reductions,
    result_layout,
    result_layouts,
    sent_tensors,
    served_from,
    view_of,
)
from autoshard.ir.attribution import MovedValue, Reason, ServedOp, Split
from autoshard.ir.collective import Collective, as_compiled
from autoshard.ir.graph import Body, Flow, Graph, Holder, Op, Origin, Value, is_transfer
from autoshard.ir.layout import (
    Layout,
    Mesh,
    Placement,
    Spec,
    axes_of_product,
    check_divides,
    divides,
    entry_axes,
    layout_dims,
    layout_number,
    layout_numbers,
    layout_of,
    layout_to_spec,
    layouts,
    local_shape,
    replicated,
    shard_counts,
    shards,
    shards_of,
    shift_layout,
    spec_to_layout,
)
from autoshard.ir.rule import Dims, Factor, Rule, Send, factor_name, factor_names
