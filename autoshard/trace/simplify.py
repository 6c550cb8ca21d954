"""What is settled later anyway, settled before anybody reads a program: mapped loops, branches by platform, dead code, reversals.

A loop that `jax.vmap` maps over different trip counts has a condition of many answers. It runs while any of them is true,
and a carry whose own answer is false stays as it is. A branch by platform that is for no device, as those for kernel
languages are, is never taken; where one branch is left it is a call. What no result needs is dropped at any depth, as compilers do,
unread carries and slices of loops included. To reverse dimensions of size one, as the gradient of a 1 x 1 convolution does with its kernel,
is to do nothing, and what is reversed, cast or transposed twice alike is so once: a weight that is cast for each of its uses, and what is
gathered of it, is one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, jaxpr_as_fun
from jax.extend.source_info_util import user_context
from jax.interpreters.partial_eval import dce_jaxpr

from autoshard.compilers import PLATFORMS
from autoshard.trace.batched_indexing import batched
from autoshard.trace.structure import around, as_call, opened, subjaxprs, types_of

REARRANGING = frozenset({"convert_element_type", "rev", "transpose"})
"""Operations of one array that are made once, however often a program asks for them."""


def simplified(closed: ClosedJaxpr) -> ClosedJaxpr:
    """The same program with mapped loops, at any depth, as ordinary ones, without branches that no device takes and without dead code."""
    settled = batched(ClosedJaxpr(_simplified(closed.jaxpr), closed.consts))
    return ClosedJaxpr(_live(settled.jaxpr), closed.consts)


def _live(jaxpr: Jaxpr) -> Jaxpr:
    return dce_jaxpr(jaxpr, True, instantiate=True)[0]


def _simplified(jaxpr: Jaxpr) -> Jaxpr:
    """The same object where there is nothing to settle, as are the bodies that hold nothing."""
    live = _live(jaxpr)
    jaxpr = jaxpr if len(live.eqns) == len(jaxpr.eqns) else live
    jaxpr = _once(jaxpr)
    eqns = [_equation(eqn) for eqn in jaxpr.eqns]
    return jaxpr.replace(eqns=eqns) if any(new is not old for new, old in zip(eqns, jaxpr.eqns, strict=True)) else jaxpr


def _once(jaxpr: Jaxpr) -> Jaxpr:
    """The same program with each cast, transpose and reversal of one array made once, and no reversals of dimensions of size one."""
    same: dict[Any, Any] = {}
    made: dict[tuple, Any] = {}

    def named(atoms: Sequence[Any]) -> list[Any]:
        return [atom if isinstance(atom, Literal) else same.get(atom, atom) for atom in atoms]

    eqns = []
    for eqn in jaxpr.eqns:
        invars, name = named(eqn.invars), eqn.primitive.name
        if name in REARRANGING and not isinstance(invars[0], Literal):
            params = tuple(sorted(eqn.params.items(), key=lambda each: each[0]))
            if name == "rev":
                params = tuple(dim for dim in eqn.params["dimensions"] if invars[0].aval.shape[dim] > 1)
            nothing = name == "rev" and not params
            like = invars[0] if nothing else made.setdefault((name, invars[0], eqn.outvars[0].aval, params), eqn.outvars[0])
            if like is not eqn.outvars[0]:
                same[eqn.outvars[0]] = like
                continue
        eqns.append(eqn.replace(invars=invars) if same else eqn)
    return jaxpr.replace(eqns=eqns, outvars=named(jaxpr.outvars)) if same else jaxpr


def _equation(eqn: JaxprEqn) -> JaxprEqn:
    eqn = around(eqn, [_simplified(opened(body)[0]) for body in subjaxprs(eqn)])
    if eqn.primitive.name == "while" and eqn.params["cond_jaxpr"].out_avals[0].shape:
        return _loop(eqn)
    if eqn.primitive.name == "cond" and eqn.params.get("branches_platforms"):
        return _branch(eqn)
    return eqn


def _branch(eqn: JaxprEqn) -> JaxprEqn:
    """A branch by platform as a call of the one that is for devices; as it was where there are several."""
    both = zip(eqn.params["branches"], eqn.params["branches_platforms"], strict=True)
    taken = [branch for branch, platforms in both if platforms is None or not PLATFORMS.isdisjoint(platforms)]
    return as_call(eqn, jaxpr_as_fun(taken[0]), eqn.invars[1:]) if len(taken) == 1 else eqn


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

    types = types_of(eqn.invars)
    asked, carry = types[:n_cond], types[n_cond + n_body :]
    with user_context(eqn.source_info.traceback, name_stack=eqn.source_info.name_stack):
        asking = jax.make_jaxpr(any_true)(*asked, *carry)
        advancing = jax.make_jaxpr(advance)(*asked, *types[n_cond:])
    return eqn.replace(
        invars=[*eqn.invars[:n_cond], *eqn.invars],
        params={**eqn.params, "cond_jaxpr": asking, "body_jaxpr": advancing, "body_nconsts": n_cond + n_body},
    )
