"""How layouts enter and leave the bodies of control-flow ops.

What the graph says with holders, the interpreter needs by position: in which layout each operand goes in, each body
takes its inputs and leaves its outputs. One function per primitive, in the table `FLOWS`; results have their own layouts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from autoshard.ir import Layout, Op
from autoshard.trace.structure import called_with

Layouts = tuple[Layout, ...]
LayoutOf = Callable[[int], Layout]


@dataclass(frozen=True, slots=True)
class Flows:
    """The layouts at the borders of a control-flow equation, by position: of its operands, and per body of inputs and outputs."""

    operands: Layouts
    inputs: tuple[Layouts, ...]
    outputs: tuple[Layouts, ...]


def scan_flows(op: Op, layout: LayoutOf) -> Flows:
    """Carries keep the layout they have in the body; scanned slices lack the leading dimension."""
    consts, entering = op.params["num_consts"], op.params["num_consts"] + op.params["num_carry"]
    inputs = _each(layout, op.bodies[0].inputs)
    stacked = _each(layout, op.results[op.params["num_carry"] :])
    operands = inputs[:entering] + tuple(_shift(slice_, 1) for slice_ in inputs[entering:])
    outputs = inputs[consts:entering] + tuple(_shift(whole, -1) for whole in stacked)
    return Flows(operands, (inputs,), (outputs,))


def while_flows(op: Op, layout: LayoutOf) -> Flows:
    """The operands are the condition's constants, the body's, and the carries that both read."""
    condition, body = op.bodies
    consts = _each(layout, condition.inputs[: op.params["cond_nconsts"]])
    inputs = _each(layout, body.inputs)
    carries = inputs[op.params["body_nconsts"] :]
    return Flows(consts + inputs, (consts + carries, inputs), (_each(layout, condition.outputs), carries))


def cond_flows(op: Op, layout: LayoutOf) -> Flows:
    """The first operand selects the branch; the branches share the others and return in the results' layouts."""
    shared = _each(layout, op.bodies[0].inputs)
    n_branches = len(op.bodies)
    return Flows((layout(op.operands[0]), *shared), (shared,) * n_branches, (_each(layout, op.results),) * n_branches)


def call_flows(op: Op, layout: LayoutOf) -> Flows:
    """One body that runs once: it reads what goes in, and what it returns comes out. Operands it does not read stay as they are."""
    inputs = _each(layout, op.bodies[0].inputs)
    entering = dict(zip(called_with(op.primitive, op.params, len(op.operands)), inputs, strict=True))
    operands = tuple(entering.get(k, layout(value)) for k, value in enumerate(op.operands))
    return Flows(operands, (inputs,), (_each(layout, op.results),))


FLOWS: Mapping[str, Callable[[Op, LayoutOf], Flows]] = {
    "scan": scan_flows,
    "while": while_flows,
    "cond": cond_flows,
    "remat2": call_flows,
    "custom_linear_solve": call_flows,
}


def _each(layout: LayoutOf, values: Sequence[int]) -> Layouts:
    return tuple(map(layout, values))


def _shift(layout: Layout, by: int) -> Layout:
    """The layout with ``by`` more leading dimensions; an axis on a dimension that goes is no longer used."""
    return tuple(dim + by if dim >= max(0, -by) else -1 for dim in layout)
