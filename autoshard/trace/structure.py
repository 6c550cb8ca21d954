"""How equations nest: which of a jaxpr's equations have sub-programs, and in which order these count as bodies.

The graph and the lowering number equations alike, since both read it here. An equation's *path* is its position in the
top-level jaxpr; inside sub-program ``b`` of that equation, it is ``(position, b, inner position)``, and so on.
"""

from __future__ import annotations

from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn

# Parameters that hold the sub-programs, in body order. An equation of any other primitive is opaque.
_SUBJAXPRS = {
    "jit": ("jaxpr",),
    "pjit": ("jaxpr",),
    "closed_call": ("call_jaxpr",),
    "core_call": ("call_jaxpr",),
    "custom_jvp_call": ("call_jaxpr",),
    "custom_vjp_call": ("call_jaxpr",),
    "remat2": ("jaxpr",),
    "checkpoint": ("jaxpr",),
    "scan": ("jaxpr",),
    "while": ("cond_jaxpr", "body_jaxpr"),
    "cond": ("branches",),
}

INLINED = frozenset({"jit", "pjit", "closed_call", "core_call", "custom_jvp_call", "custom_vjp_call"})
"""Primitives whose sub-program becomes part of the graph around it."""

CHECKPOINTS = frozenset({"remat2", "checkpoint"})
"""The names under which JAX versions know `jax.checkpoint`."""


def subjaxprs(eqn: JaxprEqn) -> tuple[ClosedJaxpr | Jaxpr, ...]:
    """The sub-programs of an equation in body order; none for an ordinary or an opaque one."""
    found: list[ClosedJaxpr | Jaxpr] = []
    for name in _SUBJAXPRS.get(eqn.primitive.name, ()):
        param = eqn.params[name]
        found.extend(param if isinstance(param, tuple) else (param,))
    return tuple(found)


def opened(jaxpr: ClosedJaxpr | Jaxpr) -> tuple[Jaxpr, tuple]:
    """The jaxpr itself and its constants."""
    return (jaxpr, ()) if isinstance(jaxpr, Jaxpr) else (jaxpr.jaxpr, tuple(jaxpr.consts))
