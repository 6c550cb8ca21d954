"""Layouts of the operands, body inputs and body outputs of control-flow ops, by position.

The graph's holders have the same by value. One function per primitive, in the table `FLOWS`; results are in their values' layouts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from autoshard.ir import Layout, Op
from autoshard.ir.scan import num_carry, num_consts
from autoshard.trace.structure import called_with

Layouts = tuple[Layout, ...]
LayoutOf = Callable[[int], Layout]
Shift = Callable[[Layout, int], Layout]
"""A layout with so many more leading dimensions, or fewer."""


@dataclass(frozen=True, slots=True)
class Flows:
    """The layouts of a control-flow equation's operands, and per body of its inputs and outputs."""

    operands: Layouts
    inputs: tuple[Layouts, ...]
    outputs: tuple[Layouts, ...]


def shifted(layout: Layout, by: int) -> Layout:
    """The layout with ``by`` more leading dimensions; axes that shard a removed dimension are dropped."""
    return tuple(dim + by if dim >= max(0, -by) else -1 for dim in layout)


def scan_flows(op: Op, layout: LayoutOf, shift: Shift = shifted) -> Flows:
    """The flows of a scan: carries keep their layout in the body; scanned slices lack the leading dimension."""
    consts, entering = num_consts(op.params), num_consts(op.params) + num_carry(op.params)
    inputs = _each(layout, op.bodies[0].inputs)
    stacked = _each(layout, op.results[num_carry(op.params) :])
    operands = inputs[:entering] + tuple(shift(slice_, 1) for slice_ in inputs[entering:])
    outputs = inputs[consts:entering] + tuple(shift(whole, -1) for whole in stacked)
    return Flows(operands, (inputs,), (outputs,))


def while_flows(op: Op, layout: LayoutOf, shift: Shift = shifted) -> Flows:
    """The flows of a while loop, whose operands are the condition's constants, the body's, and the carries that both read."""
    condition, body = op.bodies
    consts = _each(layout, condition.inputs[: op.params["cond_nconsts"]])
    inputs = _each(layout, body.inputs)
    carries = inputs[op.params["body_nconsts"] :]
    return Flows(consts + inputs, (consts + carries, inputs), (_each(layout, condition.outputs), carries))


def cond_flows(op: Op, layout: LayoutOf, shift: Shift = shifted) -> Flows:
    """The flows of a branch: the first operand is the selector; the branches share the layouts of the others and of the results."""
    shared = _each(layout, op.bodies[0].inputs)
    n_branches = len(op.bodies)
    return Flows((layout(op.operands[0]), *shared), (shared,) * n_branches, (_each(layout, op.results),) * n_branches)


def call_flows(op: Op, layout: LayoutOf, shift: Shift = shifted) -> Flows:
    """The flows of a call of one body; operands that are no inputs of it keep their layout."""
    inputs = _each(layout, op.bodies[0].inputs)
    entering = dict(zip(called_with(op.primitive, op.params, len(op.operands)), inputs, strict=True))
    operands = tuple(entering.get(k, layout(value)) for k, value in enumerate(op.operands))
    return Flows(operands, (inputs,), (_each(layout, op.results),))


FLOWS: Mapping[str, Callable[..., Flows]] = {
    "scan": scan_flows,
    "while": while_flows,
    "cond": cond_flows,
    "remat2": call_flows,
    "custom_linear_solve": call_flows,
}


def _each(layout: LayoutOf, values: Sequence[int]) -> Layouts:
    return tuple(map(layout, values))
