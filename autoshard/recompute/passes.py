"""The two passes of a traced step: where the forward pass ends, and which loops of it the backward pass differentiates."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from jax.extend.core import JaxprEqn

from autoshard.lower import ops_by_path
from autoshard.recompute.block import Block, turning_point, variables
from autoshard.recompute.flat import Flat, flat
from autoshard.recompute.loops import Pair, pairs
from autoshard.trace import Traced
from autoshard.trace.structure import subjaxprs


@dataclass(frozen=True)
class Passes:
    """The list of equations that has the forward and the backward pass: the program's, or those of a loop's body.

    Attributes:
        path: of that body; () for the program itself.
        whole: the list.
        turn: how many of them are the forward pass.
        pairs: the loops of the forward pass with those that differentiate them.
        alive_bytes: what is held between the passes.
    """

    path: tuple[int, ...]
    whole: Flat
    turn: int
    pairs: tuple[Pair, ...]
    alive_bytes: float

    @classmethod
    def at(cls, traced: Traced, path: tuple[int, ...] = (), turn: int | None = None, opens: Collection[str] = ()) -> Passes:
        """Those of a body.

        Args:
            turn: the turning point; None finds it.
            opens: as for `flat`.
        """
        ops = ops_by_path(traced.graph)
        body = subjaxprs(traced.jaxpr.jaxpr.eqns[path[0]])[path[1]] if path else traced.jaxpr
        whole = flat(body, ops, path, opens)
        found, alive = turning_point(whole.eqns, whole.ops) if turn is None else (turn, 0.0)
        return cls(path, whole, found, tuple(pairs(whole, found, ops, opens)), alive)

    @classmethod
    def of(cls, traced: Traced) -> Passes:
        """Those between which most bytes are held."""
        loops = [(*op.path, 0) for op in traced.graph.ops if op.primitive == "scan" and len(op.path) == 1]
        return max((cls.at(traced, path) for path in ((), *loops)), key=lambda passes: passes.alive_bytes)

    def block(self, scans: Mapping[int, JaxprEqn]) -> Block:
        """The passes, with some of their scans rewritten."""
        eqns = self.equations(scans)
        checkpoints = [eqn for eqn in eqns[self.turn :] if eqn.primitive.name == "remat2"]  # the user's
        reading = (eqn.invars for eqn in (*scans.values(), *checkpoints))
        returned = frozenset(v for atoms in (self.whole.outputs, *reading) for v in variables(atoms))
        return Block(eqns, self.whole.ops, self.turn, (), returned, frozenset(self.whole.constants))

    def equations(self, scans: Mapping[int, JaxprEqn]) -> tuple[JaxprEqn, ...]:
        """The list, with some of its scans, by their numbers, rewritten."""
        return tuple(scans.get(k, eqn) for k, eqn in enumerate(self.whole.eqns))
