"""How equations nest: which of a jaxpr's equations have sub-programs, and in which order these count as bodies.

The graph and the lowering number equations alike, since both read it here. An equation's *path* is its position in the
top-level jaxpr; inside sub-program ``b`` of that equation, it is ``(position, b, inner position)``, and so on.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn
from jax.extend.source_info_util import user_context

from autoshard.primitives import primitive


def subjaxprs(eqn: JaxprEqn) -> tuple[ClosedJaxpr | Jaxpr, ...]:
    """The sub-programs of an equation in body order; none for an ordinary or an opaque one.

    Of a linear solve's four it is the solver itself: the others are for its derivatives, which are traced by now.
    """
    if eqn.primitive.name == "custom_linear_solve":
        return (eqn.params["jaxprs"].solve,)
    found: list[ClosedJaxpr | Jaxpr] = []
    for name in primitive(eqn.primitive.name).bodies:
        param = eqn.params[name]
        found.extend(param if isinstance(param, tuple) else (param,))
    return tuple(found)


def opened(jaxpr: ClosedJaxpr | Jaxpr) -> tuple[Jaxpr, tuple]:
    """The jaxpr itself and its constants."""
    return (jaxpr, ()) if isinstance(jaxpr, Jaxpr) else (jaxpr.jaxpr, tuple(jaxpr.consts))


def called_with(name: str, params: Mapping[str, Any], n_operands: int) -> range | tuple[int, ...]:
    """Which operands of a call are its body's inputs, by position: all, but for those of a linear solve's other functions."""
    if name != "custom_linear_solve":
        return range(n_operands)
    lengths = params["const_lengths"]
    first = lengths.matvec + lengths.vecmat
    return (*range(first, first + lengths.solve), *range(sum(lengths), n_operands))


def with_bodies(eqn: JaxprEqn, old: Sequence[ClosedJaxpr | Jaxpr], new: Sequence[ClosedJaxpr | Jaxpr]) -> dict[str, Any]:
    """The equation's parameters that hold sub-programs, with each of ``old`` replaced by its like in ``new``."""
    waiting: dict[int, list[ClosedJaxpr | Jaxpr]] = {}
    for before, after in zip(old, new, strict=True):
        waiting.setdefault(id(before), []).append(after)  # two branches may be one object, and differ from now on

    def swap(param: Any) -> Any:
        if isinstance(param, (tuple, list)):
            return getattr(type(param), "_make", type(param))(map(swap, param))
        return waiting[id(param)].pop(0) if id(param) in waiting else param

    return {name: swap(param) for name, param in eqn.params.items() if isinstance(param, (tuple, list, Jaxpr, ClosedJaxpr))}


def around(eqn: JaxprEqn, new: Sequence[Jaxpr]) -> JaxprEqn:
    """The equation with other bodies, their constants as they were; the same object where each is the one that it had."""
    old = subjaxprs(eqn)
    if all(after is opened(before)[0] for after, before in zip(new, old, strict=True)):
        return eqn
    bodies = [after if isinstance(before, Jaxpr) else ClosedJaxpr(after, before.consts) for after, before in zip(new, old, strict=True)]
    return eqn.replace(params={**eqn.params, **with_bodies(eqn, old, bodies)})


def as_call(eqn: JaxprEqn, function: Callable, atoms: Sequence[Any]) -> JaxprEqn:
    """A call of the function on these atoms, with the equation's results."""
    with user_context(eqn.source_info.traceback, name_stack=eqn.source_info.name_stack):
        (call,) = jax.make_jaxpr(jax.jit(function))(*types_of(atoms)).eqns
    return call.replace(invars=[*atoms], outvars=eqn.outvars)


def types_of(atoms: Sequence[Any]) -> list[jax.ShapeDtypeStruct]:
    """The types of variables and literals."""
    return [jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype, weak_type=getattr(v.aval, "weak_type", False)) for v in atoms]
