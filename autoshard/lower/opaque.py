"""Programs whose kernels are opaque: for what lowers a program and never runs it, on platforms that have no such kernels."""

from __future__ import annotations

from typing import Any

import jax
from jax.extend.core import ClosedJaxpr, JaxprEqn

from autoshard.rules.avals import aval_of
from autoshard.trace.mapped import MAPPED
from autoshard.trace.structure import around, as_call, opened, subjaxprs

KERNEL = "kernel"
"""The target of the calls that stand for kernels."""


def without_kernels(body: Any) -> Any:
    """A program in which calls of a foreign function stand for Pallas kernels; the same object where there are none."""
    jaxpr, consts = opened(body)
    eqns = [_opaque(eqn) for eqn in jaxpr.eqns]
    if all(new is old for new, old in zip(eqns, jaxpr.eqns, strict=True)):
        return body
    new = jaxpr.replace(eqns=eqns)
    return ClosedJaxpr(new, consts) if isinstance(body, ClosedJaxpr) else new


def _opaque(eqn: JaxprEqn) -> JaxprEqn:
    if eqn.primitive.name in ("pallas_call", "mpmd_map") and not eqn.params["interpret"]:
        made = [jax.ShapeDtypeStruct(aval.shape, aval.dtype) for aval in map(aval_of, eqn.outvars)]
        return as_call(eqn, jax.ffi.ffi_call(KERNEL, made), eqn.invars)
    if eqn.primitive.name == MAPPED:
        inner = without_kernels(eqn.params["jaxpr"])
        return eqn if inner is eqn.params["jaxpr"] else eqn.replace(params=eqn.params | {"jaxpr": inner})
    return around(eqn, [opened(without_kernels(inner))[0] for inner in subjaxprs(eqn)])
