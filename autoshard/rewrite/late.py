"""The backward pass of a layer in two programs: the gradient of its input, and those of its weights, which may be computed later."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr, JaxprEqn, Var

from autoshard.lower import Interpreter, Path, bind
from autoshard.primitives import is_inlined, is_matrix
from autoshard.recompute.flat import jaxpr_of
from autoshard.recompute.replacing import CHECKPOINT
from autoshard.rewrite.scopes import dtype_of
from autoshard.trace import subjaxprs, types_of
from autoshard.trace.structure import opened


@dataclass(frozen=True, slots=True, eq=False)
class InTwo:
    """A program in two.

    Attributes:
        early: from its inputs to those results that are not late, and then what the other one reads of it.
        late: from its inputs and that to the late results.
        outputs: the positions of these among its results.
    """

    early: ClosedJaxpr
    late: ClosedJaxpr
    outputs: frozenset[int]


def in_two(whole: ClosedJaxpr, passing: Collection[int], outputs: Collection[int]) -> InTwo | None:
    """A program in two; None where there is nothing to compute later.

    Args:
        passing: the positions of inputs that the late program can no longer read.
        outputs: those of results that may be late: they are where products are for them alone.
    """
    # Without checkpoints, of whose work parts may be late; it is in the body of a loop, as they are.
    closed = jax.make_jaxpr(lambda *arguments: replayed(whole, arguments))(*types_of(whole.jaxpr.invars))
    jaxpr = closed.jaxpr
    rest = [x for k, x in enumerate(jaxpr.outvars) if k not in outputs]
    late, early = set[int](), _needed(jaxpr.eqns, rest)
    for k in outputs:
        own = _needed(jaxpr.eqns, [jaxpr.outvars[k]]) - early
        if any(_has_product(jaxpr.eqns[at]) for at in own):
            late.add(k)
    if not late:
        return None
    early = _needed(jaxpr.eqns, [x for k, x in enumerate(jaxpr.outvars) if k not in late])
    own = _with_makers(jaxpr.eqns, _needed(jaxpr.eqns, [jaxpr.outvars[k] for k in late]) - early)
    gone = {jaxpr.invars[k] for k in passing}
    results = [jaxpr.outvars[k] for k in sorted(late)]
    made = {v for at in own for v in jaxpr.eqns[at].outvars}
    read = dict.fromkeys(x for at in sorted(own) for x in jaxpr.eqns[at].invars if isinstance(x, Var))
    given = {*jaxpr.invars, *jaxpr.constvars} - gone
    crossing = [v for v in read if v not in made and v not in given]
    first, second = ([jaxpr.eqns[at] for at in sorted(each)] for each in (early, own))
    kept = [x for k, x in enumerate(jaxpr.outvars) if k not in late]
    parts = (jaxpr.invars, [*kept, *crossing], first), ([*(v for v in jaxpr.invars if v not in gone), *crossing], results, second)
    early_program, late_program = (ClosedJaxpr(jaxpr_of(*each, jaxpr.constvars), closed.consts) for each in parts)
    return InTwo(early_program, late_program, frozenset(late))


def replayed(closed: ClosedJaxpr, arguments: Sequence[Any]) -> list[Any]:
    """The results of a program, whose equations keep where they come from."""
    return _Opening({}).run(closed.jaxpr, closed.consts, arguments)


class _Opening(Interpreter):
    """Evaluates a program with its checkpoints opened."""

    def _equation(self, eqn: JaxprEqn, operands: list[Any], path: Path) -> list[Any]:
        if eqn.primitive.name in CHECKPOINT or is_inlined(eqn.primitive.name):
            return self._inlined(eqn, operands, path)
        return bind(eqn, operands)


def _needed(eqns: Sequence[JaxprEqn], results: Sequence[Any]) -> set[int]:
    """The equations of which results are made; all that have effects."""
    wanted, found = {x for x in results if isinstance(x, Var)}, set[int]()
    for at in reversed(range(len(eqns))):
        if eqns[at].effects or not wanted.isdisjoint(eqns[at].outvars):
            found.add(at)
            wanted.update(x for x in eqns[at].invars if isinstance(x, Var))
    return found


def _with_makers(eqns: Sequence[JaxprEqn], own: set[int]) -> set[int]:
    """The equations with those that make what is not worth keeping, or cannot be: arrays of nothing, such as masks, and random keys."""
    makers = {v: at for at, eqn in enumerate(eqns) for v in eqn.outvars}
    found, waiting = set(own), list(own)
    while waiting:
        for x in eqns[waiting.pop()].invars:
            at = makers.get(x) if isinstance(x, Var) else None
            if at is None or at in found or eqns[at].effects:
                continue
            if jax.numpy.issubdtype(dtype_of(x), jax.dtypes.extended) or not any(isinstance(y, Var) for y in eqns[at].invars):
                found.add(at)
                waiting.append(at)
    return found


def _has_product(eqn: JaxprEqn) -> bool:
    inner = (each for body in subjaxprs(eqn) for each in opened(body)[0].eqns)
    return is_matrix(eqn.primitive.name) or any(map(_has_product, inner))
