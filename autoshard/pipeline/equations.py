"""Equations of the program of each device: what they depend on, and their evaluation."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import JaxprEqn, Literal, Var
from jax.extend.source_info_util import current_name_stack, user_context

from autoshard.lower import bind, manual_context
from autoshard.trace.mapped import has_effects


def value(atom: Any, env: dict[Var, Any]) -> Any:
    """The array of an atom."""
    return atom.val if isinstance(atom, Literal) else env[atom]


def is_var(atom: Any) -> bool:
    return isinstance(atom, Var)


def nbytes(var: Any) -> float:
    """The bytes of a variable on a device."""
    aval = var.aval
    return 0.0 if jnp.issubdtype(aval.dtype, jax.dtypes.extended) else float(aval.size * aval.dtype.itemsize)


def needed_by(eqns: Sequence[JaxprEqn], outputs: Iterable[Any], effects: bool = False) -> set[int]:
    """The positions of the equations that outputs depend on, and with ``effects`` those that effects such as prints depend on."""
    live = {v for v in outputs if isinstance(v, Var)}
    found = set()
    for k in reversed(range(len(eqns))):
        if any(v in live for v in eqns[k].outvars) or (effects and has_effects(eqns[k])):
            found.add(k)
            live.update(a for a in eqns[k].invars if isinstance(a, Var))
    return found


def evaluate(eqns: Iterable[JaxprEqn], env: dict[Var, Any]) -> None:
    """Evaluates equations of a device's program; their results are then in ``env``."""
    for eqn in eqns:
        names = current_name_stack() + eqn.source_info.name_stack
        with user_context(eqn.source_info.traceback, name_stack=names), manual_context(eqn):
            results = bind(eqn, [value(atom, env) for atom in eqn.invars])
        env.update(zip(eqn.outvars, results, strict=True))
