"""Primitives that JAX does not own, replaced by their implementations, so that a plan splits what they compute.

Other libraries define primitives of their own: for a rule of differentiation (lineax's linear solves), or to see whether they are mapped
(Equinox's loops). JAX has no sharding rule for these. An equation of such a primitive becomes a call of its implementation, traced for
the types of the equation's operands. Where the result is differentiated once more, the primitive's own derivative is taken.

A primitive stays closed, and runs as it is lowered, where its implementation is JAX's (as `apply_primitive` is), where it has an effect,
where JAX cannot trace the implementation, and where the user declared a rule for it (`autoshard.kernel_rule`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import cache, partial
from typing import Any

import jax
import numpy as np
from jax.custom_derivatives import SymbolicZero
from jax.extend.core import JaxprEqn, Literal, Primitive

from autoshard.rules.declared import declared_of
from autoshard.trace.structure import as_call, opened, subjaxprs, types_of


def implemented(eqn: JaxprEqn, within: tuple[JaxprEqn, ...] = ()) -> JaxprEqn:
    """A call of the implementation of an equation's primitive; the equation itself where that stays closed.

    Args:
        within: the equations in whose implementations it is; one that is like them stays closed.
    """
    if _stays(eqn) or any(_alike(eqn, each) for each in within):
        return eqn
    try:
        return _call(eqn)
    except Exception:  # an implementation may raise anything: `closed` tells it
        return eqn


def closed(eqn: JaxprEqn) -> str:
    """Why an equation of another library's primitive is not replaced by its implementation, in words; empty of JAX's primitives."""
    if _stays(eqn):
        return ""
    try:
        _call(eqn)
    except Exception as error:
        said = str(error).strip()
        return f"{type(error).__name__}: {said.splitlines()[0]}" if said else type(error).__name__
    return "it calls itself"


def _stays(eqn: JaxprEqn) -> bool:
    """Whether an equation is to stay as it is: of one of JAX's primitives, or of one with a rule that the user declared."""
    return _implementation(eqn.primitive) is None or declared_of(eqn.primitive.name, eqn.params) is not None


@cache
def _implementation(primitive: Primitive) -> Callable | None:
    """The function that implements a primitive; None where it has none, or one of JAX's own."""
    found = function = vars(primitive).get("impl")
    while isinstance(function, partial):
        function = function.func
    of_jax = str(getattr(function, "__module__", "")).partition(".")[0] == "jax" and not isinstance(function, jax.stages.Wrapped)
    return None if of_jax else found


def _alike(eqn: JaxprEqn, other: JaxprEqn) -> bool:
    """Whether two equations compute the same thing of the same types, as far as that can be told."""
    types = ([v.aval for v in each.invars] for each in (eqn, other))
    return eqn.primitive is other.primitive and next(types) == next(types) and str(eqn.params) == str(other.params)


def _call(eqn: JaxprEqn) -> JaxprEqn:
    """The call of an equation's implementation."""
    if eqn.effects:
        raise ValueError("It has an effect")
    try:
        call = _traced(eqn, {})
    except Exception:  # some implementations look at the values of operands that are written in the program
        operands = enumerate(zip(eqn.invars, types_of(eqn.invars), strict=True))
        written = {k: np.asarray(x.val, kind.dtype) for k, (x, kind) in operands if isinstance(x, Literal)}
        if not written:
            raise
        call = _traced(eqn, written)
    (body,) = subjaxprs(call)
    made, promised = ([(each.shape, each.dtype) for each in types_of(side)] for side in (opened(body)[0].outvars, eqn.outvars))
    if made != promised:
        raise ValueError(f"Its implementation returns {made}, and its abstract evaluation {promised}")
    return call


def _traced(eqn: JaxprEqn, written: dict[int, np.ndarray]) -> JaxprEqn:
    """The call, traced with the operands whose values are given as they are."""
    implementation, params = _implementation(eqn.primitive), eqn.primitive.get_bind_params(eqn.params)
    assert implementation is not None

    def function(*operands: Any) -> Any:
        return implementation(*(written.get(k, x) for k, x in enumerate(operands)), **params)

    def derivative(primals: Sequence[Any], tangents: Sequence[Any]) -> Any:
        moving = [k for k, tangent in enumerate(tangents) if not isinstance(tangent, SymbolicZero)]

        def bound(*moved: Any) -> Any:
            operands = {**dict(enumerate(primals)), **dict(zip(moving, moved, strict=True))}
            return eqn.primitive.bind(*operands.values(), **params)

        return jax.jvp(bound, [primals[k] for k in moving], [tangents[k] for k in moving])

    function.__name__ = eqn.primitive.name
    called = jax.custom_jvp(function)
    called.defjvp(derivative, symbolic_zeros=True)
    with eqn.ctx.manager if eqn.ctx.cur_abstract_mesh.empty else nullcontext():
        return as_call(eqn, called, eqn.invars)
