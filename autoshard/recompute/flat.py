"""A program as one list of equations: calls inlined, dead code left out, each equation with its op of the graph."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr, DropVar, Jaxpr, JaxprEqn, Literal, Var

from autoshard.ir import Body, Op
from autoshard.lower import Path
from autoshard.primitives import is_inlined
from autoshard.trace import subjaxprs
from autoshard.trace.mapped import LEAVING, MAPPED
from autoshard.trace.origin import calls_library
from autoshard.trace.structure import opened

Atom = Var | Literal


@dataclass(frozen=True, slots=True, eq=False)
class Flat:
    """A program without calls.

    Attributes:
        inputs, outputs: its variables.
        constants: the variables of captured arrays, with these.
        eqns: its equations in order.
        ops: of each the op.
    """

    inputs: tuple[Var, ...]
    outputs: tuple[Atom, ...]
    constants: Mapping[Var, Any]
    eqns: tuple[JaxprEqn, ...]
    ops: tuple[Op, ...]

    def closed(self) -> ClosedJaxpr:
        """The program."""
        return ClosedJaxpr(jaxpr_of(self.inputs, self.outputs, self.eqns, [*self.constants]), [*self.constants.values()])


def jaxpr_of(inputs: Sequence[Var], outputs: Sequence[Atom], eqns: Sequence[JaxprEqn], constants: Sequence[Var] = ()) -> Jaxpr:
    """A jaxpr of these equations."""
    effects = frozenset().union(*(eqn.effects for eqn in eqns))
    return _empty().replace(constvars=[*constants], invars=[*inputs], outvars=[*outputs], eqns=[*eqns], effects=effects)


@cache
def _empty() -> Jaxpr:
    jaxpr = jax.make_jaxpr(lambda: ())().jaxpr
    return jaxpr.replace(debug_info=jaxpr.debug_info.with_unknown_names())


def flat(body: ClosedJaxpr | Jaxpr, ops: Mapping[Path, Op], path: Path = (), opens: Collection[str] = ()) -> Flat:
    """The program of a jaxpr whose equations' paths begin with ``path``.

    Args:
        opens: primitives that are taken for calls, too.
    """
    jaxpr, consts = opened(body)
    inlining = _Inlining(ops, opens)
    inlining.constants.update(zip(jaxpr.constvars, consts, strict=True))
    for eqn, here in _numbered(jaxpr, path):
        inlining.equation(eqn, here)
    outputs = tuple(inlining.renamed(jaxpr.outvars))
    return Flat(tuple(jaxpr.invars), outputs, inlining.constants, tuple(inlining.eqns), tuple(inlining.found))


def _numbered(jaxpr: Jaxpr, path: Path) -> Iterator[tuple[JaxprEqn, Path]]:
    return ((eqn, (*path, position)) for position, eqn in enumerate(jaxpr.eqns))


class _Inlining:
    """The equations inlined so far; variables of a call are new ones each time, since several calls share a body."""

    def __init__(self, ops: Mapping[Path, Op], opens: Collection[str]):
        self.ops, self._opens = ops, opens
        self.constants: dict[Var, Any] = {}
        self.eqns: list[JaxprEqn] = []
        self.found: list[Op] = []
        self._names: dict[Var, Atom] = {}
        self._captured: dict[int, Var] = {}

    def renamed(self, atoms: Sequence[Atom]) -> list[Atom]:
        """Atoms by their names in the whole program."""
        return [atom if isinstance(atom, Literal) else self._names.get(atom, atom) for atom in atoms]

    def equation(self, eqn: JaxprEqn, path: Path) -> None:
        """Appends an equation of the program itself."""
        eqn = eqn.replace(invars=self.renamed(eqn.invars))
        if self._is_call(eqn):
            self._names.update(zip(eqn.outvars, self._call(eqn, path), strict=True))
        elif (op := self._op(eqn, path)) is not None:
            self.eqns.append(eqn)
            self.found.append(op)

    def _is_call(self, eqn: JaxprEqn) -> bool:
        return is_inlined(eqn.primitive.name) or eqn.primitive.name in self._opens

    def _call(self, call: JaxprEqn, path: Path, in_library: bool = False) -> list[Atom]:
        """Appends the equations of a call; gives its results. Those of a library's function have the source line of its call."""
        (body,) = subjaxprs(call)
        jaxpr, consts = opened(body)
        in_library = in_library or calls_library(call)
        names: dict[Var, Atom] = dict(zip(jaxpr.invars, call.invars, strict=True))
        names |= {var: self._constant(var, value) for var, value in zip(jaxpr.constvars, consts, strict=True)}

        def renamed(atoms: Sequence[Atom]) -> list[Atom]:
            return [atom if isinstance(atom, Literal) else names.get(atom, atom) for atom in atoms]  # dead ones have no name

        for eqn, here in _numbered(jaxpr, (*path, 0)):
            stack = call.source_info.name_stack + eqn.source_info.name_stack
            made = [var if isinstance(var, DropVar) else Var(var.aval) for var in eqn.outvars]
            source = call.source_info if in_library else eqn.source_info
            inner = eqn.replace(invars=renamed(eqn.invars), source_info=source.replace(name_stack=stack))
            if self._is_call(eqn):
                names.update(zip(eqn.outvars, self._call(inner, here, in_library), strict=True))
            elif (op := self._op(eqn, here)) is not None:
                names.update(zip(eqn.outvars, made, strict=True))
                self.eqns.append(inner.replace(outvars=made))
                self.found.append(op)
        return [atom if isinstance(atom, Literal) else names.get(atom, atom) for atom in jaxpr.outvars]

    def _op(self, eqn: JaxprEqn, path: Path) -> Op | None:
        """The op of an equation; None for dead code. One for a shard_map, of which the graph has parts, has all of them in its body."""
        if eqn.primitive.name != MAPPED:
            return self.ops.get(path)
        inside = [replace(op, bodies=()) for at, op in self.ops.items() if at[: len(path)] == path]
        ends = {op.path[-1]: op for op in inside if op.path[:-1] == (*path, LEAVING)}
        if not ends:
            return None
        end = next(iter(ends.values()))
        results = tuple(ends.get(k, end).results[0] for k in range(len(eqn.outvars)))
        return replace(end, path=path, results=results, bodies=(Body((), (), tuple(inside)),))

    def _constant(self, var: Var, value: Any) -> Var:
        if id(value) not in self._captured:
            self._captured[id(value)] = Var(var.aval)
            self.constants[self._captured[id(value)]] = value
        return self._captured[id(value)]
