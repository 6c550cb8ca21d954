"""Experts without a capacity as experts with one: rows that are sorted by expert are packed, so that the search can split experts.

The boundaries of groups of `jax.lax.ragged_dot` are data, and so neither rows nor experts can be split. Packed, each expert has as many
slots as the user's ``balance`` says, products are batched over experts, and the way to and from the slots is a lookup: a layer with a
capacity, for which the search finds expert parallelism. Nothing is dropped: rows for which an expert has no slot are computed in further
rounds of a loop, which has no trip where loads are within the balance. So a step takes longer where they are not, and its results are
always the same.

The first round is part of the program around, and what it makes is there for the backward pass. A further round of the backward pass
computes its rows of the forward pass again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from jax.extend.core import ClosedJaxpr, JaxprEqn, Var

from autoshard.cluster import Cluster
from autoshard.errors import TraceError
from autoshard.ir import Op, Rule
from autoshard.ir.rewrites import PackedExperts
from autoshard.ir.scan import num_carry
from autoshard.lower import Path, ops_by_path
from autoshard.recompute.block import turning_point
from autoshard.recompute.flat import Atom, Flat, flat
from autoshard.recompute.loops import Pair, pairs
from autoshard.recompute.regions import jaxpr_of
from autoshard.rewrite.grouped_kernels import with_grouped_products
from autoshard.rewrite.options import Rewriting
from autoshard.rewrite.packed import is_packable
from autoshard.rewrite.region import GROUPED, regions_of
from autoshard.rewrite.rounds import in_rounds
from autoshard.rewrite.slots import capacity_of
from autoshard.rules import rules_of
from autoshard.trace import Traced, rebuilt, subjaxprs
from autoshard.trace.structure import around, opened


def packed_experts(rewrite: PackedExperts, traced: Traced) -> Traced:
    """The program on packed rows.

    Raises:
        TraceError: it has no products that are grouped by experts.
    """
    traced = with_grouped_products(traced)
    program = _Program(ops_by_path(traced.graph), rules_of(traced.graph), rewrite.balance)
    jaxpr = program.scope(traced.jaxpr, ())
    if jaxpr is None:
        raise TraceError(f"rows of experts are packed for products by experts, and {traced.graph.name!r} has none. Search again.")
    said = replace(rewrite, packed=tuple(dict.fromkeys(program.packed))).describe()
    return rebuilt(traced, jaxpr, rewrite, notes=(said,))


def proposals(traced: Traced, cluster: Cluster, rewriting: Rewriting) -> Sequence[PackedExperts]:
    """Packed rows, where the program has products by experts that can be."""
    if rewriting.balance is None:
        return ()
    traced = with_grouped_products(traced)
    program = _Program(ops_by_path(traced.graph), rules_of(traced.graph), rewriting.balance)
    if program.scope(traced.jaxpr, ()) is None:
        return ()
    return (PackedExperts(rewriting.balance, tuple(dict.fromkeys(program.packed))),)


@dataclass(frozen=True)
class _Program:
    """A program whose bodies are rewritten.

    Attributes:
        ops, rules: its ops by their paths, and their rules.
        balance: that of the loads.
        packed: the experts and slots of regions so far.
    """

    ops: Mapping[Path, Op]
    rules: Sequence[Rule | None]
    balance: float
    packed: list[tuple[int, int]] = field(default_factory=list)

    def scope(self, body: Any, path: Path) -> ClosedJaxpr | None:
        """A body on packed rows; None where nothing is."""
        if not any(op.primitive == GROUPED and at[: len(path)] == path for at, op in self.ops.items()):
            return None
        whole = flat(body, self.ops, path)
        loops = self._loops(whole)
        eqns = [loops[k] if k in loops else self._equation(eqn, op) for k, (eqn, op) in enumerate(zip(whole.eqns, whole.ops, strict=True))]
        if all(new is old for new, old in zip(eqns, whole.eqns, strict=True)) and not any(map(_is_grouped, eqns)):
            return None
        rewritten, _ = self._packed(eqns, whole.ops, whole.outputs, len(eqns))
        inner = jaxpr_of(whole.inputs, whole.outputs, rewritten, tuple(whole.constants))
        return ClosedJaxpr(inner, [*whole.constants.values()])

    def _packed(
        self, eqns: Sequence[JaxprEqn], ops: Sequence[Op], outputs: Sequence[Atom], turn: int, later: Sequence[Var] = ()
    ) -> tuple[list[JaxprEqn], list[JaxprEqn]]:
        """The equations before and from ``turn`` on, on packed rows."""
        regions = regions_of(eqns, ops, self.rules, is_packable)
        slots = [capacity_of(region.rows, region.experts, self.balance) for region in regions]
        self.packed.extend((region.experts, capacity) for region, capacity in zip(regions, slots, strict=True))
        return in_rounds(eqns, outputs, regions, slots, turn, later)

    def _loops(self, whole: Flat) -> dict[int, JaxprEqn]:
        """Scans and those that differentiate them, by their numbers, where both have products by experts: what a trip keeps is packed."""
        found: dict[int, JaxprEqn] = {}
        if sum(eqn.primitive.name == "scan" for eqn in whole.eqns) < 2:
            return found
        turn, _ = turning_point(whole.eqns, whole.ops)
        for pair in pairs(whole, turn, self.ops):
            if any(map(_is_grouped, pair.one.eqns)) and any(map(_is_grouped, pair.other.eqns)):
                found[pair.first], found[pair.last] = self._pair(pair)
        return found

    def _pair(self, pair: Pair) -> tuple[JaxprEqn, JaxprEqn]:
        """Both scans of a pair, whose trips are packed as one list of equations."""
        pair = pair.joined()
        block, n_carry = pair.block, num_carry(pair.forward.params)
        eqns = [self._equation(eqn, op) for eqn, op in zip(block.eqns, block.ops, strict=True)]
        kept = [v for k, v in enumerate(pair.one.outputs) if k < n_carry or k in pair.returned]
        forward, backward = self._packed(eqns, block.ops, [*kept, *pair.results], block.turn, pair.other.inputs)
        one, other = (replace(body, eqns=tuple(new), ops=()) for body, new in ((pair.one, forward), (pair.other, backward)))
        packed = replace(pair, one=one, other=other)
        return packed.rewritten(packed.block.needed)

    def _equation(self, eqn: JaxprEqn, op: Op) -> JaxprEqn:
        """An equation with its bodies on packed rows."""
        bodies = subjaxprs(eqn)
        found = [self.scope(body, (*op.path, number)) for number, body in enumerate(bodies)] if op.bodies else []
        if not any(found):
            return eqn
        return around(eqn, [opened(old)[0] if new is None else new.jaxpr for new, old in zip(found, bodies, strict=True)])


def _is_grouped(eqn: JaxprEqn) -> bool:
    return eqn.primitive.name == GROUPED
