"""Equations of the program of each device: what they depend on, and their evaluation."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import JaxprEqn, Literal, Var
from jax.extend.source_info_util import current_name_stack, user_context

from autoshard.lower import bind, manual_context
from autoshard.primitives import commutes_with_casts, is_view
from autoshard.trace import subjaxprs
from autoshard.trace.mapped import has_effects
from autoshard.trace.structure import entering, opened


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


def handed_dtypes(variables: Iterable[Any], eqns: Iterable[JaxprEqn], outputs: Iterable[tuple[Any, Any]]) -> list[Any]:
    """The dtype in which each variable is handed on to a program: the narrower float that all readers there cast it to, or its own.

    Their numbers are equal: casts commute with what rearranges an array, and rounding twice is rounding once.

    Args:
        outputs: of the program, each with the dtype in which it is taken.
    """
    program = _Readers(eqns, outputs)
    return [_narrowed(var.aval.dtype, set(program.dtypes(var))) for var in variables]


def as_they_are(atoms: Iterable[Any]) -> Iterator[tuple[Any, Any]]:
    """Atoms, each with its own dtype."""
    return ((atom, _dtype(atom)) for atom in atoms)


def _dtype(atom: Any) -> Any:
    return atom.aval.dtype


def _narrowed(own: Any, read: set[Any]) -> Any:
    """The dtype of an array that is read as these dtypes."""
    is_cast = len(read) == 1 and all(jnp.issubdtype(each, jnp.floating) for each in (own, *read))
    return min(own, *read, key=lambda each: each.itemsize) if is_cast else own


class _Readers:
    """The equations that read each variable of a program."""

    def __init__(self, eqns: Iterable[JaxprEqn], outputs: Iterable[tuple[Any, Any]]):
        self.outputs: dict[Any, list[Any]] = {}
        for atom, dtype in outputs:
            if is_var(atom):
                self.outputs.setdefault(atom, []).append(dtype)
        self.eqns: dict[Any, list[JaxprEqn]] = {}
        for eqn in eqns:
            for var in dict.fromkeys(filter(is_var, eqn.invars)):
                self.eqns.setdefault(var, []).append(eqn)

    def dtypes(self, var: Any) -> Iterator[Any]:
        """Per reader of a variable the dtype that it casts it to, or else its own dtype."""
        own = _dtype(var)
        yield from self.outputs.get(var, ())
        for eqn in self.eqns.get(var, ()):
            name = eqn.primitive.name
            if bodies := subjaxprs(eqn):
                inputs = entering(eqn)
                if not {k for each in inputs for k in each}.issuperset(k for k, atom in enumerate(eqn.invars) if atom is var):
                    yield own
                for body, positions in zip(bodies, inputs, strict=True):
                    inner = opened(body)[0]
                    program = _Readers(inner.eqns, as_they_are(inner.outvars))
                    for k, each in zip(positions, inner.invars, strict=True):
                        if k is not None and eqn.invars[k] is var:
                            yield from program.dtypes(each)
            elif name == "convert_element_type":
                yield _dtype(eqn.outvars[0])
            elif (is_view(name) or commutes_with_casts(name)) and _dtype(eqn.outvars[0]) == own:
                for each in eqn.outvars:
                    yield from self.dtypes(each)
            else:
                yield own


def evaluate(eqns: Iterable[JaxprEqn], env: dict[Var, Any]) -> None:
    """Evaluates equations of a device's program; their results are then in ``env``."""
    for eqn in eqns:
        names = current_name_stack() + eqn.source_info.name_stack
        with user_context(eqn.source_info.traceback, name_stack=names), manual_context(eqn):
            results = bind(eqn, [value(atom, env) for atom in eqn.invars])
        env.update(zip(eqn.outvars, results, strict=True))
