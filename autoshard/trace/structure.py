"""Nesting of jaxprs: the sub-programs of an equation and their order, and equations rebuilt around other ones.

The graph and the lowering both number equations by it. An equation's *path* is its position in the top-level jaxpr; inside
sub-program ``b`` of that equation it is ``(position, b, inner position)``, and so on.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn
from jax.extend.source_info_util import user_context

from autoshard.ir.scan import num_carry, num_consts
from autoshard.primitives import primitive


def subjaxprs(eqn: JaxprEqn) -> tuple[ClosedJaxpr | Jaxpr, ...]:
    """The sub-programs of an equation in body order; none for an ordinary or an opaque one.

    Of a linear solve's four it is the solver: the others serve derivatives, which are traced already.
    """
    if eqn.primitive.name == "custom_linear_solve":
        return (eqn.params["jaxprs"].solve,)
    found: list[ClosedJaxpr | Jaxpr] = []
    for name in primitive(eqn.primitive.name).bodies:
        param = eqn.params[name]
        found.extend(param if isinstance(param, tuple) else (param,))
    return tuple(found)


def opened(jaxpr: ClosedJaxpr | Jaxpr) -> tuple[Jaxpr, tuple[Any, ...]]:
    """The jaxpr itself and its constants."""
    return (jaxpr.jaxpr, tuple(jaxpr.consts)) if isinstance(jaxpr, ClosedJaxpr) else (jaxpr, ())  # one class from jax 0.11


def called_with(name: str, params: Mapping[str, Any], n_operands: int) -> range | tuple[int, ...]:
    """The positions of a call's operands that are its body's inputs: all, except those of a linear solve's other functions."""
    if name != "custom_linear_solve":
        return range(n_operands)
    lengths = params["const_lengths"]
    first = lengths.matvec + lengths.vecmat
    return (*range(first, first + lengths.solve), *range(sum(lengths), n_operands))


def entering(eqn: JaxprEqn) -> list[list[int | None]]:
    """Per sub-program, the position of each input among the equation's operands; None for what a loop carries."""
    return inputs_of(eqn.primitive.name, eqn.params, len(eqn.invars), len(eqn.outvars), len(eqn.params.get("branches", ())))


def inputs_of(name: str, params: Mapping[str, Any], n_operands: int, n_results: int, n_branches: int) -> list[list[int | None]]:
    """The same of a primitive with these parameters; ``n_branches``: of a `cond`."""
    positions = list(range(n_operands))
    match name:
        case "scan":
            constant, sliced = num_consts(params), num_consts(params) + num_carry(params)
            return [[*positions[:constant], *[None] * num_carry(params), *positions[sliced:]]]
        case "while":
            n_cond, n_body = params["cond_nconsts"], params["body_nconsts"]
            carried = [None] * n_results
            return [[*positions[:n_cond], *carried], [*positions[n_cond : n_cond + n_body], *carried]]
        case "cond":
            return [[*positions[1:]] for _ in range(n_branches)]
    return [[*called_with(name, params, n_operands)]]


def scan_params(params: Mapping[str, Any], body: ClosedJaxpr, n_consts: int, n_carry: int) -> dict[str, Any]:
    """The parameters of a scan with another body."""
    if "ft_in" not in params:
        return {**params, "jaxpr": body, "num_consts": n_consts, "num_carry": n_carry}
    n_slices, n_stacked = len(body.in_avals) - n_consts - n_carry, len(body.out_avals) - n_carry
    return {**params, "jaxpr": body, **_scan_trees(n_consts, n_carry, n_slices, n_stacked)}


@cache
def _scan_trees(n_consts: int, n_carry: int, n_slices: int, n_stacked: int) -> dict[str, Any]:
    """Which operands and results of a scan are what, as JAX from 0.11 writes it: those of such a scan, since JAX has no public way."""

    def scan(consts: list, carry: list, slices: list) -> Any:
        def trip(carry: list, slices: list) -> tuple[list, list]:
            total = sum([*consts, *carry, *slices], jnp.zeros(()))
            return [total + k for k in range(n_carry)], [total - k for k in range(1, n_stacked + 1)]

        return jax.lax.scan(trip, carry, slices, 1)

    (eqn,) = jax.make_jaxpr(scan)([0.0] * n_consts, [0.0] * n_carry, [jnp.zeros(1)] * n_slices).eqns
    return {name: eqn.params[name] for name in ("ft_in", "ft_out")}


def with_bodies(eqn: JaxprEqn, old: Sequence[ClosedJaxpr | Jaxpr], new: Sequence[ClosedJaxpr | Jaxpr]) -> dict[str, Any]:
    """The equation's parameters with sub-programs, each of ``old`` replaced by its counterpart in ``new``."""
    waiting: dict[int, list[ClosedJaxpr | Jaxpr]] = {}
    for before, after in zip(old, new, strict=True):
        waiting.setdefault(id(before), []).append(after)  # two branches may be one object with different replacements

    def swap(param: Any) -> Any:
        if isinstance(param, (tuple, list)):
            return getattr(type(param), "_make", type(param))(map(swap, param))
        return waiting[id(param)].pop(0) if id(param) in waiting else param

    return {name: swap(param) for name, param in eqn.params.items() if isinstance(param, (tuple, list, Jaxpr, ClosedJaxpr))}


def around(eqn: JaxprEqn, new: Sequence[Jaxpr]) -> JaxprEqn:
    """The equation with other bodies and the same constants; the same object where no body changes."""
    old = subjaxprs(eqn)
    if all(after is opened(before)[0] for after, before in zip(new, old, strict=True)):
        return eqn
    pairs = zip(new, old, strict=True)
    bodies = [ClosedJaxpr(after, before.consts) if isinstance(before, ClosedJaxpr) else after for after, before in pairs]
    return eqn.replace(params={**eqn.params, **with_bodies(eqn, old, bodies)})


def as_call(eqn: JaxprEqn, function: Callable[..., Any], atoms: Sequence[Any]) -> JaxprEqn:
    """A call of a function on these atoms, in place of an equation: with its results, source and names."""
    with user_context(eqn.source_info.traceback, name_stack=eqn.source_info.name_stack):
        (call,) = jax.make_jaxpr(jax.jit(function))(*types_of(atoms)).eqns
    return call.replace(invars=[*atoms], outvars=eqn.outvars)


def types_of(atoms: Sequence[Any]) -> list[jax.ShapeDtypeStruct]:
    """The types of variables and literals."""
    return [jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype, weak_type=getattr(v.aval, "weak_type", False)) for v in atoms]
