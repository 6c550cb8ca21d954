"""Trip counts of loops."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from jax.extend.core import Jaxpr, JaxprEqn, Literal, Var

from autoshard.trace.structure import opened


def while_trips(eqn: JaxprEqn) -> int | None:
    """The trip count of a while loop that counts: ``i < limit``, ``i = i + step``, with literals throughout; else None."""
    (condition, _), (body, _) = opened(eqn.params["cond_jaxpr"]), opened(eqn.params["body_jaxpr"])
    n_cond, n_body = eqn.params["cond_nconsts"], eqn.params["body_nconsts"]
    if len(condition.eqns) != 1 or condition.eqns[0].primitive.name not in ("lt", "le") or condition.outvars != condition.eqns[0].outvars:
        return None
    counter, bound = condition.eqns[0].invars
    carries = condition.invars[n_cond:]
    if isinstance(counter, Literal) or counter not in carries:
        return None
    position = carries.index(counter)
    start = _written(eqn.invars[n_cond + n_body + position])
    limit = _limit(eqn, condition, body, bound)
    step = _step(body, n_body + position, position)
    if start is None or limit is None or step is None or step <= 0:
        return None
    distance = limit - start + (condition.eqns[0].primitive.name == "le")
    return max(0, math.ceil(distance / step))


def _written(atom: Any) -> int | None:
    """The integer a literal is, or None."""
    if isinstance(atom, Literal) and np.issubdtype(np.asarray(atom.val).dtype, np.integer):
        return int(atom.val)
    return None


def _limit(eqn: JaxprEqn, condition: Jaxpr, body: Jaxpr, bound: Var | Literal) -> int | None:
    """The bound of a loop: a literal, also as a constant or an unchanged carry of the loop; None for any other."""
    if isinstance(bound, Literal):
        return _written(bound)
    n_cond, n_body = eqn.params["cond_nconsts"], eqn.params["body_nconsts"]
    position = condition.invars.index(bound) if bound in condition.invars else None
    if position is None:
        return None
    if position < n_cond:
        return _written(eqn.invars[position])
    carry = position - n_cond
    return _written(eqn.invars[n_body + position]) if body.outvars[carry] is body.invars[n_body + carry] else None


def _step(body: Jaxpr, counter: int, output: int) -> int | None:
    """The integer literal that the body adds to its counter, or None."""
    for eqn in body.eqns:
        if eqn.primitive.name == "add" and body.outvars[output] in eqn.outvars and body.invars[counter] in eqn.invars:
            return next((step for step in map(_written, eqn.invars) if step is not None), None)
    return None
