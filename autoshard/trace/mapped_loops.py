"""Loops that `jax.vmap` maps over different trip counts, written out: JAX does so only when it lowers them.

Such a loop has a condition of many answers. It runs while any of them is true, and a carry whose own answer is false stays as it is.
"""

from __future__ import annotations

from typing import Any

import jax
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, jaxpr_as_fun
from jax.extend.source_info_util import user_context

from autoshard.trace.structure import opened, subjaxprs, with_bodies


def written_out(closed: ClosedJaxpr) -> ClosedJaxpr:
    """The same program with mapped loops, at any depth, as ordinary ones."""
    return ClosedJaxpr(_written_out(closed.jaxpr), closed.consts)


def _written_out(jaxpr: Jaxpr) -> Jaxpr:
    """The same object where there are no such loops, as are the bodies that hold none."""
    eqns = [_equation(eqn) for eqn in jaxpr.eqns]
    return jaxpr.replace(eqns=eqns) if any(new is not old for new, old in zip(eqns, jaxpr.eqns, strict=True)) else jaxpr


def _equation(eqn: JaxprEqn) -> JaxprEqn:
    old = subjaxprs(eqn)
    new = [_written_out(opened(body)[0]) for body in old]
    if any(after is not opened(before)[0] for after, before in zip(new, old, strict=True)):
        bodies = [after if isinstance(before, Jaxpr) else ClosedJaxpr(after, before.consts) for after, before in zip(new, old, strict=True)]
        eqn = eqn.replace(params={**eqn.params, **with_bodies(eqn, old, bodies)})
    return _loop(eqn) if eqn.primitive.name == "while" and eqn.params["cond_jaxpr"].out_avals[0].shape else eqn


def _loop(eqn: JaxprEqn) -> JaxprEqn:
    """A mapped loop as an ordinary one: its body asks the condition as well, and so takes the constants of both."""
    n_cond, n_body = eqn.params["cond_nconsts"], eqn.params["body_nconsts"]
    condition, body = eqn.params["cond_jaxpr"], eqn.params["body_jaxpr"]

    def any_true(*operands: Any) -> Any:
        (true,) = jaxpr_as_fun(condition)(*operands)
        return jax.lax.reduce_or(true, range(true.ndim))

    def advance(*operands: Any) -> list[Any]:
        asked, carry = operands[:n_cond], operands[n_cond + n_body :]
        (true,) = jaxpr_as_fun(condition)(*asked, *carry)
        results = jaxpr_as_fun(body)(*operands[n_cond:])
        return [
            jax.lax.select(jax.lax.broadcast_in_dim(true, new.shape, range(true.ndim)), new, old)
            for new, old in zip(results, carry, strict=True)
        ]

    avals: list[Any] = [v.aval for v in eqn.invars]
    types = [jax.ShapeDtypeStruct(aval.shape, aval.dtype, weak_type=getattr(aval, "weak_type", False)) for aval in avals]
    asked, carry = types[:n_cond], types[n_cond + n_body :]
    with user_context(eqn.source_info.traceback, name_stack=eqn.source_info.name_stack):
        asking = jax.make_jaxpr(any_true)(*asked, *carry)
        advancing = jax.make_jaxpr(advance)(*asked, *types[n_cond:])
    return eqn.replace(
        invars=[*eqn.invars[:n_cond], *eqn.invars],
        params={**eqn.params, "cond_jaxpr": asking, "body_jaxpr": advancing, "body_nconsts": n_cond + n_body},
    )
