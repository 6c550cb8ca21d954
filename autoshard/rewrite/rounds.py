"""A list of equations whose regions are computed on packed rows: the first round in place, further rounds in loops.

A loop is at the point where others read what regions make; it computes all such results that are due then, with all that these are made of.
Results of the backward pass are due later than those of the forward pass, of which it reads: *levels* count how many loops come before.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import JaxprEqn, Literal, Var
from jax.extend.source_info_util import user_context

from autoshard.ir.naming import RARELY
from autoshard.lower import bind_unplaced
from autoshard.recompute.block import variables
from autoshard.recompute.flat import Atom
from autoshard.recompute.regions import Node, ordered
from autoshard.rewrite.packed import combined, enter, evaluated, leave, left, packed_type
from autoshard.rewrite.region import Region, entering, with_rows
from autoshard.rewrite.slots import Slots
from autoshard.trace import types_of


def in_rounds(
    eqns: Sequence[JaxprEqn],
    outputs: Sequence[Atom],
    regions: Sequence[Region],
    capacities: Sequence[int],
    turn: int,
    later: Collection[Var] = (),
) -> tuple[list[JaxprEqn], list[JaxprEqn]]:
    """The equations on packed rows, those before and from one of them on, in an order in which each comes after what it reads.

    Args:
        eqns, outputs: the program, and what is read after it.
        regions, capacities: the parts that are packed, and the slots of an expert of each.
        turn: the number of that equation, such as the first of a backward pass.
        later: inputs that are there from it on.
    """
    read = _read(eqns, outputs, regions)
    later = {*later, *(v for eqn in eqns[turn:] for v in eqn.outvars)}
    begin = [turn if region.sizes in later else 0 for region in regions]
    packing = [_Packing(eqns, *each, read) for each in zip(regions, capacities, begin, strict=True)]
    taken = {k for region in regions for k in region.steps.keys() - region.begun}
    _place_loops(eqns, packing, taken, turn)
    kept = [Node(k, eqn) for k, eqn in enumerate(eqns) if k not in taken and (eqn.effects or not read.isdisjoint(eqn.outvars))]
    nodes = [*kept, *(node for each in packing for node in each.nodes())]
    first, last = ([node for node in nodes if (node.place < turn) == before] for before in (True, False))
    return ordered(first), ordered(last)


def _read(eqns: Sequence[JaxprEqn], outputs: Sequence[Atom], regions: Sequence[Region]) -> set[Var]:
    """The values that are read as they are, rather than packed."""
    found = {*variables(outputs)}
    for region in regions:
        found.update((region.sizes, *(v for v, _ in entering(region, eqns))))
        for k, step in region.steps.items():
            found.update(v for v, dim in zip(eqns[k].invars, step.reads, strict=True) if dim is None and isinstance(v, Var))
    taken = {k for region in regions for k in region.steps.keys() - region.begun}
    for k in reversed(range(len(eqns))):
        if k not in taken and (eqns[k].effects or not found.isdisjoint(eqns[k].outvars)):
            found.update(variables(eqns[k].invars))
    return found


def _place_loops(eqns: Sequence[JaxprEqn], packing: Sequence[_Packing], taken: Collection[int], turn: int) -> None:
    """Gives each result of a region the loop of its level; from ``turn`` on these come after all before it."""
    level: dict[Var, int] = {}
    least = 0
    for k, eqn in enumerate(eqns):
        if k == turn:
            least = max(level.values(), default=0)
        made = max((level.get(v, 0) for v in variables(eqn.invars)), default=0)
        for each in packing:
            if k in each.region.steps:
                each.due(k, level, least)
        if k not in taken:
            level.update(dict.fromkeys(eqn.outvars, made))


@dataclass
class _Loop:
    """The further rounds of results that are due at one level.

    Attributes:
        results: the numbers of the equations that make them of all rows.
        rows: packed values that are read in sorted order.
        first: per result or such value what the first round makes of it.
    """

    results: list[int] = field(default_factory=list)
    rows: list[Var] = field(default_factory=list)
    first: dict[Var, Var] = field(default_factory=dict)


class _Packing:
    """The equations of one region on packed rows.

    Args:
        eqns: the whole program's.
        region: the part that is packed.
        capacity: the slots of an expert.
        begin: the number of the equation from which on sizes are known.
        read: the values that are read as they are.
    """

    def __init__(self, eqns: Sequence[JaxprEqn], region: Region, capacity: int, begin: int, read: Collection[Var]):
        self.eqns, self.region, self.capacity, self.begin, self.read = eqns, region, capacity, begin, read
        self.loops: dict[int, _Loop] = {}
        self._level: dict[Var, int] = {}
        self._packed: dict[tuple[Var, int], Var] = {}
        self._index, self._slot = _variables(self._known, [region.sizes])

    def due(self, k: int, level: dict[Var, int], least: int) -> None:
        """Notes at which level, ``least`` or higher, the results of a step are due, and sets their own."""
        step, eqn = self.region.steps[k], self.eqns[k]
        made = [v for v, _ in self._made(k)]
        given = [self.region.sizes, *(v for v in variables(eqn.invars) if v not in made)]
        now = max([least, *(self._level[v] for v in made), *(level.get(v, 0) for v in given)])
        for v, dim in zip(eqn.outvars, step.makes, strict=True):
            if dim is not None:
                self._level[v] = now
            if k not in self.region.begun and v in self.read:
                loop, level[v] = self.loops.setdefault(now, _Loop()), now + 1
                loop.first[v] = Var(v.aval) if self.capacity < self.region.rows else v
                if dim is None:
                    loop.results.append(k)
                else:
                    loop.rows.append(v)

    # -- the first round ---------------------------------------------------------------------------------------------------

    def nodes(self) -> list[Node]:
        """The equations, each with the number of the one that it replaces."""
        region, eqns = self.region, self.eqns
        first = min(region.steps)
        found = [Node(max(first, self.begin), _call(eqns[first], self._known, [region.sizes], [self._index, self._slot]))]
        for (v, dim), k in entering(region, eqns).items():
            found.append(self._node(k, lambda slots, x, dim=dim: [enter(x, dim, slots)], [v], [self._name(v, dim)]))
        firsts = {v: name for loop in self.loops.values() for v, name in loop.first.items()}
        for k, step in region.steps.items():
            eqn = eqns[k]
            reads = [v if dim is None else self._name(v, dim) for v, dim in self._operands(k)]
            both = zip(eqn.outvars, step.makes, strict=True)
            made = [firsts.get(v, Var(v.aval)) if dim is None else self._name(v, dim) for v, dim in both]
            found.append(self._node(k, lambda slots, *x, eqn=eqn, step=step: evaluated(eqn, step, x, slots), reads, made))
            for v, dim in with_rows(eqn.outvars, step.makes):
                if v in firsts:
                    found.append(self._node(k, lambda slots, x, dim=dim: [leave(x, dim, slots)], [self._name(v, dim)], [firsts[v]]))
        return [*found, *(self._looped(loop) for loop in self.loops.values() if self.capacity < region.rows)]

    def _known(self, sizes: Any) -> list[Any]:
        slots = Slots(sizes, self.region.rows, self.capacity)
        return [slots.index, slots.slot]

    def _name(self, v: Var, dim: int) -> Var:
        """The variable of a packed value."""
        if (v, dim) not in self._packed:
            self._packed[v, dim] = Var(packed_type(v, self.region.experts, self.capacity, dim))
        return self._packed[v, dim]

    def _node(self, k: int, function: Callable[..., list[Any]], reads: Sequence[Atom], made: Sequence[Var]) -> Node:
        def called(sizes: Any, index: Any, slot: Any, *operands: Any) -> list[Any]:
            return function(Slots(sizes, self.region.rows, self.capacity).known(index, slot), *operands)

        return Node(max(k, self.begin), _call(self.eqns[k], called, [self.region.sizes, self._index, self._slot, *reads], made))

    # -- further rounds ----------------------------------------------------------------------------------------------------

    def _looped(self, loop: _Loop) -> Node:
        """The further rounds of a loop's results, as one equation."""
        steps = self._made_of(loop)
        keys = [*loop.first]
        inside = {v for k in steps for v, _ in self._made(k)}
        given = [*dict.fromkeys(v for k in steps for v in variables(self.eqns[k].invars) if v not in inside)]
        casts = self._casts(given)
        plain: list[Any] = [*dict.fromkeys(casts[v].invars[0] if v in casts else v for v in given)]

        def function(sizes: Any, *arrays: Any) -> list[Any]:
            given = dict(zip(plain, arrays, strict=False))
            slots = Slots(sizes, self.region.rows, self.capacity)
            rounds = slots.rounds

            def more(carry: tuple) -> Any:
                return carry[0] < rounds

            def one(carry: tuple) -> tuple:
                wide = {v: lax.optimization_barrier((given[eqn.invars[0]], carry[0]))[0] for v, eqn in casts.items()}
                values = given | {v: bind_unplaced(casts[v], [x])[0] for v, x in wide.items()}
                now = Slots(sizes, self.region.rows, self.capacity, carry[0])
                return carry[0] + 1, *self._round(steps, loop, values, dict(zip(keys, carry[1:], strict=True)), now)

            def looped(*first: Any) -> list[Any]:
                return [*lax.while_loop(more, one, (jnp.ones((), slots.sizes.dtype), *first))[1:]]

            with jax.named_scope(RARELY):
                return lax.cond(rounds > 1, looped, lambda *first: [*first], *arrays[len(plain) :])

        last = max(steps)
        source = next((self.eqns[k] for k in steps if self.region.steps[k].kind == "product"), self.eqns[last])
        return Node(max(last, self.begin), _call(source, function, [self.region.sizes, *plain, *loop.first.values()], keys))

    def _casts(self, given: Sequence[Var]) -> dict[Var, JaxprEqn]:
        """The casts among what steps read, such as of weights, which a round repeats: for a loop that rarely runs they need not be stored.

        A barrier keeps compilers from casting before the loop.
        """
        made = {v: eqn for eqn in self.eqns if eqn.primitive.name == "convert_element_type" for v in eqn.outvars}
        return {v: made[v] for v in given if v in made and isinstance(made[v].invars[0], Var)}

    def _round(self, steps: Iterable[int], loop: _Loop, values: dict[Var, Any], carry: dict[Var, Any], slots: Slots) -> list[Any]:
        """The results of a loop after one more round."""
        packed: dict[tuple[Var, int], Any] = {}
        results: dict[Var, Any] = {}

        def operand(v: Any, dim: int | None) -> Any:
            if isinstance(v, Literal):
                return v.val
            if dim is None:
                return values[v]
            if (v, dim) not in packed:
                packed[v, dim] = enter(values[v], dim, slots)
            return packed[v, dim]

        for k in steps:
            eqn, step = self.eqns[k], self.region.steps[k]
            operands = [operand(v, dim) for v, dim in self._operands(k)]
            if step.kind == "scatter":
                operands[0] = carry[eqn.outvars[0]]
            with user_context(eqn.source_info.traceback, name_stack=eqn.source_info.name_stack):
                made = evaluated(eqn, step, operands, slots)
            for v, dim, x in zip(eqn.outvars, step.makes, made, strict=True):
                if dim is not None:
                    packed[v, dim] = x
                elif v in carry:
                    results[v] = combined(eqn, step, carry[v], x, operands, slots)
        for v in loop.rows:
            dim = self.region.dims[v]
            results[v] = left(carry[v], leave(packed[v, dim], dim, slots), dim, slots)
        return [results[v] for v in carry]

    def _operands(self, k: int) -> list[tuple[Any, int | None]]:
        return [*zip(self.eqns[k].invars, self.region.steps[k].reads, strict=True)]

    def _made(self, k: int) -> list[tuple[Var, int]]:
        """Those of a step's operands that the region makes."""
        reads = with_rows(self.eqns[k].invars, self.region.steps[k].reads)
        return [(v, dim) for v, dim in reads if self.region.makes(v, dim)]

    def _made_of(self, loop: _Loop) -> list[int]:
        """The equations that a loop's results are made of, in order."""
        makers = {v: k for k, step in self.region.steps.items() for v, _ in with_rows(self.eqns[k].outvars, step.makes)}
        waiting = [*loop.results, *(makers[v] for v in loop.rows)]
        found: set[int] = set()
        while waiting:
            k = waiting.pop()
            if k not in found:
                found.add(k)
                waiting += (makers[v] for v, _ in self._made(k))
        return sorted(found)


def _variables(function: Callable[..., list[Any]], atoms: Sequence[Atom]) -> list[Var]:
    """New variables for the results of a function."""
    return [Var(aval) for aval in jax.make_jaxpr(function)(*types_of(atoms)).out_avals]


def _call(eqn: JaxprEqn, function: Callable[..., Sequence[Any]], atoms: Sequence[Atom], made: Sequence[Var]) -> JaxprEqn:
    """A call of a function in place of an equation: with its source and names."""
    with user_context(eqn.source_info.traceback, name_stack=eqn.source_info.name_stack):
        (call,) = jax.make_jaxpr(jax.jit(function))(*types_of(atoms)).eqns
    return call.replace(invars=[*atoms], outvars=[*made])
