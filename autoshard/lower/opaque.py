"""Programs whose kernels are opaque: for what lowers a program and never runs it, on platforms that have no such kernels."""

from __future__ import annotations

from typing import Any

import jax
from jax.extend.core import ClosedJaxpr, JaxprEqn, jaxpr_as_fun

from autoshard.rules import attention, ring
from autoshard.rules.avals import aval_of
from autoshard.trace.mapped import MAPPED
from autoshard.trace.structure import around, as_call, opened, subjaxprs

ANY_PLATFORM = "cpu"
"""A platform to lower for where none is asked for."""

KERNEL = "kernel"
"""The target of the calls that stand for kernels."""

KERNELS = frozenset({"pallas_call", "mpmd_map", attention.FORWARD, attention.BACKWARD, ring.FORWARD, ring.BACKWARD})
"""Primitives that platforms lower which have such kernels."""


def without_kernels(body: Any) -> Any:
    """A program in which calls of a foreign function stand for kernels; the same object where there are none."""
    jaxpr, consts = opened(body)
    eqns = [_opaque(eqn) for eqn in jaxpr.eqns]
    if all(new is old for new, old in zip(eqns, jaxpr.eqns, strict=True)):
        return body
    new = jaxpr.replace(eqns=eqns)
    return ClosedJaxpr(new, consts) if isinstance(body, ClosedJaxpr) else new


def traced_without_kernels(traced: Any, arguments: Any) -> Any:
    """A traced function, for arguments of these types, in which they stand for kernels; itself where there are none."""
    body = without_kernels(traced.jaxpr)
    return traced if body is traced.jaxpr else jax.jit(jaxpr_as_fun(body), keep_unused=True).trace(*jax.tree.leaves(arguments))


def _opaque(eqn: JaxprEqn) -> JaxprEqn:
    if eqn.primitive.name in KERNELS and not eqn.params.get("interpret"):
        made = [jax.ShapeDtypeStruct(aval.shape, aval.dtype) for aval in map(aval_of, eqn.outvars)]
        return as_call(eqn, jax.ffi.ffi_call(KERNEL, made), eqn.invars)
    if eqn.primitive.name == MAPPED:
        inner = without_kernels(eqn.params["jaxpr"])
        return eqn if inner is eqn.params["jaxpr"] else eqn.replace(params=eqn.params | {"jaxpr": inner})
    return around(eqn, [opened(without_kernels(inner))[0] for inner in subjaxprs(eqn)])
