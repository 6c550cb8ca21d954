"""How layouts enter and leave the bodies of control-flow equations, and how such an equation is bound with new bodies.

What the graph says with holders, the interpreter needs by position: in which layout each operand goes in, each body
takes its inputs and leaves its outputs. One function per primitive, in the table `FLOWS`; results have their own layouts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn

from autoshard.ir import Layout, Op

Layouts = tuple[Layout, ...]
LayoutOf = Callable[[int], Layout]


@dataclass(frozen=True, slots=True)
class Flows:
    """The layouts at the borders of a control-flow equation, by position: of its operands, and per body of inputs and outputs."""

    operands: Layouts
    inputs: tuple[Layouts, ...]
    outputs: tuple[Layouts, ...]


def scan_flows(op: Op, params: Mapping[str, Any], layout: LayoutOf) -> Flows:
    """Carries keep the layout they have in the body; scanned slices lack the leading dimension."""
    consts, entering = params["num_consts"], params["num_consts"] + params["num_carry"]
    inputs = _each(layout, op.bodies[0].inputs)
    stacked = _each(layout, op.results[params["num_carry"] :])
    operands = inputs[:entering] + tuple(_shift(slice_, 1) for slice_ in inputs[entering:])
    outputs = inputs[consts:entering] + tuple(_shift(whole, -1) for whole in stacked)
    return Flows(operands, (inputs,), (outputs,))


def while_flows(op: Op, params: Mapping[str, Any], layout: LayoutOf) -> Flows:
    """The operands are the condition's constants, the body's, and the carries that both read."""
    condition, body = op.bodies
    consts = _each(layout, condition.inputs[: params["cond_nconsts"]])
    inputs = _each(layout, body.inputs)
    carries = inputs[params["body_nconsts"] :]
    return Flows(consts + inputs, (consts + carries, inputs), (_each(layout, condition.outputs), carries))


def cond_flows(op: Op, params: Mapping[str, Any], layout: LayoutOf) -> Flows:
    """The first operand selects the branch; the branches share the others and return in the results' layouts."""
    shared = _each(layout, op.bodies[0].inputs)
    n_branches = len(op.bodies)
    return Flows((layout(op.operands[0]), *shared), (shared,) * n_branches, (_each(layout, op.results),) * n_branches)


def call_flows(op: Op, params: Mapping[str, Any], layout: LayoutOf) -> Flows:
    """One body that runs once: it reads what goes in, and what it returns comes out."""
    inputs = _each(layout, op.bodies[0].inputs)
    return Flows(inputs, (inputs,), (_each(layout, op.results),))


FLOWS: Mapping[str, Callable[[Op, Mapping[str, Any], LayoutOf], Flows]] = {
    "scan": scan_flows,
    "while": while_flows,
    "cond": cond_flows,
    "remat2": call_flows,
    "checkpoint": call_flows,
}


def _each(layout: LayoutOf, values: Sequence[int]) -> Layouts:
    return tuple(map(layout, values))


def _shift(layout: Layout, by: int) -> Layout:
    """The layout with ``by`` more leading dimensions; an axis on a dimension that goes is no longer used."""
    return tuple(dim + by if dim >= max(0, -by) else -1 for dim in layout)


def retraced(old: ClosedJaxpr | Jaxpr, function: Callable[..., Sequence[Any]]) -> tuple[ClosedJaxpr | Jaxpr, list[Any]]:
    """The jaxpr of ``function`` for arguments of the types of ``old``, and the constants to pass it first.

    A closed jaxpr keeps its constants; an open one, as a checkpoint's, gets them as leading arguments.
    """
    inner = old if isinstance(old, Jaxpr) else old.jaxpr
    types = [jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype, weak_type=getattr(v.aval, "weak_type", False)) for v in inner.invars]
    new = jax.make_jaxpr(function)(*types)
    if not isinstance(old, Jaxpr):
        return new, []
    return new.jaxpr.replace(constvars=[], invars=[*new.jaxpr.constvars, *new.jaxpr.invars], debug_info=None), list(new.consts)


def bind(eqn: JaxprEqn, operands: Sequence[Any], **replaced: Any) -> list[Any]:
    """The results of the equation's primitive on these operands, with some parameters replaced."""
    results = eqn.primitive.bind(*operands, **eqn.primitive.get_bind_params({**eqn.params, **replaced}))
    return list(results) if eqn.primitive.multiple_results else [results]


def with_bodies(eqn: JaxprEqn, old: Sequence[ClosedJaxpr | Jaxpr], new: Sequence[ClosedJaxpr | Jaxpr]) -> dict[str, Any]:
    """The equation's parameters that hold sub-programs, with each of ``old`` replaced by its like in ``new``."""
    waiting: dict[int, list[ClosedJaxpr | Jaxpr]] = {}
    for before, after in zip(old, new, strict=True):
        waiting.setdefault(id(before), []).append(after)  # branches may be one object, and differ from now on

    def swap(param: Any) -> Any:
        if isinstance(param, (tuple, list)):
            return type(param)(map(swap, param))
        return waiting[id(param)].pop(0) if id(param) in waiting else param

    return {name: swap(param) for name, param in eqn.params.items() if isinstance(param, (tuple, list, Jaxpr, ClosedJaxpr))}
