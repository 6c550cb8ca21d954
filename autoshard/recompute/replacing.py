"""A program without the user's own checkpoints: what these compute again is what the forward pass made, and is read from there.

JAX differentiates a `jax.checkpoint` into one equation of the backward pass that runs the forward equations again. Opened, these equal
those of the forward pass, and one of each is left.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from jax.extend.core import JaxprEqn, Literal, Var

from autoshard.ir import Op
from autoshard.recompute.flat import Atom
from autoshard.recompute.loops import Pair
from autoshard.recompute.passes import Passes
from autoshard.trace import Traced, rebuilt
from autoshard.trace.structure import subjaxprs

CHECKPOINT = frozenset({"remat2"})


def checkpoints(traced: Traced) -> list[Op]:
    """The user's own checkpoints, where something is computed again."""
    return [op for op in traced.graph.walk() if op.primitive in CHECKPOINT and op.params["differentiated"]]


def without_checkpoints(traced: Traced) -> Traced:
    """The program that keeps what its checkpoints compute again, in layers and in loops over layers; results are the same."""
    if not any(op.primitive in CHECKPOINT for op in traced.graph.walk()):
        return traced
    passes = Passes.at(traced, opens=CHECKPOINT)
    whole, loops = passes.whole, dict[int, JaxprEqn]()
    outside = _numbered(whole.eqns[: passes.turn])
    for pair in passes.pairs:
        merged = _merged(pair, outside)
        loops[pair.first], loops[pair.last] = merged.rewritten(merged.block.needed)
    eqns, _, names = _unique(passes.equations(loops), whole.ops)
    made = replace(whole, outputs=tuple(_renamed(whole.outputs, names)), eqns=tuple(eqns))
    return rebuilt(traced, made.closed())


def _merged(pair: Pair, outside: Mapping[tuple, Sequence[Var]]) -> Pair:
    """A pair of loops whose backward body reads from the forward body what it computed again.

    Args:
        outside: the results of equations around the loops, by what they compute: JAX moves a mask out of the forward loop, and the backward
            one makes it again.
    """
    pair = pair.joined()
    block, n = pair.block, len(pair.one.eqns)
    constants = {operand: v for v, operand, is_const in pair.outer(False) if is_const and isinstance(operand, Var)}
    eqns, ops, names = _unique(block.eqns, block.ops, n, outside, constants)
    outputs = tuple(_renamed(_renamed(pair.other.outputs, pair.read), names))
    return replace(pair, other=replace(pair.other, eqns=tuple(eqns[n:]), ops=tuple(ops[n:]), outputs=outputs))


def _unique(
    eqns: Sequence[JaxprEqn],
    ops: Sequence[Op],
    first: int = 0,
    outside: Mapping[tuple, Sequence[Var]] | None = None,
    constants: Mapping[Var, Var] | None = None,
) -> tuple[list[JaxprEqn], list[Op], dict[Var, Atom]]:
    """The equations of which no earlier one is the same, their ops, and the names of others' results.

    Args:
        first: how many are kept in any case.
        outside: the results of equations around these, by what they compute.
        constants: of these results the names here.
    """
    names: dict[Var, Atom] = {}
    known: dict[Var, Var] = {v: outer for outer, v in (constants or {}).items()}  # per variable that of the same value outside
    made: dict[tuple[Any, ...], Sequence[Var]] = {}
    found: list[JaxprEqn] = []
    kept: list[Op] = []
    for k, (eqn, op) in enumerate(zip(eqns, ops, strict=True)):
        eqn = eqn.replace(invars=_renamed(eqn.invars, names))
        key = _key(eqn, known)
        outer = () if outside is None or key is None else outside.get(key, ())
        known.update(zip(eqn.outvars, outer, strict=False))
        before = made.get(key) if key is not None else None
        if constants and outer and all(v in constants for v in outer):
            before = [constants[v] for v in outer]
        if k >= first and before is not None:
            names.update(zip(eqn.outvars, before, strict=True))
            continue
        if key is not None:
            made.setdefault(key, eqn.outvars)
        found.append(eqn)
        kept.append(op)
    return found, kept, names


def _numbered(eqns: Sequence[JaxprEqn]) -> dict[tuple, Sequence[Var]]:
    """The results of equations, by what they compute."""
    found: dict[tuple[Any, ...], Sequence[Var]] = {}
    known: dict[Var, Var] = {}
    for eqn in eqns:
        if (key := _key(eqn, known)) is not None:
            known.update(zip(eqn.outvars, found.setdefault(key, eqn.outvars), strict=True))
    return found


def _key(eqn: JaxprEqn, known: Mapping[Var, Var]) -> tuple | None:
    """What an equation computes; None where that is not compared."""
    if eqn.effects or subjaxprs(eqn):
        return None
    atoms = eqn.invars
    operands = tuple((str(x.aval), repr(x.val)) if isinstance(x, Literal) else (id(known.get(x, x)),) for x in atoms)
    return eqn.primitive.name, operands, tuple(sorted((name, repr(value)) for name, value in eqn.params.items()))


def _renamed(atoms: Sequence[Atom], names: Mapping[Var, Atom]) -> list[Atom]:
    return [names.get(atom, atom) if isinstance(atom, Var) else atom for atom in atoms]
